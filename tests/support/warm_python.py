"""Python processes that begin with torch and transformers imported: a server, which has them, forks.

To import them takes 5 to 7 seconds of a core, and hundreds of tests start a command. What runs is `python -m MODULE` in
a process of its own, with its own session, descriptors and folder; only these imports are not made again. Where what
is imported could differ, since the environment does, an ordinary process is started. Commands as users start them are
tried by tests of scripts, of the wheel and of a bare machine.

    server, once a process of tests:  import --> fork for each request --> tell the id of the child --> wait for it
    process of tests:                 ask --> wait on a descriptor of the child --> ask for its status
"""

from __future__ import annotations

import array
import json
import os
import re
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TypeAlias

_IMPORTED = (
    "torch",
    "hydra.experimental",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "matplotlib.figure",
    "pyarrow.parquet",
    "skyrl_train.learner.build",
    "skyrl_train.inference.hf",
    "skyrl_train.runs.rl",
    "skyrl_train.runs.sft",
)
_READ = re.compile(r"(HF|TRANSFORMERS|TORCH(?!INDUCTOR)|PYTORCH|OMP|MKL|CUDA|LD|XDG|MPL|PYTHON(?!PATH))\w*|HOME")
"""Variables that something reads while it is imported. TORCHINDUCTOR_CACHE_DIR is none: torch sets it in any process."""
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
"""Of the server: as it is before a test changes it."""


class WarmProcess:
    """What `subprocess.Popen` is, as far as tests of commands use it."""

    def __init__(self, server: _Server, pid: int, args: list[str]):
        self.pid, self.args = pid, args
        self.returncode: int | None = None
        self.cpu_s = 0.0
        """Once it has ended, with its children."""
        self._server, self._descriptor = server, os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._descriptor], [], [], 0)[0]:
            self.returncode, self.cpu_s = self._server.end_of(self.pid)
            os.close(self._descriptor)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit status. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            select.select([self._descriptor], [], [], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def send_signal(self, signum: int) -> None:
        """Sends it where the process still runs."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, signum)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)


Started: TypeAlias = "WarmProcess | subprocess.Popen[bytes]"


@dataclass(frozen=True, kw_only=True)
class Done:
    """A process that has ended."""

    returncode: int
    stdout: str
    """All that it printed, errors too."""
    cpu_s: float
    """Seconds of the processor, its children's among them; what was imported before is not counted."""


def start(
    words: Sequence[str], *, output: int, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Started:
    """`python words`, a module behind `-m` or a file and their arguments, with one thread, in a session of its own, reading
    nothing. What it prints goes to the descriptor. `environment` is put over this process's own."""
    command, whole = [sys.executable, *words], {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    server = _server()
    if server is not None and server.imports_as(whole):
        return server.start(command, output, whole, folder or Path.cwd())
    return subprocess.Popen(
        command,
        cwd=folder,
        env=whole,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(
    *words: str, environment: Mapping[str, str] | None = None, folder: Path | None = None, timeout_s: float = 500.0
) -> Done:
    """The same to its end. Raises subprocess.TimeoutExpired, with its process group killed."""
    with tempfile.TemporaryFile() as file:
        before = _cpu_s_of_children()
        process = start(words, output=file.fileno(), environment=environment, folder=folder)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        cpu_s = process.cpu_s if isinstance(process, WarmProcess) else _cpu_s_of_children() - before
        file.seek(0)
        return Done(returncode=status, stdout=file.read().decode(errors="replace"), cpu_s=cpu_s)


def _cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Server:
    """The process that forks, as the process of tests sees it."""

    def __init__(self) -> None:
        self._environment, self._lock = _imported_with(_ENVIRONMENT), Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=Path(__file__).parents[2],
                env=_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )

    def imports_as(self, environment: Mapping[str, str]) -> bool:
        return self._environment == _imported_with(environment)

    def start(self, command: list[str], output: int, environment: Mapping[str, str], folder: Path) -> WarmProcess:
        request = {"command": command, "environment": dict(environment), "folder": str(folder)}
        return WarmProcess(self, int(self._answer(request, output)[0]), command)

    def end_of(self, pid: int) -> tuple[int, float]:
        status, cpu_s = self._answer({"ended": pid})
        return int(status), cpu_s

    def _answer(self, request: Mapping[str, object], *descriptors: int) -> list[float]:
        with self._lock:
            _send(self._socket, request, *descriptors)
            answer = _received(self._socket)[0]
        assert isinstance(answer, list)
        return answer


@cache
def _server() -> _Server | None:
    return _Server() if hasattr(os, "pidfd_open") else None


def _imported_with(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _READ.fullmatch(name)}


def _send(to: socket.socket, message: object, *descriptors: int) -> None:
    data = json.dumps(message).encode()
    carried = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    to.sendmsg([len(data).to_bytes(4, "big")], carried)
    to.sendall(data)


def _received(of: socket.socket) -> tuple[object, list[int]]:
    """A message and the descriptors with it. Raises EOFError."""
    head, descriptors, _, _ = socket.recv_fds(of, 4, 1)
    data = b""
    size = int.from_bytes(head, "big")
    while head and len(data) < size:
        part = of.recv(size - len(data))
        if not part:
            break
        data += part
    if not data:
        raise EOFError
    return json.loads(data), descriptors


def _serve(requests: socket.socket) -> list[str]:
    """Answers until the process of tests is gone; in a child it returns the command that this process now is."""
    while True:
        try:
            request, descriptors = _received(requests)
        except (EOFError, ConnectionError):
            os._exit(0)
        assert isinstance(request, dict)
        if "ended" in request:
            _, status, used = os.wait4(request["ended"], 0)
            _send(requests, [os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime])
            continue
        child = os.fork()
        if child == 0:
            requests.close()
            _become(request, descriptors[0])
            return list(request["command"])
        os.close(descriptors[0])
        _send(requests, [child])


def _become(request: Mapping[str, object], output: int) -> None:
    environment, folder = request["environment"], request["folder"]
    assert isinstance(environment, dict)
    assert isinstance(folder, str)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    added = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [folder, *added, *(each for each in sys.path[1:] if each not in added)]


def _main(descriptor: int) -> None:
    import gc
    import importlib

    gc.disable()
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    command = _serve(socket.socket(fileno=descriptor))
    gc.enable()
    sys.orig_argv[:] = command
    if command[1] == "-m":
        sys.argv[:] = command[2:]
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = command[1:]
        sys.path[0] = str(Path(command[1]).resolve().parent)
        runpy.run_path(command[1], run_name="__main__")


if __name__ == "__main__":
    _main(int(sys.argv[1]))
