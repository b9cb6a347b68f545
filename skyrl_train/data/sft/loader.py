"""The batches of a run, in order: the next one is made while the current one trains.

    for step in ...:
        batch = loader.get(step)
        loader.prefetch(step + 1)
        train(batch)

Every batch carries the data position after it. A checkpoint saves the position of the last batch that was trained, so a
batch that was prefetched when the run ended is made again: it is neither lost nor trained twice.

One slot and one worker, so that batches are made one after the other, in the order they were asked for, each of them
exactly once. Whatever would hand out another batch than the one asked for is an error.

The worker reads the order of the current epoch. Therefore nothing is prefetched across the end of an epoch, where
the order changes, and what is in flight is waited for before anything changes the order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

from skyrl_train.batch.steps import MiniBatch
from skyrl_train.data.sft.collate import Collator
from skyrl_train.data.sft.step_stream import StepExamples, StepStream
from skyrl_train.data.sft.token_store import ExampleSet
from skyrl_train.errors import DeadlineError
from skyrl_train.system import WorkerThread

T = TypeVar("T")

TIMEOUT_S = 1800.0
"""One batch takes milliseconds; a disk that is gone, or a collator in a loop, takes for ever."""

logger = logging.getLogger(__name__)


class StepOrderError(RuntimeError, AssertionError):
    """A batch was asked for that is not the one in flight. An AssertionError too, as the collator that this one stands in
    for raises (SkyRL's `AsyncBatchCollator`, whose surface this class has)."""


class AsyncBatchCollator(Generic[T]):
    """Runs `compute(step)` on a worker thread and keeps its result until it is fetched.

    To be used from one thread. As a context manager it shuts down at the end of the block; the block's own exception
    goes first, whatever the worker did.

        with AsyncBatchCollator(compute, thread_name_prefix="collate") as collator:
            collator.submit(1)
            for step in range(1, 4):
                batch = collator.get(step)
                collator.submit(step + 1)
                train(batch)
    """

    def __init__(
        self,
        compute: Callable[[int], T],
        thread_name_prefix: str = "batch-collate",
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """
        Args:
            compute: Makes the batch of a step. Runs on the worker; what it reads may change only while nothing is in
                flight.
            thread_name_prefix: The worker is called `<prefix>_0`. It is started by the first `submit`.
            timeout_s: Deadline of each wait for the worker.
        """
        self._compute = compute
        self._name = f"{thread_name_prefix}_0"
        self._timeout_s = timeout_s
        self._worker = WorkerThread(self._name)
        self._slot: tuple[int, Future[T]] | None = None
        self._is_shut_down = False

    def has_pending(self) -> bool:
        """True from `submit` until `get` or `clear`, whether or not the batch is ready."""
        return self._slot is not None

    def submit(self, step: int) -> None:
        """Starts to make the batch of `step`.

        Raises StepOrderError while another one is in flight, RuntimeError after `shutdown`.
        """
        if self._is_shut_down:
            raise RuntimeError(f"{self._name}: step {step} was submitted after the collator was shut down")
        if self._slot is not None:
            raise StepOrderError(
                f"{self._name}: slot already occupied: step {step} was submitted while the batch of step "
                f"{self._slot[0]} is in flight; fetch it with get, or discard it with clear"
            )
        self._slot = (step, self._worker.submit(self._compute, step))

    def get(self, step: int) -> T:
        """Return the batch of `step`, once it is ready; the slot is free again.

        Raises StepOrderError where another step, or none, is in flight (it stays there); what the worker raised;
        DeadlineError where the batch does not come.
        """
        if self._slot is None:
            raise StepOrderError(f"{self._name}: the batch of step {step} was asked for, but none is in flight")
        pending, future = self._slot
        if pending != step:
            raise StepOrderError(
                f"{self._name}: the batch of step {step} was asked for, but that of step {pending} is in flight: "
                f"{pending} != expected step {step}"
            )
        self._wait(pending, future)
        self._slot = None
        return future.result()

    def clear(self) -> None:
        """Waits for the batch in flight, if there is one, and discards it.

        With it goes an `Exception` of the worker, which nobody asked for any more. KeyboardInterrupt and SystemExit are
        not the batch's: they are raised. Raises DeadlineError where the worker does not finish.
        """
        if self._slot is None:
            return
        pending, future = self._slot
        self._wait(pending, future)
        self._slot = None
        error = future.exception()
        if isinstance(error, Exception):
            logger.debug("%s: the discarded batch of step %d had failed", self._name, pending, exc_info=error)
        elif error is not None:
            raise error

    def shutdown(self) -> None:
        """Discard what is in flight and ends the thread, which is joined even where discarding raises. Idempotent.

        Raises what `clear` raises, and DeadlineError where the thread does not end.
        """
        self._is_shut_down = True
        try:
            self.clear()
        finally:
            if not self._worker.close(self._timeout_s):
                raise DeadlineError(f"thread {self._name}", self._timeout_s, "It is left to end with the process")

    def __enter__(self) -> AsyncBatchCollator[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.shutdown()
        except BaseException as second:
            if error is None:
                raise
            logger.warning("%s: %s while shutting down after %s", self._name, _describe(second), _describe(error))

    def _wait(self, step: int, future: Future[T]) -> None:
        try:
            future.exception(timeout=self._timeout_s)
        except FutureTimeoutError as error:
            raise DeadlineError(
                f"the batch of step {step} (thread {self._name})",
                self._timeout_s,
                "Is the disk that holds the data reachable? async_batch_collation=false makes batches in the loop",
            ) from error


@dataclass(frozen=True, kw_only=True)
class SFTBatch:
    """The examples of an optimizer step."""

    step: int
    mini_batch: MiniBatch
    num_examples: int
    num_tokens: int
    """Of the examples, without padding."""
    position: int
    """Of the stream of examples after this batch: where the next one begins."""


class BatchLoader:
    """Gives each step its batch. To be used from one thread, and closed: as a context manager, or with `close`."""

    def __init__(
        self, stream: StepStream, examples: ExampleSet, collate: Collator, *, is_async: bool, position: int = 0
    ) -> None:
        """`position` is where the first batch begins."""
        self._stream = stream
        self._examples = examples
        self._collate = collate
        self._position = position
        self._worker = AsyncBatchCollator(self._prefetched, "sft-collate") if is_async else None

    def get(self, step: int) -> SFTBatch:
        """Return the batch at the position where the last one ended.

        Raises RuntimeError where the batch of another step was prefetched; what making it raised.
        """
        if self._worker is not None and self._worker.has_pending():
            batch = self._worker.get(step)
        else:
            batch = self._batch(step, self._stream.take(self._position))
        self._position = batch.position
        return batch

    def prefetch(self, step: int) -> None:
        """Start to make the batch of `step` on the worker, unless it takes another epoch's order."""
        if self._worker is not None and self._stream.within_epoch(self._position) is not None:
            self._worker.submit(step)

    def seek(self, position: int) -> None:
        """Go to another position of the stream. A batch in flight is waited for and discarded."""
        if self._worker is not None:
            self._worker.clear()
        self._position = position
        self._stream.start(position)

    def close(self) -> None:
        """End the worker, if there is one."""
        if self._worker is not None:
            self._worker.shutdown()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._worker is not None:
            self._worker.__exit__(kind, error, traceback)

    def _prefetched(self, step: int) -> SFTBatch:
        """Make a batch on the worker. The position does not change before the batch is fetched."""
        found = self._stream.within_epoch(self._position)
        if found is None:
            raise RuntimeError(f"the batch of step {step} takes another epoch's order and cannot be prefetched")
        return self._batch(step, found)

    def _batch(self, step: int, found: StepExamples) -> SFTBatch:
        return SFTBatch(
            step=step,
            mini_batch=self._collate(found.indices, step),
            num_examples=len(found.indices),
            num_tokens=int(self._examples.lengths[found.indices].sum()),
            position=found.stop,
        )


def one_ahead(compute: Callable[[int], T], count: int, *, is_async: bool) -> Generator[T, None, None]:
    """Yield `compute(0)` to `compute(count - 1)`, each made while its predecessor is used; the worker ends with them."""
    if not is_async:
        yield from map(compute, range(count))
        return
    with AsyncBatchCollator(compute, "sft-collate-eval") as worker:
        for index in range(count):
            if not worker.has_pending():
                worker.submit(index)
            result = worker.get(index)
            if index + 1 < count:
                worker.submit(index + 1)
            yield result


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
