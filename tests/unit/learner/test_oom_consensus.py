"""Ranks that meet, each on a thread: a failure is known everywhere before anybody waits in the next collective."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from skyrl_train.distributed import Collective, OomConsensus
from skyrl_train.errors import RankOutOfMemory, SkyrlTrainError

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


class KnownCollective(Collective):
    """One of a kind of micro-batch that is known; taking part is reaching the barrier."""

    def __init__(self, number: int, ranks: Ranks) -> None:
        self.__dict__ |= {"number": number, "ranks": ranks}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KnownCollective) and other.number == self.number  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"KnownCollective({self.number})"  # type: ignore[attr-defined]

    def take_part(self) -> None:
        self.ranks.collective()  # type: ignore[attr-defined]


class LonelyCollective(KnownCollective):
    """Reaches nobody."""

    def take_part(self) -> None:
        """Return at once."""


NUM_MICRO_BATCHES = 3


def followed(fails: dict[int, tuple[int, int, Exception]]) -> list[tuple[str, int]]:
    """What becomes of two ranks where rank r raises in micro-batch m before collective n, `fails[r] = (m, n, error)`, once
    the kind is known; and how often they agreed in that pass."""
    ranks = Ranks()

    def run(rank: int) -> tuple[str, int]:
        meetings = 0
        meet = ranks.meet(rank)

        def counted(code: int) -> int:
            nonlocal meetings
            meetings += 1
            return meet(code)

        together = OomConsensus(counted)

        def work(failing: dict[int, tuple[int, int, Exception]]) -> str:
            for micro_batch in range(NUM_MICRO_BATCHES):
                together.begin_micro_batch("alike")
                for number in range(NUM_COLLECTIVES + 1):
                    if rank in failing and failing[rank][:2] == (micro_batch, number):
                        raise failing[rank][2]
                    if number < NUM_COLLECTIVES:
                        together.before_collective(KnownCollective(number, ranks))
                        ranks.collective()
            return "finished"

        assert together.run(lambda: work({})) == "finished"
        assert meetings == NUM_COLLECTIVES + NUM_MICRO_BATCHES + 1, "those of the first micro-batch were noted"
        meetings = 0
        try:
            return together.run(lambda: work(fails)), meetings
        except RankOutOfMemory as failure:
            return f"out of memory: {failure.reason}", meetings
        except (SkyrlTrainError, ValueError) as error:
            return f"{type(error).__name__}: {error}", meetings

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def test_ranks_agree_once_a_micro_batch_where_its_collectives_are_known() -> None:
    assert followed({}) == [("finished", NUM_MICRO_BATCHES + 1)] * 2


@pytest.mark.parametrize("number", range(NUM_COLLECTIVES + 1))
def test_a_rank_without_memory_goes_on_to_the_end_of_its_micro_batch(number: int) -> None:
    failure = torch.OutOfMemoryError("8 bytes were to be allocated")
    for micro_batch in range(NUM_MICRO_BATCHES):
        found = followed({1: (micro_batch, number, failure)})
        agreed = micro_batch + 2
        assert found == [("out of memory: ", agreed), ("out of memory: 8 bytes were to be allocated", agreed)]


def test_a_rank_without_memory_joins_again_where_the_zeros_have_no_room_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined = KnownCollective.take_part
    refused: set[int] = set()

    def take_part(collective: KnownCollective) -> None:
        if collective.number not in refused:  # type: ignore[attr-defined]
            refused.add(collective.number)  # type: ignore[attr-defined]
            raise RuntimeError("Failed to CUDA calloc 4 bytes")  # as NCCL says it
        joined(collective)

    monkeypatch.setattr(KnownCollective, "take_part", take_part)
    assert followed({1: (1, 2, torch.OutOfMemoryError("a"))}) == [("out of memory: ", 3), ("out of memory: a", 3)]
    assert refused == set(range(2, NUM_COLLECTIVES))


def test_both_may_run_out_of_memory_in_one_micro_batch_or_in_two() -> None:
    first, second = torch.OutOfMemoryError("a"), torch.OutOfMemoryError("b")
    assert followed({0: (1, 2, first), 1: (1, 5, second)}) == [("out of memory: a", 3), ("out of memory: b", 3)]
    assert followed({0: (1, 2, first), 1: (2, 0, second)}) == [("out of memory: a", 3), ("out of memory: ", 3)]


def test_an_error_beside_a_rank_without_memory_may_come_of_its_zeros_and_is_tried_again() -> None:
    zeros, failure = ValueError("not finite"), torch.OutOfMemoryError("a")
    assert followed({0: (1, 5, zeros), 1: (1, 2, failure)}) == [("out of memory: ", 3), ("out of memory: a", 3)]
    broken, other = followed({0: (1, 3, zeros)})
    assert broken == ("ValueError: not finite", 3)
    assert other[0].startswith("SkyrlTrainError: another rank failed")


def test_collectives_that_are_not_those_of_their_kind_end_the_pass() -> None:
    together = OomConsensus(lambda code: code)
    ranks = Ranks()

    def work(number: int) -> None:
        together.begin_micro_batch("alike")
        together.before_collective(LonelyCollective(number, ranks))

    together.run(lambda: work(0))
    with pytest.raises(SkyrlTrainError, match="collective 0 of a micro-batch is not that of"):
        together.run(lambda: work(1))
