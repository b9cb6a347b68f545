"""One clock, one processor: threads of a simulated machine run one at a time, and a seed says which one goes on.

A thread of the world is a real one that holds the baton. It gives the baton away where it waits, sleeps, or comes to an
event; who gets it next is drawn. Time stands still while any thread can go on, and jumps to the next timer where none can.
So a run is a function of its seed, and a wait of an hour costs nothing.
"""

from __future__ import annotations

import _thread
import asyncio
import asyncio.base_events
import asyncio.events
import contextlib
import contextvars
import hashlib
import heapq
import inspect
import queue
import random
import sys
import threading
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

IDLE_LIMIT_S = 20_000.0
"""Virtual seconds without any event after which nothing is going to happen; the product has no longer deadline."""


class Killed(BaseException):
    """Raised in every thread of a process that has ended, wherever it is."""


class LawBroken(BaseException):
    """What must hold in every world does not. The first one ends the world, whatever catches it."""

    first: list[LawBroken] = []  # noqa: RUF012

    def __init__(self, message: str) -> None:
        super().__init__(message)
        LawBroken.first.append(self)


class Process:
    """Threads that end together."""

    def __init__(self, name: str) -> None:
        self.name, self.is_dead, self.fibers, self.descriptors = name, False, [], {}  # type: ignore[var-annotated]
        self.fibers: list[Fiber]
        self.descriptors: dict[int, Any]
        self.result: Any = None
        self.error: BaseException | None = None


class Fiber:
    """A thread of the world."""

    def __init__(self, name: str, process: Process, target: Callable[[], None]) -> None:
        self.name, self.process, self.target = name, process, target
        self.baton: Any = None
        self.ticket = 0
        """Counts waits, so that a timer of an earlier one is known to be stale."""
        self.waits_for, self.timed_out, self.is_done = "", False, False
        self.joiners: list[Fiber] = []


