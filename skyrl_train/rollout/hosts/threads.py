"""Environments on threads of this process: daemon threads, a deadline for each call.

A call that exceeds its deadline cannot be killed. Its thread is abandoned (it is a daemon, so it does not keep the
interpreter alive), a new one takes its place when there is work, and the environment is closed on the abandoned thread
should the call ever return: two threads never use one environment at once. For environments that are trusted not to hang:
a loop that was given up keeps a core busy, and one that holds the interpreter's lock stops everything.
"""

from __future__ import annotations

import asyncio
import os
import pdb
import queue
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

from skyrl_train.registry import at_breakpoint
from skyrl_train.rollout.boundary import MAX_WORKERS, AroundCalls, Request, describe, late
from skyrl_train.rollout.hosts.hosted import HostedEnvironment

T = TypeVar("T")


_running = threading.local()
"""`call`: what this thread runs."""
_DEBUGGED_WITHIN_S = 86400.0
_terminal = threading.RLock()
"""Held by the call that is being debugged: the others that come to a `breakpoint()` wait until it has ended."""


def _breakpoint(*arguments: Any, **named: Any) -> object:
    """What `breakpoint()` does in the code of a call: pdb at the terminal, one call at a time."""
    call: _Call[Any] | None = getattr(_running, "call", None)
    if call is None or "PYTHONBREAKPOINT" in os.environ:
        return sys.__breakpointhook__(*arguments, **named)
    call.is_debugged = True
    if not _terminal.acquire(timeout=_DEBUGGED_WITHIN_S):
        raise TimeoutError(f"another call was debugged for {_DEBUGGED_WITHIN_S:g} s")
    call.num_stops += 1
    for leave in at_breakpoint:
        leave()
    pdb.Pdb().set_trace(sys._getframe(1))
    return None


class _Call(Generic[T]):
    """One function to run on a thread, and where its result goes. A future of `concurrent.futures` would cost as much as
    half of a call."""

    def __init__(self, function: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self._function, self._loop = function, loop
        self.future: asyncio.Future[T] = loop.create_future()
        self.is_debugged = False
        """Whether it has come to a `breakpoint()`, and so has no deadline any more."""
        self.num_stops = 0
        """How often it has taken the terminal."""

    def run(self) -> None:
        _running.call = self
        settle: Callable[[Any], None] = self.future.set_result
        try:
            value: Any = self._function()
        except BaseException as error:
            # A future takes neither what ends a program nor a StopIteration.
            usable = isinstance(error, Exception) and not isinstance(error, StopIteration)
            settle, value = self.future.set_exception, error if usable else RuntimeError(describe(error))
        for _ in range(self.num_stops):
            _terminal.release()
        try:
            self._loop.call_soon_threadsafe(self._settle, settle, value)
        except RuntimeError:  # the loop is closed by the time an abandoned call returns: nobody waits for it
            return

    def expire(self) -> None:
        if not self.is_debugged:
            self._settle(self.future.set_exception, _DeadlineExceeded())

    def _settle(self, settle: Callable[[Any], None], value: object) -> None:
        if not self.future.done():
            settle(value)


class _DeadlineExceeded(Exception):
    """Internal: distinguished from a TimeoutError that the environment itself raised."""


def _work(calls: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    """Be a thread, until None comes. Nobody waits for what a clean-up raises."""
    while (run := calls.get()) is not None:
        try:
            run()
        except BaseException:
            continue


class ThreadEnvironments:
    """Implements `Environments` with at most `num_workers` calls at a time, each with `timeout_s` from when it starts to
    run. Asynchronous environments need no thread: they run on the loop that asks, any number at a time.
    """

    may_lose_environments = False
    given_up = "their threads were given up"

    def __init__(self, *, num_workers: int | None, timeout_s: float, around: AroundCalls = nullcontext) -> None:
        """`num_workers` None: as many as there are trajectories, which have one call each at a time. `around` is entered for
        each call, and the wait for a thread."""
        self.around = around
        if sys.breakpointhook is sys.__breakpointhook__:
            sys.breakpointhook = _breakpoint
        self._slots = asyncio.Semaphore(num_workers or MAX_WORKERS)
        self._idle: list[queue.SimpleQueue[Callable[[], object] | None]] = []
        """Where threads without a call get their next one; None ends them."""
        self.timeout_s = timeout_s
        self._num_started = 0
        self.num_given_up = 0
        self.num_close_failures = 0

    def host(self, name: str) -> _OnThreads:
        return _OnThreads(self, name)

    async def call(self, function: Callable[[], T], *, what: str, if_late: Callable[[], object] | None = None) -> T:
        """Runs `function` on a thread.

        `if_late` runs on that thread after a call that exceeded its deadline returned at last. Raises what `function`
        raises, or EnvironmentFailed (environment_timeout) naming `what`.
        """
        async with self._slots:
            if self._idle:
                calls = self._idle.pop()
            else:
                self._num_started += 1
                calls = queue.SimpleQueue()
                name = f"environment-{self._num_started}"
                threading.Thread(target=_work, args=(calls,), name=name, daemon=True).start()
            loop = asyncio.get_running_loop()
            call: _Call[T] = _Call(function, loop)
            calls.put(call.run)
            deadline = loop.call_later(self.timeout_s, call.expire)
            try:
                result = await call.future
            except (_DeadlineExceeded, asyncio.CancelledError) as error:
                self.num_given_up += 1  # and the thread is
                if if_late is not None:
                    calls.put(if_late)
                calls.put(None)
                if isinstance(error, _DeadlineExceeded):
                    raise late(what, self.timeout_s) from None
                raise
            except BaseException:
                self._idle.append(calls)
                raise
            finally:
                deadline.cancel()
            self._idle.append(calls)
            return result

    async def aclose(self) -> None:
        while self._idle:
            self._idle.pop().put(None)


class _OnThreads:
    """Implements `EnvironmentHandle` with an object of this process."""

    def __init__(self, threads: ThreadEnvironments, name: str) -> None:
        self._threads, self._name = threads, name
        self._hosted = HostedEnvironment(name)

    async def ask(self, request: Request) -> object:
        call, what = partial(self._hosted.answer, request), f"{self._name}.{request['call']}"
        with self._threads.around():
            answer = await self._threads.call(call, what=what, if_late=self._hosted.close_late)
            if isinstance(answer, Coroutine):
                return await self._hosted.in_time(request, answer, self._threads.timeout_s)
            return answer

    def release(self) -> None:
        """Nothing to do: the object goes with this handle."""
