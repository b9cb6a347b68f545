"""Engines that write down when they sleep and wake."""

from __future__ import annotations

from skyrl_train.endpoints import LocalEndpoint
from skyrl_train.weight_sync import UpdatableEngine


class FakeEngine(UpdatableEngine):
    """An engine that says what it was told."""

    def __init__(self, moves: list[str], who: str = "") -> None:
        self._moves, self._who = moves, who

    def sleep(self) -> None:
        self._moves.append(f"{self._who}sleep")

    def wake_up(self, tag: str) -> None:
        self._moves.append(f"{self._who}wake_up {tag}")


def engines(moves: list[str], who: str = "") -> LocalEndpoint[UpdatableEngine]:
    return LocalEndpoint(FakeEngine(moves, who))