class World:
    """Clock, processor, event log and faults of one run."""

    tracer: Any = None
    """What threads of worlds are traced with."""

    def __init__(self, seed: int, *, keeps_log: bool = False, allowed: frozenset[int] | None = None) -> None:
        """`allowed`: of the faults that are drawn, by their number, those that happen; None is all."""
        self.seed, self.now, self.wall_offset = seed, 0.0, 0.0
        self.draw = random.Random(f"{seed}/schedule")
        self._draws: dict[str, random.Random] = {}
        self.allowed, self.num_faults = allowed, 0
        self.faults: list[str] = []
        self.num_events, self.kinds = 0, Counter[str]()
        self.digest, self.log = hashlib.blake2b(digest_size=16), [] if keeps_log else None  # type: ignore[var-annotated]
        self.log: list[str] | None
        self.on_event: Callable[[str, str], None] = lambda kind, what: None
        self.stuck = ""
        self._ready: list[Fiber] = []
        self._timers: list[tuple[float, int, Fiber, int]] = []
        self._count = 0
        self._last_event_at = 0.0
        self._idle: list[_Carrier] = []
        self.root = Fiber("operator", Process("operator"), lambda: None)
        self.root.baton = _thread.allocate_lock()
        self.root.baton.acquire()
        self.current = self.root
        self.last_process: Process | None = None

    def random(self, purpose: str) -> random.Random:
        """Return draws of their own, which no other purpose disturbs."""
        if purpose not in self._draws:
            self._draws[purpose] = random.Random(f"{self.seed}/{purpose}")
        return self._draws[purpose]

    def event(self, kind: str, what: str) -> None:
        """Write down that something happened, and let the world answer, which may be a kill."""
        self.check()
        self.num_events += 1
        self.kinds[kind] += 1
        self._last_event_at = self.now
        line = f"{self.num_events} {self.now:.6f} {self.current.process.name}/{self.current.name} {kind} {what}\n"
        self.digest.update(line.encode())
        if self.log is not None:
            self.log.append(line)
        self.on_event(kind, what)
        self.check()

    def note(self, what: str) -> None:
        """Write down a fault, or a remark, which is no event."""
        line = f"- {self.now:.6f} {what}\n"
        self.digest.update(line.encode())
        if self.log is not None:
            self.log.append(line)

    def fault(self, kind: str, what: str) -> bool:
        """Whether a fault that was drawn happens."""
        number, self.num_faults = self.num_faults, self.num_faults + 1
        if self.allowed is not None and number not in self.allowed:
            return False
        self.faults.append(f"#{number} event {self.num_events} t={self.now:.3f} {kind}: {what}")
        self.note(self.faults[-1])
        return True

    def check(self) -> None:
        """Raise Killed in a process that has ended."""
        if self.current.process.is_dead:
            raise Killed

    # Threads

    def start(self, name: str, target: Callable[[], None], process: Process | None = None) -> Fiber:
        fiber = Fiber(name, process or self.current.process, target)
        fiber.process.fibers.append(fiber)
        carrier = self._idle.pop() if self._idle else _Carrier(self)
        carrier.fiber, fiber.baton = fiber, carrier.baton
        self._ready.append(fiber)
        return fiber

    def wake(self, fiber: Fiber) -> None:
        """Let a thread that waits go on."""
        if fiber.waits_for and not fiber.is_done:
            fiber.ticket += 1
            fiber.waits_for = ""
            self._ready.append(fiber)

    def wait(self, what: str, timeout_s: float | None = None) -> bool:
        """Give the baton away until `wake`; whether that came within `timeout_s` of virtual time."""
        me = self.current
        if me.process.is_dead:
            raise Killed
        me.waits_for, me.timed_out = what, False
        if timeout_s is not None:
            self._count += 1
            heapq.heappush(self._timers, (self.now + max(timeout_s, 0.0), self._count, me, me.ticket))
        self._switch()
        return not me.timed_out

    def pause(self) -> None:
        """Let others go first, perhaps."""
        if self.current.process.is_dead:
            raise Killed
        if self._ready:
            self._ready.append(self.current)
            self._switch()

    def sleep(self, seconds: float, what: str = "sleep") -> None:
        self.wait(what, seconds)

    def kill(self, process: Process) -> None:
        """End a process where its threads are."""
        process.is_dead = True
        for fiber in process.fibers:
            self.wake(fiber)

    def join(self, fiber: Fiber, timeout_s: float | None = None) -> bool:
        while not fiber.is_done:
            fiber.joiners.append(self.current)
            if not self.wait(f"the end of {fiber.name}", timeout_s):
                return fiber.is_done
            if self.stuck:
                raise LawBroken(self.stuck)
        return True

    def _switch(self) -> None:
        me, following = self.current, self._next()
        if following is not me:
            self.current = following
            following.baton.release()
            me.baton.acquire()
        if me.process.is_dead:
            raise Killed

    def _next(self) -> Fiber:
        ready, timers = self._ready, self._timers
        while not ready:
            if not timers or timers[0][0] - self._last_event_at > IDLE_LIMIT_S:
                if self.stuck:
                    raise SystemExit(self.stuck)
                self.stuck = "nothing goes on: " + "; ".join(self._waiting())
                self.root.waits_for = ""
                return self.root
            when, _, fiber, ticket = heapq.heappop(timers)
            if fiber.ticket == ticket and fiber.waits_for and not fiber.is_done:
                self.now = max(self.now, when)
                fiber.ticket += 1
                fiber.waits_for, fiber.timed_out = "", True
                ready.append(fiber)
        return ready.pop(self.draw.randrange(len(ready)) if len(ready) > 1 else 0)

    def _waiting(self) -> list[str]:
        process = self.last_process
        fibers = process.fibers if process is not None else []
        return [f"{fiber.name} waits for {fiber.waits_for}" for fiber in fibers if not fiber.is_done]

    def ended(self, fiber: Fiber, carrier: _Carrier) -> None:
        """Of a thread that has run to its end: the next one goes on."""
        fiber.is_done = True
        for joiner in fiber.joiners:
            self.wake(joiner)
        if not fiber.process.is_dead:
            fiber.process.fibers.remove(fiber)
        self._idle.append(carrier)
        self.current = self._next()
        self.current.baton.release()

    def close(self) -> None:
        """Let real threads end."""
        for carrier in self._idle:
            carrier.fiber = None
            carrier.baton.release()
        self._idle.clear()


class _Carrier:
    """A real thread, which runs one thread of the world after another."""

    def __init__(self, world: World) -> None:
        self.baton, self.fiber, self._world = _thread.allocate_lock(), None, world
        self.fiber: Fiber | None
        self.baton.acquire()
        _thread.start_new_thread(self._work, ())

    def _work(self) -> None:
        while True:
            self.baton.acquire()
            fiber = self.fiber
            if fiber is None:
                return
            if self._world.tracer is not None:
                sys.settrace(self._world.tracer)
            try:
                if not fiber.process.is_dead:
                    contextvars.Context().run(fiber.target)
            except Killed:
                pass
            except BaseException as error:
                fiber.process.error = fiber.process.error or error
            self._world.ended(fiber, self)


