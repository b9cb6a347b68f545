"""The processes that environments run in: `python -m skyrl_train.rollout.hosts.worker FD`, started by `env_local.py`.

    trainer
      supervisor     starts workers and ends them with everything that stems from them; says how each ended
        worker       one session, one process group; answers over its own connection to the trainer, one request at a time;
                     asynchronous environments' are awaited together, on a loop beside that
          ...        whatever an environment starts; ends with its worker

The supervisor imports the environments' modules once and forks the workers, which then start in milliseconds and share that
memory. Where the import leaves a thread or an open file behind, which a fork would break, it says so and is started once
more without: each worker then imports by itself. No kept library does this without unpickling what the child sends.

Messages (`env_connection.py`) are never sent over standard input, output or error.
"""

from __future__ import annotations

import array
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
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TextIO

from skyrl_train.parts import TOOLS
from skyrl_train.registry import split_spec
from skyrl_train.rollout.boundary.session import Answer
from skyrl_train.rollout.envs.environments import (
    environment_violations,
    is_asynchronous,
    playing_itself_violations,
    resolve_environment,
    split_environment,
)
from skyrl_train.rollout.hosts.connection import Frames, frame
from skyrl_train.rollout.hosts.hosted import HostedEnvironment
from skyrl_train.rollout.rewards.reward_functions import reward_facts, reward_violations
from skyrl_train.rollout.tools.toolbox import tool_violations
from skyrl_train.rollout.tools.variables import told_missing, watch
from skyrl_train.system.processes import adopt_orphans, children, end_with_parent, kill, prefer_for_memory
from skyrl_train.telemetry.logs import stacks
from skyrl_train.types import FailureKind

_CHUNK = 1 << 18
_LOOK_EVERY_S = 1.0
_END_WITHIN_S = 5.0
_FIRST_OWN_FD = 100
"""Connections are moved here: code that closes low file descriptors does not hit them."""
_LINUX = sys.platform == "linux"


# The worker


def _work(connection: socket.socket) -> None:
    """Answer requests until the trainer closes the connection."""
    frames, hosted, replies = Frames(), dict[int, HostedEnvironment](), _Replies(connection)
    while data := _receive(connection):
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
        with self._lock:
            # What this environment did to the process must not break the next one's call.
            self._output.restore()
            self._connection.setblocking(True)
            self._connection.sendall(_framed(answer, request["number"]))


class _Output:
    """Standard output and error, which lead to the log whatever an environment closes."""

    def __init__(self) -> None:
        self._log = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FD)
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


def _framed(answer: dict[str, Any], number: int) -> bytes:
    try:
        return frame({"number": number, "answer": answer})
    except (ValueError, RecursionError, MemoryError) as error:
        failure = {"failure": FailureKind.ENVIRONMENT_ERROR.value, "message": f"its answer cannot be sent: {error}"}
        return frame({"number": number, "answer": failure})


def _receive(connection: socket.socket) -> bytes:
    """Return what arrives next; nothing at the end, or when the supervisor is gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        if select.select([connection], [], [], _LOOK_EVERY_S)[0]:
            return connection.recv(_CHUNK)
    return b""


def _become_worker(connection: socket.socket, memory_bytes: int, supervisor: int) -> None:
    """What a forked process does in place of the supervisor's work: be a worker, and end."""
    status = 1
    try:
        os.setsid()
        end_with_parent(signal.SIGKILL)
        adopt_orphans()
        if os.getppid() != supervisor:
            return
        signal.set_wakeup_fd(-1)
        # A shell has what it starts in the background ignore SIGQUIT, and `nohup` SIGHUP: a worker would, too.
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGQUIT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        faulthandler.enable(file=2)
        stacks.answer("worker of environments")
        prefer_for_memory()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _limit_memory(memory_bytes)
        if "numpy.random" in sys.modules:  # numbers of its own, as Python's module draws after a fork by itself
            sys.modules["numpy.random"].seed()
        _work(connection)
        status = 0
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(status)


