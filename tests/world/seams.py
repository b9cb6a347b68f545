"""Where the product touches the world: the modules of Python that it calls, in whose place a simulated one stands.

The product's own code is unchanged and asks nothing. Its interface to time, threads, queues and files is that of `time`,
`threading`, `queue`, `os`, `open`, `pathlib`, `shutil` and `fcntl`, and to tasks that of asyncio's loops; each module of the
product, and each of the few of Python's own that it reaches them through, sees these names replaced while a world runs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures._base
import concurrent.futures.thread
import contextlib
import fcntl
import gc
import io
import logging
import os
import pathlib
import queue
import shutil
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from functools import lru_cache
from typing import Any

from skyrl_train.system.files import append_log
from skyrl_train.telemetry import Activity
from skyrl_train.telemetry.records import Timeline
from skyrl_train.trainers import loop
from skyrl_train.trainers.step_timer import StepTimer
from tests.world.disk import Disk, names_of
from tests.world.machine import Killed, Namespace, NumberedTask, Policy, World, clock_of, queue_of, threading_of

_REPLACED = {"time": time, "threading": threading, "queue": queue, "os": os, "fcntl": fcntl, "uuid": uuid}


class Threads(Executor):
    """In place of the pool behind `asyncio.to_thread`: a thread for each call."""

    def __init__(self, world: World) -> None:
        self._world = world

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except Killed:
                raise
            except BaseException as error:
                future.set_exception(error)

        self._world.start("to_thread", call)
        return future


@contextlib.contextmanager
def simulated(world: World, disk: Disk) -> Iterator[None]:
    """Have the product run in the world until the block ends."""
    names, opened = names_of(disk)
    draws = world.random("uuid")
    flock = Namespace(fcntl, flock=disk.lock)
    replaced: dict[str, Any] = {
        "time": clock_of(world),
        "threading": threading_of(world),
        "queue": queue_of(world),
        "os": names,
        "fcntl": flock,
        "uuid": Namespace(uuid, uuid4=lambda: uuid.UUID(int=draws.getrandbits(128), version=4)),
    }
    world.executor = Threads(world)  # type: ignore[attr-defined]
    undo: list[Callable[[], None]] = []

    def put(module: Any, name: str, value: Any) -> None:
        before = module.__dict__.get(name, undo)
        setattr(module, name, value)
        undo.append(lambda: delattr(module, name) if before is undo else setattr(module, name, before))

    for module in [each for name, each in sys.modules.items() if name.startswith("skyrl_train")]:
        for name, real in _REPLACED.items():
            if module.__dict__.get(name) is real:
                put(module, name, replaced[name])
        if isinstance(module, types.ModuleType) and module.__file__ and module.__name__ != "skyrl_train.system.lazy":
            put(module, "open", opened)
        if module.__dict__.get("uuid4") is uuid.uuid4:
            put(module, "uuid4", replaced["uuid"].uuid4)
    put(loop, "resident_bytes", lambda: 1 << 30)
    put(
        append_log, "parse_strict_json", lru_cache(4096)(append_log.parse_strict_json)
    )  # a journal is read at each start
    clock = replaced["time"]
    for made in (Activity.__init__, StepTimer.__init__, Timeline.__init__):  # with clocks taken before the world began
        before = made.__defaults__ or ()
        made.__defaults__ = tuple(getattr(clock, each.__name__) for each in before)  # type: ignore[attr-defined]
        undo.append(lambda made=made, before=before: setattr(made, "__defaults__", before))  # type: ignore[misc]
    put(concurrent.futures._base, "threading", replaced["threading"])
    put(concurrent.futures._base, "time", replaced["time"])
    for name, module in [
        (name, each) for name, each in sys.modules.items() if name.split(".")[0] in ("pathlib", "shutil")
    ]:
        put(module, "os", names)
        if "io" in module.__dict__:
            put(module, "io", Namespace(io, open=opened))
        if name == "shutil":
            put(module, "open", opened)
            put(module, "_use_fd_functions", False)
    policy = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(Policy(world))
    undo.append(lambda: asyncio.set_event_loop_policy(policy))
    hook = sys.breakpointhook
    undo.append(lambda: setattr(sys, "breakpointhook", hook))
    NumberedTask.count = 0
    was_collecting, level = gc.isenabled(), logging.root.manager.disable
    gc.disable()
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        for step in reversed(undo):
            step()
        world.close()
        logging.disable(level)
        if was_collecting:
            gc.enable()


_ = (pathlib, shutil, concurrent.futures.thread)  # imported before a world replaces names in them
