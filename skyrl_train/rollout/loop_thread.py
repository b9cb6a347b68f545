"""An event loop of one's own on a daemon thread, driven from synchronous code."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_CANCEL_TIMEOUT_S = 10.0
_SIGNAL_POLL_S = 0.5


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
        """The coroutine's result, or its exception.

        Where this thread is interrupted (Ctrl-C), the coroutine is cancelled and awaited first, so that nothing of it
        runs on.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            # In slices: a signal that another thread happens to receive does not wake this one.
            while not concurrent.futures.wait([future], timeout=_SIGNAL_POLL_S).done:
                continue
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                with contextlib.suppress(BaseException):
                    self._settle()
            raise

    def close(self) -> None:
        """Stops the loop. Idempotent."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CANCEL_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _settle(self) -> None:
        """Waits until the cancelled coroutine has cleaned up after itself."""
        done: concurrent.futures.Future[None] = asyncio.run_coroutine_threadsafe(self._others_ended(), self._loop)
        done.result(_CANCEL_TIMEOUT_S)

    async def _others_ended(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=_CANCEL_TIMEOUT_S)