def _limit_memory(num_bytes: int) -> None:
    """Let this process take so much beyond what it has, which the libraries that it has mapped count towards."""
    with contextlib.suppress(OSError, ValueError):
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = mapped + num_bytes if hard == resource.RLIM_INFINITY else min(hard, mapped + num_bytes)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# The supervisor


class Supervisor:
    """Starts workers and ends them. One thread, which runs no environment's code after it has imported it."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        """`control` is the connection to the trainer; `settings` is its first message."""
        self._control = control
        self._memory_bytes = int(settings["memory_bytes"])
        self._workers: dict[int, int] = {}
        """Process to the worker's number."""
        self._frames = Frames()
        self._connections: list[int] = []
        """File descriptors that came for workers that are still to be started."""
        self._wake, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wake_end = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve until the trainer closes the connection or a signal ends this."""
        try:
            while self._serve():
                self._collect()
        finally:
            self._end_all()

    def _serve(self) -> bool:
        """Wait a moment for what the trainer says, and do it; False at the end."""
        ready = select.select([self._control.fileno(), self._wake], [], [], _LOOK_EVERY_S)[0]
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, _CHUNK)
        if self._control.fileno() not in ready:
            return True
        data, descriptors = _receive_descriptors(self._control)
        self._connections += descriptors
        for message in self._frames.feed(data):
            if "start" in message:
                self._start(int(message["start"]))
            elif "end" in message:
                for process in [pid for pid, number in self._workers.items() if number == message["end"]]:
                    kill(process)
            else:
                return False
        return bool(data)

    def _start(self, number: int) -> None:
        connection = socket.socket(fileno=self._connections.pop(0))
        supervisor = os.getpid()
        process = os.fork()
        if process == 0:
            self._control.close()
            os.close(self._wake)
            os.close(self._wake_end)
            _become_worker(connection, self._memory_bytes, supervisor)
        connection.close()
        self._workers[process] = number
        self._tell({"started": number, "process": process})

    def _collect(self) -> None:
        """Tell of workers that ended, and end what they left behind: processes that nobody else is the parent of."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                break
            if process in self._workers:
                with contextlib.suppress(OSError):
                    os.killpg(process, signal.SIGKILL)
                self._tell({"ended": self._workers.pop(process), "status": os.waitstatus_to_exitcode(status)})
        for orphan in children() - set(self._workers):
            kill(orphan)

    def _tell(self, message: object) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(frame(message))

    def _end_all(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        deadline = time.monotonic() + _END_WITHIN_S
        while (running := children() | set(self._workers)) and time.monotonic() < deadline:
            for process in running:
                kill(process)
            self._collect()
            time.sleep(0.005)


def _receive_descriptors(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return bytes and the file descriptors that came with them, as those of low numbers are for others."""
    room = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(_CHUNK, socket.CMSG_SPACE(64 * room.itemsize))
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            room.frombytes(content[: len(content) - len(content) % room.itemsize])
    return data, [_moved(descriptor) for descriptor in room]


def _moved(descriptor: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FD)
    os.close(descriptor)
    return moved


def _load(settings: dict[str, Any]) -> dict[str, Any]:
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
    """Be the supervisor whose connection to the trainer is the file descriptor in the first argument."""
    control = socket.socket(fileno=_moved(int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    end_with_parent(signal.SIGTERM)
    adopt_orphans()
    for stream in (sys.stdout, sys.stderr):  # whatever ends a worker, its log has the lines until then
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    stacks.answer("supervisor of environments")
    frames = Frames()
    settings = next(message for data in iter(lambda: control.recv(_CHUNK), b"") for message in frames.feed(data))
    watch(settings["withheld"])
    sys.path[:] = [*settings["sys_path"], *(sys.path if settings["apart"] else ())]
    if settings["preload"]:
        control.sendall(frame(_load(settings)))
        gc.collect()
        gc.freeze()  # what is shared with workers stays shared
    else:
        control.sendall(frame({"ready": True, "violations": [], "forkable": True}))
    Supervisor(control, settings).run()


if __name__ == "__main__":
    main()
