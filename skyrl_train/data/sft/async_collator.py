"""One batch is prefetched: while step N trains, a thread of its own makes the batch of step N + 1.

One slot and one worker, so that batches are made one after the other, in the order they were asked for, each of them
exactly once. Whatever would hand out another batch than the one asked for is an error.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Generic, TypeVar

from skyrl_train.errors import DeadlineError

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
        self._jobs: queue.SimpleQueue[tuple[int, Future[T]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
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
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._slot = (step, Future())
        self._jobs.put(self._slot)

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
            self._join()

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

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            step, future = job
            try:
                future.set_result(self._compute(step))
            except BaseException as error:  # it belongs to whoever fetches the batch
                future.set_exception(error)
            # The batch must not live on here while the worker waits for its next job.
            del job, future

    def _wait(self, step: int, future: Future[T]) -> None:
        try:
            future.exception(timeout=self._timeout_s)
        except FutureTimeoutError as error:
            raise DeadlineError(
                f"the batch of step {step} (thread {self._name})",
                self._timeout_s,
                "Is the disk that holds the data reachable? async_batch_collation=false makes batches in the loop",
            ) from error

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._jobs.put(None)
        thread.join(self._timeout_s)
        if thread.is_alive():
            raise DeadlineError(f"thread {self._name}", self._timeout_s, "It is left to end with the process")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
