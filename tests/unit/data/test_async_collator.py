"""One slot, one worker: the batch asked for or an error, and no thread left behind."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from skyrl_train.data.sft.loader import AsyncBatchCollator, StepOrderError
from skyrl_train.errors import DeadlineError

PREFIX = "test-collate"


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(PREFIX)]


@pytest.fixture(autouse=True)
def _no_thread_survives() -> Iterator[None]:
    yield
    assert workers() == []


class Gate:
    """A `compute` that holds each step until it is let through."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.computed: list[int] = []

    def __call__(self, step: int) -> str:
        self.entered.set()
        assert self.open.wait(10)
        self.computed.append(step)
        return f"batch {step}"


def raising(error: BaseException) -> AsyncBatchCollator[str]:
    def compute(step: int) -> str:
        raise error

    return AsyncBatchCollator(compute, PREFIX)


def test_gives_each_submitted_batch_once_and_in_order() -> None:
    with AsyncBatchCollator(lambda step: step * 10, thread_name_prefix=PREFIX) as collator:
        batches = []
        for step in (1, 2, 3):
            collator.submit(step)
            batches.append(collator.get(step))
    assert batches == [10, 20, 30]


def test_computes_on_one_thread_of_that_name_while_the_caller_goes_on() -> None:
    names = []
    with AsyncBatchCollator(lambda step: names.append(threading.current_thread().name), PREFIX) as collator:
        for step in (1, 2):
            collator.submit(step)
            collator.get(step)
    gate = Gate()
    with AsyncBatchCollator(gate, PREFIX) as collator:
        collator.submit(1)
        assert gate.entered.wait(10)  # the worker is in compute, and this thread is here
        gate.open.set()
        assert collator.get(1) == "batch 1"
    assert names == [f"{PREFIX}_0"] * 2


def test_says_what_is_in_flight() -> None:
    with AsyncBatchCollator(str, PREFIX) as collator:
        assert not collator.has_pending()
        collator.submit(7)
        assert collator.has_pending()
        collator.get(7)
        assert not collator.has_pending()


def test_refuses_a_second_batch_in_flight() -> None:
    with AsyncBatchCollator(str, PREFIX) as collator:
        collator.submit(1)
        with pytest.raises(
            StepOrderError, match="occupied: step 2 was submitted while the batch of step 1 is in flight"
        ):
            collator.submit(2)
        assert collator.get(1) == "1"


def test_refuses_the_same_step_twice() -> None:
    with AsyncBatchCollator(str, PREFIX) as collator:
        collator.submit(1)
        with pytest.raises(RuntimeError, match="in flight"):
            collator.submit(1)


def test_never_hands_out_the_batch_of_another_step() -> None:
    with AsyncBatchCollator(str, PREFIX) as collator:
        collator.submit(1)
        with pytest.raises(RuntimeError, match="1 != expected step 2"):
            collator.get(2)
        assert collator.has_pending()
        assert collator.get(1) == "1"


def test_never_hands_out_a_batch_twice() -> None:
    with AsyncBatchCollator(str, PREFIX) as collator:
        collator.submit(1)
        collator.get(1)
        with pytest.raises(RuntimeError, match="none is in flight"):
            collator.get(1)


@pytest.mark.parametrize("error", [ValueError("broken row"), KeyboardInterrupt(), SystemExit(3)])
def test_get_raises_what_the_worker_raised_and_frees_the_slot(error: BaseException) -> None:
    with raising(error) as collator:
        collator.submit(1)
        with pytest.raises(type(error)) as caught:
            collator.get(1)
        assert caught.value is error
        assert not collator.has_pending()


def test_goes_on_after_a_batch_that_failed() -> None:
    def compute(step: int) -> float:
        return 1 / (step - 1)

    with AsyncBatchCollator(compute, PREFIX) as collator:
        collator.submit(1)
        with pytest.raises(ZeroDivisionError):
            collator.get(1)
        collator.submit(2)
        assert collator.get(2) == 1.0


def test_clear_waits_for_the_worker_and_discards_its_batch() -> None:
    gate = Gate()
    with AsyncBatchCollator(gate, PREFIX) as collator:
        collator.submit(1)
        threading.Timer(0.05, gate.open.set).start()
        collator.clear()
        assert gate.computed == [1]  # finished before clear returned: what it reads may change now
        assert not collator.has_pending()
        collator.submit(1)
        assert collator.get(1) == "batch 1"
        assert gate.computed == [1, 1]


def test_clear_without_a_batch_in_flight_does_nothing() -> None:
    with AsyncBatchCollator(str, PREFIX) as collator:
        collator.clear()
        assert not collator.has_pending()


def test_clear_discards_an_exception_that_nobody_asked_for() -> None:
    with raising(ValueError("broken row")) as collator:
        collator.submit(1)
        collator.clear()
        assert not collator.has_pending()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_clear_does_not_swallow_what_ends_the_process(error: BaseException) -> None:
    with raising(error) as collator:
        collator.submit(1)
        with pytest.raises(type(error)):
            collator.clear()
        assert not collator.has_pending()


def test_shutdown_joins_the_thread_even_where_draining_raises() -> None:
    collator = raising(KeyboardInterrupt())
    collator.submit(1)
    with pytest.raises(KeyboardInterrupt):
        collator.shutdown()
    assert workers() == []


def test_shutdown_waits_for_a_batch_that_is_being_made() -> None:
    gate = Gate()
    collator = AsyncBatchCollator(gate, PREFIX)
    collator.submit(1)
    threading.Timer(0.05, gate.open.set).start()
    collator.shutdown()
    assert gate.computed == [1]
    assert workers() == []


def test_shutdown_may_be_repeated_and_nothing_starts_after_it() -> None:
    collator = AsyncBatchCollator(str, PREFIX)
    collator.submit(1)
    collator.shutdown()
    collator.shutdown()
    with pytest.raises(RuntimeError, match="after the collator was shut down"):
        collator.submit(2)


@pytest.mark.parametrize("worker_error", [ValueError("worker"), KeyboardInterrupt(), SystemExit(3)])
def test_the_loops_own_exception_propagates_whatever_the_worker_does(worker_error: BaseException) -> None:
    def loop() -> None:
        with raising(worker_error) as collator:
            collator.submit(1)
            raise ArithmeticError("train step")

    with pytest.raises(ArithmeticError, match="train step"):
        loop()
    assert workers() == []


def test_a_worker_that_hangs_is_named_and_does_not_hang_the_loop() -> None:
    gate = Gate()
    collator = AsyncBatchCollator(gate, PREFIX, timeout_s=0.05)
    collator.submit(3)
    with pytest.raises(
        DeadlineError, match=f"the batch of step 3 \\(thread {PREFIX}_0\\) did not answer within 0.05 s"
    ):
        collator.get(3)
    assert collator.has_pending()
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        collator.shutdown()
    assert time.monotonic() - started < 5
    gate.open.set()
    while workers():
        time.sleep(0.01)


def test_a_batch_that_was_handed_out_is_not_kept_alive() -> None:
    class Batch:
        pass

    with AsyncBatchCollator(lambda step: Batch(), PREFIX) as collator:
        collator.submit(1)
        reference = weakref.ref(collator.get(1))
        gc.collect()
        assert reference() is None