# What takes the place of Python's own modules


class Namespace(types.ModuleType):
    """A module in which some names are others."""

    def __init__(self, module: types.ModuleType, **names: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__["_module"] = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def clock_of(world: World) -> Namespace:
    """`time`: the monotonic clock never jumps, the other one may."""

    def monotonic() -> float:
        return world.now

    def wall() -> float:
        return 1.8e9 + world.now + world.wall_offset

    def sleep(seconds: float) -> None:
        world.sleep(seconds)
        world.event("timer", "sleep")

    return Namespace(time, monotonic=monotonic, perf_counter=monotonic, time=wall, sleep=sleep)


def threading_of(world: World) -> Namespace:
    """`threading`, as far as the product and `concurrent.futures` use it."""

    class Lock:
        def __init__(self) -> None:
            self._holder: Fiber | None = None
            self._depth, self._waiters = 0, deque[Fiber]()

        reenters = False

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            while self._holder is not None and not (self.reenters and self._holder is world.current):
                if self._holder.process.is_dead:
                    break  # what a process held has ended with it
                if not blocking:
                    return False
                self._waiters.append(world.current)
                if not world.wait("a lock", None if timeout < 0 else timeout):
                    return False
            self._holder = world.current
            self._depth += 1
            return True

        def release(self) -> None:
            self._depth -= 1
            if self._depth == 0:
                self._holder = None
                while self._waiters:
                    world.wake(self._waiters.popleft())

        def locked(self) -> bool:
            return self._holder is not None

        def __enter__(self) -> bool:
            return self.acquire()

        def __exit__(self, *_: object) -> None:
            self.release()

    class RLock(Lock):
        reenters = True

    class Condition:
        def __init__(self, lock: Any = None) -> None:
            self._lock = lock or RLock()
            self.acquire, self.release, self._waiters = self._lock.acquire, self._lock.release, deque[Fiber]()

        def __enter__(self) -> bool:
            return bool(self._lock.__enter__())

        def __exit__(self, *_: object) -> None:
            self._lock.release()

        def wait(self, timeout: float | None = None) -> bool:
            self._waiters.append(world.current)
            self._lock.release()
            try:
                return world.wait("a condition", timeout)
            finally:
                if not world.current.process.is_dead:
                    self._lock.acquire()

        def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
            ends = None if timeout is None else world.now + timeout
            while not predicate():
                if ends is not None and world.now >= ends:
                    return predicate()
                self.wait(None if ends is None else ends - world.now)
            return True

        def notify(self, n: int = 1) -> None:
            while self._waiters and n > 0:
                world.wake(self._waiters.popleft())
                n -= 1

        def notify_all(self) -> None:
            self.notify(len(self._waiters))

    class Event:
        def __init__(self) -> None:
            self._is_set, self._waiters = False, deque[Fiber]()

        def is_set(self) -> bool:
            return self._is_set

        def set(self) -> None:
            self._is_set = True
            while self._waiters:
                world.wake(self._waiters.popleft())

        def clear(self) -> None:
            self._is_set = False

        def wait(self, timeout: float | None = None) -> bool:
            ends = None if timeout is None else world.now + timeout
            while not self._is_set:
                self._waiters.append(world.current)
                if not world.wait("an event", None if ends is None else max(0.0, ends - world.now)):
                    break
            return self._is_set

    class Thread:
        def __init__(
            self,
            group: None = None,
            target: Callable[..., object] = lambda: None,
            name: str = "thread",
            args: Sequence[Any] = (),
            kwargs: Any = None,
            *,
            daemon: bool | None = None,
        ) -> None:
            self.name, self.daemon, self._fiber = name, daemon, None
            self._run = lambda: target(*args, **(kwargs or {}))
            self._fiber: Fiber | None

        def start(self) -> None:
            self._fiber = world.start(self.name, lambda: (self._run(), None)[1])

        def join(self, timeout: float | None = None) -> None:
            assert self._fiber is not None
            world.join(self._fiber, timeout)

        def is_alive(self) -> bool:
            return self._fiber is not None and not self._fiber.is_done

    class Timer:
        def __init__(
            self, interval: float, function: Callable[..., object], args: Any = (), kwargs: Any = None
        ) -> None:
            self._interval, self._run, self._is_cancelled = interval, lambda: function(*args, **(kwargs or {})), False
            self.daemon = True

        def start(self) -> None:
            def work() -> None:
                world.sleep(self._interval, "a timer")
                if not self._is_cancelled:
                    self._run()

            world.start("timer", work)

        def cancel(self) -> None:
            self._is_cancelled = True

    def get_ident() -> int:
        return id(world.current)

    return Namespace(
        threading,
        Lock=Lock,
        RLock=RLock,
        Condition=Condition,
        Event=Event,
        Thread=Thread,
        Timer=Timer,
        get_ident=get_ident,
    )


def queue_of(world: World) -> Namespace:
    """`queue`, with the one that the product has."""

    class SimpleQueue:
        def __init__(self) -> None:
            self._items, self._waiters = deque[Any](), deque[Fiber]()

        def put(self, item: object) -> None:
            self._items.append(item)
            if self._waiters:
                world.wake(self._waiters.popleft())

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            while not self._items:
                self._waiters.append(world.current)
                if not block or not world.wait("a queue", timeout):
                    raise queue.Empty
            return self._items.popleft()

        def empty(self) -> bool:
            return not self._items

        def qsize(self) -> int:
            return len(self._items)

    return Namespace(queue, SimpleQueue=SimpleQueue)


class NumberedTask(asyncio.Task):  # type: ignore[type-arg]
    """Sets of tasks have the same order in each run."""

    count = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        NumberedTask.count += 1
        self.number = NumberedTask.count
        super().__init__(*arguments, **named)

    def __hash__(self) -> int:
        return self.number


class Loop(asyncio.base_events.BaseEventLoop):
    """asyncio's own loop, on the world's clock."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world, self._sleeper, self._is_woken = world, None, False
        self._sleeper: Fiber | None
        self._selector = self  # whose `select` is below
        self.process = world.current.process
        self._debug = False
        self.set_task_factory(lambda loop, coroutine, **named: NumberedTask(coroutine, loop=loop, **named))

    def time(self) -> float:
        return self._world.now

    def select(self, timeout: float | None) -> list[Any]:
        if timeout == 0 or self._is_woken:
            self._world.pause()
        else:
            self._sleeper = self._world.current
            try:
                self._world.wait("the next callback", timeout)
            finally:
                self._sleeper = None
        self._is_woken = False
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        del event_list

    def _write_to_self(self) -> None:
        self._is_woken = True
        if self._sleeper is not None:
            self._world.wake(self._sleeper)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        def fire(*given: Any) -> None:
            self._world.event("timer", getattr(callback, "__qualname__", "callback"))
            callback(*given)

        return super().call_at(when, fire, *args, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        if executor is None:
            executor = self._world.executor  # type: ignore[attr-defined]
        return asyncio.wrap_future(executor.submit(func, *args), loop=self)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        if self.process.is_dead:
            _close_within(callback, *args)
            self._world.check()
            return None
        return super().call_soon_threadsafe(callback, *args, context=context)

    def run_forever(self) -> None:
        try:
            super().run_forever()
        except Killed:
            for task in sorted(asyncio.all_tasks(self), key=hash):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                _close_within(task.get_coro())
            for handle in self._ready:
                _close_within(handle._callback, *handle._args)
            raise

    def call_exception_handler(self, context: Any) -> None:
        del context  # what a killed task has raised is asked for by nobody

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._scheduled.clear()


def _close_within(*objects: Any) -> None:
    """Close coroutines, those that one which has not begun was given, and those that a function has in its closure: whose
    process has ended they are awaited by nobody."""
    for each in objects:
        if inspect.iscoroutine(each):
            given = list(each.cr_frame.f_locals.values()) if inspect.getcoroutinestate(each) == "CORO_CREATED" else []
            with contextlib.suppress(BaseException):
                each.close()
            _close_within(*given)
        elif inspect.isfunction(each):
            _close_within(*(cell.cell_contents for cell in each.__closure__ or ()))


class Policy(asyncio.events.AbstractEventLoopPolicy):
    """Loops of the world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def new_event_loop(self) -> Loop:
        return Loop(self._world)

    def get_event_loop(self) -> Any:
        raise RuntimeError("no loop runs here")

    def set_event_loop(self, loop: Any) -> None:
        del loop
