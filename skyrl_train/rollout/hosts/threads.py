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
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

from skyrl_train.registry import at_breakpoint
from skyrl_train.rollout.boundary import MAX_WORKERS, AroundCalls, Request, describe, late
from skyrl_train.rollout.hosts.hosted import HostedEnvironment
from skyrl_train.system import WorkerThread

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
    """One function that runs on a thread."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.is_debugged = False
        """Whether it has come to a `breakpoint()`, and so has no deadline any more."""
        self.num_stops = 0
        """How often it has taken the terminal."""

    def run(self) -> T:
        _running.call = self
        try:
            return self._function()
        except BaseException as error:
            # A future takes neither what ends a program nor a StopIteration.
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            raise RuntimeError(describe(error)) from error
        finally:
            for _ in range(self.num_stops):
                _terminal.release()


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
        self._idle: list[WorkerThread] = []
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
                thread = self._idle.pop()
            else:
                self._num_started += 1
                thread = WorkerThread(f"environment-{self._num_started}")
            call = _Call(function)
            running = asyncio.wrap_future(thread.submit(call.run))
            try:
                while not (await asyncio.wait({running}, timeout=self.timeout_s))[0]:
                    if not call.is_debugged:
                        raise late(what, self.timeout_s)
            except BaseException:  # too late, or nobody waits for it any more: the thread is given up
                self.num_given_up += 1
                running.cancel()
                if if_late is not None:
                    thread.submit(if_late)
                thread.close(0.0)
                raise
            self._idle.append(thread)
            return running.result()

    async def aclose(self) -> None:
        while self._idle:
            self._idle.pop().close(0.0)


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
