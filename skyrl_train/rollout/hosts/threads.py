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
    """One function to run on a worker and where its result goes."""

    def __init__(self, function: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self.function = function
        self.loop = loop
        self.future: asyncio.Future[T] = loop.create_future()
        self.is_debugged = False
        """Whether it has come to a `breakpoint()`, and so has no deadline any more."""
        self.num_stops = 0
        """How often it has taken the terminal."""

    def run(self) -> None:
        _running.call = self
        try:
            result = self.function()
        except BaseException as error:
            self._deliver(self._set_exception, error)
        else:
            self._deliver(self._set_result, result)
        finally:
            for _ in range(self.num_stops):
                _terminal.release()

    def _deliver(self, setter: Callable[[Any], None], value: object) -> None:
        # The loop may be closed by the time an abandoned call returns: nobody waits for it then.
        if not self.loop.is_closed():
            try:
                self.loop.call_soon_threadsafe(setter, value)
            except RuntimeError:
                return

    def _set_result(self, result: T) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def _set_exception(self, error: BaseException) -> None:
        if not self.future.done():
            # A future takes neither what ends a program nor a StopIteration.
            usable = isinstance(error, Exception) and not isinstance(error, StopIteration)
            self.future.set_exception(error if usable else RuntimeError(describe(error)))


class _Worker:
    """A daemon thread with its own queue; None ends it."""

    def __init__(self, name: str) -> None:
        self.calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (run := self.calls.get()) is not None:
            run()


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
        self._idle: list[_Worker] = []
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
            worker = self._idle.pop() if self._idle else self._new_worker()
            call: _Call[T] = _Call(function, asyncio.get_running_loop())
            worker.calls.put(call.run)
            deadline = call.loop.call_later(self.timeout_s, self._expire, call)
            try:
                result = await call.future
            except (_DeadlineExceeded, asyncio.CancelledError) as error:
                self._abandon(worker, if_late)
                if isinstance(error, _DeadlineExceeded):
                    raise late(what, self.timeout_s) from None
                raise
            except BaseException:
                self._idle.append(worker)
                raise
            finally:
                deadline.cancel()
            self._idle.append(worker)
            return result

    async def aclose(self) -> None:
        while self._idle:
            self._idle.pop().calls.put(None)

    def _new_worker(self) -> _Worker:
        self._num_started += 1
        return _Worker(name=f"environment-{self._num_started}")

    def _expire(self, call: _Call[Any]) -> None:
        if not call.future.done() and not call.is_debugged:
            call.future.set_exception(_DeadlineExceeded())

    def _abandon(self, worker: _Worker, if_late: Callable[[], object] | None) -> None:
        self.num_given_up += 1
        if if_late is not None:
            worker.calls.put(_Quietly(if_late))
        worker.calls.put(None)


class _DeadlineExceeded(Exception):
    """Internal: distinguished from a TimeoutError that the environment itself raised."""


class _Quietly:
    """Runs a clean-up whose result nobody waits for."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def __call__(self) -> None:
        try:
            self._function()
        except BaseException:
            return


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
