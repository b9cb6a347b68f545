"""Who has the devices when: the moves between engines and models that share them, in order."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from skyrl_train.errors import EngineError
from skyrl_train.weight_sync import DeviceSharing
from tests.support.shared_engines import engines


class FakeGroup:
    """The ranks of a model."""

    def __init__(self, role: str, moves: list[str]) -> None:
        self.role, self._moves = role, moves

    def onload(self, optimizer: bool) -> None:
        self._moves.append(f"{self.role} onload" + " with optimizer" * optimizer)

    def offload(self) -> None:
        self._moves.append(f"{self.role} offload")

    def release(self) -> None:
        self._moves.append(f"{self.role} release")


class Shared:
    """Engines, a policy and a reference on the same devices."""

    def __init__(self, folder: Path, *, shared: bool = True, moves: bool = True) -> None:
        self.moves: list[str] = []
        self.record = folder / "turns.jsonl"
        self.num_waits = 0
        self.turns = DeviceSharing(
            lambda: engines(self.moves), shared=shared, moves=moves, record_file=self.record, wait_ready=self.wait_ready
        )
        self.turns.models()
        for role in ("policy", "reference"):
            group = FakeGroup(role, self.moves)
            self.turns.add(role, group.onload, group.offload, group.release)

    def wait_ready(self) -> None:
        self.num_waits += 1

    def told(self) -> list[str]:
        """Since the last call."""
        told = list(self.moves)
        self.moves.clear()
        return told


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path)


def test_engines_sleep_before_a_model_is_loaded_and_each_model_leaves_when_it_is(shared: Shared) -> None:
    assert shared.told() == ["sleep", "policy offload", "reference offload"]


def test_a_step_moves_each_in_its_turn(shared: Shared) -> None:
    turns = shared.turns
    with turns.syncing():
        assert shared.told()[3:] == ["policy onload", "wake_up weights"]
    assert not turns.engines_serve
    turns.engines()
    assert shared.told() == ["policy offload", "wake_up kv_cache"]
    assert turns.engines_serve
    turns.engines()
    assert shared.told() == []
    turns.models("policy")
    assert shared.told() == ["sleep", "policy onload"]
    turns.models("reference")
    assert shared.told() == ["policy offload", "reference onload"]
    turns.models("policy", optimizer=True, trains=True)
    turns.models("policy", optimizer=True, trains=True)
    assert shared.told() == ["reference offload", "policy onload with optimizer"]
    with turns.syncing():
        assert shared.told() == ["wake_up weights"], "the policy is there already"
    assert len(shared.record.read_text().splitlines()) == 14, "one line each"


def test_two_models_are_there_together_where_one_takes_the_others_weights(shared: Shared) -> None:
    shared.told()
    shared.turns.models("reference", "policy")
    assert shared.told() == ["reference onload", "policy onload"]


def test_an_engine_started_anew_catches_up_beside_the_others_unless_the_policy_has_trained(shared: Shared) -> None:
    turns, engine = shared.turns, engines(shared.moves, "one engine: ")
    with turns.syncing():
        pass
    turns.engines()
    shared.told()
    with turns.catching_up(engine) as possible:
        assert possible
        assert shared.told() == ["policy onload"]
    assert shared.told() == ["policy offload"]
    turns.models("policy", optimizer=True, trains=True)
    shared.told()
    with turns.catching_up(engine) as possible:
        assert not possible
    assert shared.told() == ["one engine: sleep"], "as the others"


def test_who_shares_nothing_never_moves(tmp_path: Path) -> None:
    alone = Shared(tmp_path, shared=False)
    with alone.turns.syncing():
        pass
    alone.turns.engines()
    alone.turns.models("policy", optimizer=True, trains=True)
    assert alone.told() == []
    assert alone.turns.weights_moved
    assert alone.turns.engines_serve
    assert not alone.record.exists()


def test_where_all_fit_turns_are_taken_and_nothing_moves(tmp_path: Path) -> None:
    together = Shared(tmp_path, moves=False)
    turns = together.turns
    assert together.num_waits == 1, "an engine measures what is free before models come"
    assert together.told() == ["policy release", "reference release"]
    with turns.syncing():
        assert not turns.engines_serve
    turns.engines()
    assert turns.engines_serve
    assert together.told() == ["policy release"]
    turns.models("reference")
    assert not turns.engines_serve
    turns.models("policy", optimizer=True, trains=True)
    assert together.told() == ["reference release"], "what it computed in is free for the next"
    with turns.catching_up(engines(together.moves, "one engine: ")) as possible:
        assert not possible
    turns.engines()
    assert together.told() == ["policy release"]
    assert not together.record.exists()


def test_an_engine_is_started_again_where_no_model_is_and_none_comes_meanwhile(shared: Shared) -> None:
    turns, given_up, begun = shared.turns, threading.Event(), threading.Event()
    order: list[str] = []

    def start_engine() -> None:
        try:
            with turns.starting_engine(given_up.is_set):
                order.append("starts")
                begun.set()
                time.sleep(0.3)
                order.append("started")
        except EngineError as error:
            order.append(str(error))

    turns.models("policy", optimizer=True)
    thread = threading.Thread(target=start_engine)
    thread.start()
    time.sleep(0.2)
    assert order == [], "the policy is on the device"
    turns.engines()
    assert begun.wait(60)
    shared.told()
    turns.models("policy")
    assert order == ["starts", "started"]
    assert shared.told() == ["sleep", "policy onload"]
    thread.join()
    given_up.set()
    start_engine()
    assert order[2:] == ["the engines were closed"]
