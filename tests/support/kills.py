"""A process that dies at a chosen point of a step."""

from __future__ import annotations


class Killed(BaseException):
    """Stands for kill -9: nothing of ours may catch it."""


def killed_in(phase_step: int, purpose: str):
    seen = {"eval": 0}

    def on_call(step: int, current: str) -> None:
        if current == "eval":
            seen["eval"] += 1
        if current == purpose and (seen["eval"] if purpose == "eval" else step) == phase_step:
            raise Killed

    return on_call
