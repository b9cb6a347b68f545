"""Threads that work for others and are never waited for without a limit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, TimeoutError as FutureTimeoutError
from typing import ParamSpec, TypeVar

from skyrl_train.errors import DeadlineError

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class WorkerThread(Executor):
    """An executor of one thread, which starts with the first call.

    Python joins the threads of its own executors at the end of the process, however long that takes. This one is a daemon:
    a call that hangs (a kernel, a disk that is gone) ends with the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Have the thread call `fn` behind what was submitted before. Raises RuntimeError once it is closed."""
        if self._is_closed:
            raise RuntimeError(f"thread {self._name} is closed")
        future: Future[R] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # it belongs to whoever waits for the future
                future.set_exception(error)

        self._calls.put(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return future

    def close(self, timeout_s: float) -> bool:
        """Let the thread end behind what is submitted; whether it did within `timeout_s`. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._calls.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # what it holds must not live on while the thread waits


def in_time(function: Callable[[], R], *, what: str, timeout_s: float, remedy: str = "") -> R:
    """The result of `function`, or its exception. Raises DeadlineError naming `what` where it does not come in time."""
    return map_in_time(lambda _: function(), [None], num_threads=1, what=what, timeout_s=timeout_s, remedy=remedy)[0]


def map_in_time(
    function: Callable[[A], R], items: Sequence[A], *, num_threads: int, what: str, timeout_s: float, remedy: str = ""
) -> list[R]:
    """The results of `function` for each of `items`, in order, or the first exception.

    `timeout_s` is the deadline of all of them together. Raises DeadlineError naming `what`; threads that hang are left to
    end with the process.
    """
    threads = [WorkerThread(f"{what} {number}") for number in range(min(num_threads, len(items)))]
    futures = [threads[index % len(threads)].submit(function, item) for index, item in enumerate(items)]
    ends = time.monotonic() + timeout_s
    try:
        return [future.result(max(0.0, ends - time.monotonic())) for future in futures]
    except FutureTimeoutError:
        if all(future.done() for future in futures):  # it is what the function raised
            raise
        raise DeadlineError(what, timeout_s, remedy) from None
    finally:
        for future in futures:
            future.cancel()
        for thread in threads:
            thread.close(0.0)
