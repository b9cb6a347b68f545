"""The processes that environments run in, started by `local.py`.

    trainer
      supervisor     that of `system/processes`: starts workers and ends them with everything that stems from them
        worker       one session, one process group; answers over its own connection to the trainer, one request at a time;
                     asynchronous environments' are awaited together, on a loop beside that
          ...        whatever an environment starts; ends with its worker

The supervisor imports the environments' modules once and forks the workers, which then start in milliseconds and share that
memory. Where the import leaves a thread or an open file behind, which a fork would break, it says so and is started once
more without: each worker then imports by itself. No kept library does this without unpickling what the child sends.

Messages are never sent over standard input, output or error.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import functools
import gc
import importlib
import io
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TextIO

from skyrl_train.parts import TOOLS
from skyrl_train.registry import split_spec
from skyrl_train.rollout.boundary import Answer
from skyrl_train.rollout.envs.environments import (
    environment_violations,
    is_asynchronous,
    playing_itself_violations,
    resolve_environment,
    split_environment,
)
from skyrl_train.rollout.hosts.hosted import HostedEnvironment
from skyrl_train.rollout.rewards.reward_functions import reward_facts, reward_violations
from skyrl_train.rollout.tools.toolbox import tool_violations
from skyrl_train.rollout.tools.variables import told_missing, watch
from skyrl_train.system.processes import FIRST_OWN_FD, Frames, Supervisor, adopt_orphans, frame
from skyrl_train.telemetry.logs import stacks
from skyrl_train.types import FailureKind

_CHUNK = 1 << 18
_LINUX = sys.platform == "linux"


# The worker


def _work(connection: socket.socket) -> None:
    """Answer requests until the trainer closes the connection."""
    frames, hosted, replies = Frames(), dict[int, HostedEnvironment](), _Replies(connection)
    while data := connection.recv(_CHUNK):
        for request in frames.feed(data):
            number = int(request["environment"])
            if number not in hosted:
                hosted[number] = HostedEnvironment(str(request["name"]))
            environment = hosted[number]
            if request["call"] in ("close", "score"):  # the last of an environment; all that a reward function is asked
                del hosted[number]
            answer = environment.answer(request)
            if isinstance(answer, Coroutine):
                answered = environment.in_time(request, answer, request.get("timeout_s"))
                asyncio.run_coroutine_threadsafe(replies.send_later(answered, request), replies.loop)
            else:
                signal.alarm(0)
                replies.send(answer, request)


class _Replies:
    """The way back to the trainer, of answers from two threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._process, self._output = connection, os.getpid(), _Output()
        self._lock = threading.Lock()

    @functools.cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """What asynchronous environments run on, on a thread that the first of them starts."""
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
        return loop

    async def send_later(self, answer: Awaitable[Answer], request: Mapping[str, Any]) -> None:
        self.send(await answer, request)

    def send(self, answer: Answer, request: Mapping[str, Any]) -> None:
        if os.getpid() != self._process:  # the environment forked, and its child came back as well
            os._exit(0)
        try:
            data = frame({"number": request["number"], "answer": answer})
        except (ValueError, RecursionError, MemoryError) as error:
            message = f"its answer cannot be sent: {error}"
            failure = {"failure": FailureKind.ENVIRONMENT_ERROR.value, "message": message}
            data = frame({"number": request["number"], "answer": failure})
        with self._lock:
            # What this environment did to the process must not break the next one's call.
            self._output.restore()
            self._connection.setblocking(True)
            self._connection.sendall(data)


class _Output:
    """Standard output and error, which lead to the log whatever an environment closes."""

    def __init__(self) -> None:
        self._log = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, FIRST_OWN_FD)
        self._streams: tuple[TextIO, ...] = (sys.stdout, sys.stderr)

    def restore(self) -> None:
        """Open again what was closed, and put back what was replaced."""
        if any(stream.closed for stream in self._streams) or not (_is_open(1) and _is_open(2)):
            for descriptor in (1, 2):
                os.dup2(self._log, descriptor)
            self._streams = tuple(
                open(descriptor, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115 - for good
                for descriptor in (1, 2)
            )
        sys.stdout, sys.stderr = self._streams[0], self._streams[1]


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _become_worker(memory_bytes: int, descriptor: int) -> None:
    """Be a worker: what a process that the supervisor forked does."""
    adopt_orphans()
    connection = socket.socket(fileno=os.dup(descriptor))
    faulthandler.enable(file=2)
    stacks.answer("worker of environments")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(memory_bytes)
    if "numpy.random" in sys.modules:  # numbers of its own, as Python's module draws after a fork by itself
        sys.modules["numpy.random"].seed()
    _work(connection)


def _limit_memory(num_bytes: int) -> None:
    """Let this process take so much beyond what it has, which the libraries that it has mapped count towards."""
    with contextlib.suppress(OSError, ValueError):
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = mapped + num_bytes if hard == resource.RLIM_INFINITY else min(hard, mapped + num_bytes)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# The supervisor


def _load(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Import the environments. Return what is wrong with them, and whether workers can be forked from here now."""
    before = _open_files()
    violations = [vars(found) for spec in settings["specs"] for found in environment_violations(spec)]
    for index, spec in enumerate(settings["tools"]):
        violations += [vars(found) for found in tool_violations(spec, f"{TOOLS.setting}[{index}]")]
    if settings["tools"] and not violations:
        violations += [vars(found) for spec in settings["specs"] for found in playing_itself_violations(spec)]
    facts: dict[str, object] = {}
    for setting, spec in settings["rewards"].items():
        found = reward_violations(spec, setting)
        violations += map(vars, found)
        if not found:
            facts[setting] = vars(reward_facts(spec))
    if settings["registry"]:
        with contextlib.suppress(ImportError):
            importlib.import_module("skyrl_gym.envs")
    specs = [] if violations else settings["specs"]
    made_by = {split_spec(spec)[0]: resolve_environment(split_environment(spec)[0]) for spec in specs}
    asynchronous = [name for name, create in made_by.items() if is_asynchronous(create)]
    tasks = len(os.listdir("/proc/self/task")) if _LINUX else threading.active_count()
    forkable = tasks == 1 and _open_files() <= before
    violations = [{**found, "remedy": found["remedy"] + told_missing()} for found in violations]
    known = {"violations": violations, "rewards": facts, "asynchronous": asynchronous}
    return {"ready": True, **known, "forkable": forkable}


def _open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd")) if _LINUX else set()


def main() -> None:
    """Be the supervisor: import the environments, and fork workers from there."""
    for stream in (sys.stdout, sys.stderr):  # whatever ends a worker, its log has the lines until then
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    with Supervisor(lambda descriptor: _become_worker(memory_bytes, descriptor)) as supervisor:
        settings = supervisor.settings
        memory_bytes = int(settings["memory_bytes"])
        stacks.answer("supervisor of environments")
        watch(settings["withheld"])
        sys.path[:] = [*settings["sys_path"], *(sys.path if settings["apart"] else ())]
        if settings["preload"]:
            supervisor.tell(_load(settings))
            gc.collect()
            gc.freeze()  # what is shared with workers stays shared
        else:
            supervisor.tell({"ready": True, "violations": [], "forkable": True})
        supervisor.run()


if __name__ == "__main__":
    main()
