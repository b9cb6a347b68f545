"""Ranks that meet, each on a thread: a failure is known everywhere before anybody waits in the next collective."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from skyrl_train.errors import RankOutOfMemory, SkyrlTrainError
from skyrl_train.memory.oom_consensus import OomConsensus

NUM_COLLECTIVES = 6
DEADLINE_S = 20.0


class Ranks:
    """`meet` of two ranks, and a collective that both have to reach."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=DEADLINE_S)
        self._said: dict[int, int] = {}

    def meet(self, rank: int) -> Callable[[int], int]:
        def largest(code: int) -> int:
            self._said[rank] = code
            self._barrier.wait()
            found = max(self._said.values())
            self._barrier.wait()
            return found

        return largest

    def collective(self) -> None:
        self._barrier.wait()


def outcomes(fails: dict[int, tuple[int, Exception]]) -> list[str]:
    """What becomes of each rank where rank r raises before collective n: `fails[r] = (n, error)`."""
    ranks = Ranks()

    def run(rank: int) -> str:
        together = OomConsensus(ranks.meet(rank))

        def work() -> str:
            for number in range(NUM_COLLECTIVES + 1):
                if rank in fails and fails[rank][0] == number:
                    raise fails[rank][1]
                if number < NUM_COLLECTIVES:
                    together.before_collective()
                    ranks.collective()
            return "finished"

        try:
            return together.run(work)
        except RankOutOfMemory as failure:
            return f"out of memory: {failure.reason}"
        except (SkyrlTrainError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def test_ranks_that_are_well_finish() -> None:
    assert outcomes({}) == ["finished", "finished"]


@pytest.mark.parametrize("number", range(NUM_COLLECTIVES + 1))
def test_memory_that_runs_out_before_any_collective_ends_the_work_on_both(number: int) -> None:
    failure = torch.OutOfMemoryError("8 bytes were to be allocated\nand more")
    assert outcomes({1: (number, failure)}) == ["out of memory: ", "out of memory: 8 bytes were to be allocated"]


def test_two_ranks_may_fail_at_once_or_one_after_the_other() -> None:
    both = {0: (2, torch.OutOfMemoryError("a")), 1: (2, torch.OutOfMemoryError("b"))}
    assert outcomes(both) == ["out of memory: a", "out of memory: b"]
    assert outcomes({**both, 1: (4, torch.OutOfMemoryError("b"))}) == ["out of memory: a", "out of memory: "]


def test_another_error_is_raised_where_it_happened_and_ends_the_work_elsewhere() -> None:
    found = outcomes({0: (3, ValueError("a fault"))})
    assert found[0] == "ValueError: a fault"
    assert found[1].startswith("SkyrlTrainError: another rank failed")


def test_outside_of_work_nobody_meets() -> None:
    def never(code: int) -> int:
        raise AssertionError(code)

    OomConsensus(never).before_collective()
