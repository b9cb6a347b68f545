"""`LoopThread`: an event loop on a thread of its own, for callers that are no coroutines."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CANCEL_TIMEOUT_S = 10.0
_SIGNAL_POLL_S = 0.5
_CLOSERS_TIMEOUT_S = 120.0
_Closer = Callable[[], Coroutine[Any, Any, object]]
_CLOSERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Closer]] = weakref.WeakKeyDictionary()


class LoopThread:
    """Runs coroutines to their end on one loop that lives as long as this object.

    Works whether or not the caller's thread runs a loop itself (a notebook, an async test), and what an engine bound to
    the loop (a connection pool, say) stays usable between calls.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result, or its exception.

        Where this thread is interrupted (Ctrl-C), the coroutine is cancelled and awaited first, so that nothing of it
        runs on. What others began on the loop goes on.
        """
        running: list[asyncio.Task[Any] | None] = []

        async def run() -> T:
            running.append(asyncio.current_task())
            return await coroutine

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            # In slices: a signal that another thread happens to receive does not wake this one.
            while not concurrent.futures.wait([future], timeout=_SIGNAL_POLL_S).done:
                continue
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                with contextlib.suppress(BaseException):
                    self._settle([task for task in running if task is not None])
            raise

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine, and return its result, or exception, for whoever waits for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        """Close what is to be closed with the loop, cancel what else runs on it, and stop it. Idempotent."""
        if self._loop.is_closed():
            return
        for closer in _CLOSERS.pop(self._loop, []):
            try:
                self.run(asyncio.wait_for(closer(), _CLOSERS_TIMEOUT_S))
            except Exception as error:  # of any kind: the others are closed, too
                logger.warning("%s", str(error) or f"not closed: {type(error).__name__}")
        concurrent.futures.wait([asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop)], timeout=_CANCEL_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CANCEL_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _settle(self, cancelled: Sequence[asyncio.Task[Any]]) -> None:
        """Waits until a cancelled coroutine has cleaned up after itself."""
        if cancelled:
            waiting = asyncio.wait(cancelled, timeout=_CANCEL_TIMEOUT_S)
            asyncio.run_coroutine_threadsafe(waiting, self._loop).result(_CANCEL_TIMEOUT_S)


async def _end_tasks() -> None:
    """Cancel all other tasks of the loop and wait for them. One that is collected with a loop that has ended, or whose
    exception nobody asked for, would be told at the end of the process, when logs may be closed."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait({asyncio.gather(*tasks, return_exceptions=True)}, timeout=_CANCEL_TIMEOUT_S)
    await asyncio.get_running_loop().shutdown_asyncgens()


def at_close(closer: _Closer) -> None:
    """Have what lives on the running loop closed before the loop stops, if it is a `LoopThread`'s; others end with their
    process."""
    _CLOSERS.setdefault(asyncio.get_running_loop(), []).append(closer)
