"""Runs code that a model wrote, with tests, in a process of its own that ends with everything it started.

What holds: a deadline, limits on processor time, memory, file size and open files, an empty folder that goes afterwards, an
environment without this process's variables, and where `unshare` may make namespaces (most Linux machines), no network and
no process that outlives the run. What does not: the code reads whatever files this user may read, can fill the temporary
folder until the deadline, and shares the machine's kernel; without namespaces it has the network, and a process that it
detaches is killed only where it ends up as a child of this one, as in worker processes. It runs in the interpreter of
its tests: a program that is written to cheat can. For code that nobody trusts, run the trainer in a virtual machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

_MAX_FILE_BYTES = 16 << 20
_REAP_TIMEOUT_S = 10.0
"""For a process that was killed: one that the kernel keeps is left to it."""
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
_PROGRAM = """\
import resource
for kind, most in {limits!r}.items():
    hard = resource.getrlimit(getattr(resource, kind))[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(getattr(resource, kind), (most, most))
names, passed = {{"__name__": "__main__"}}, 0
exec(compile({code!r}, "answer", "exec"), names)
for test in {tests!r}:
    try:
        exec(compile(test, "test", "exec"), names)
        passed += 1
    except Exception:
        pass
print("\\n{mark}", passed, flush=True)
"""


def passed_tests(code: str, tests: Sequence[str], *, timeout_s: float, memory_mb: int) -> int:
    """Return how many of the tests pass after `code` has run; 0 where it raises, exceeds a limit or takes too long.

    Raises OSError where no process can be started, which says nothing about the code.
    """
    mark = secrets.token_hex(16)
    limits = {
        "RLIMIT_CPU": int(timeout_s) + 1,
        "RLIMIT_AS": memory_mb << 20,
        "RLIMIT_FSIZE": _MAX_FILE_BYTES,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }
    program = _PROGRAM.format(limits=limits, code=code, tests=list(tests), mark=mark).encode("utf-8", "replace")
    before = _children()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="code_", ignore_cleanup_errors=True))
        output = stack.enter_context(open(Path(folder) / ".output", "w+b"))
        process = subprocess.Popen(
            [*(_UNSHARE if _can_unshare() else ()), sys.executable, "-I", "-"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": "1", "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
        )
        try:
            process.communicate(program, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process, before)
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - 4096))
        said = output.read().decode(errors="replace").split()
    if process.returncode != 0 or mark not in said:
        return 0
    count = said[said.index(mark) + 1 :][:1]
    # A program that found the mark may write any number: what is no count of these tests proves none of them.
    return int(count[0]) if count and count[0] in map(str, range(len(tests) + 1)) else 0


def _end(process: subprocess.Popen[bytes], before: set[int]) -> None:
    """Kill the run's session, and whatever it detached that is a child of this process now."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_REAP_TIMEOUT_S)
    for orphan in _children() - before:
        with contextlib.suppress(OSError):
            os.kill(orphan, signal.SIGKILL)
            ends = time.monotonic() + _REAP_TIMEOUT_S
            while os.waitpid(orphan, os.WNOHANG)[0] == 0 and time.monotonic() < ends:
                time.sleep(0.005)


def _children() -> set[int]:
    """Return the children of this process where it has one thread, as worker processes do; none where it has several, whose
    children may be anybody's."""
    try:
        if len(os.listdir("/proc/self/task")) > 1:
            return set()
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    except OSError:
        return set()


@functools.cache
def _can_unshare() -> bool:
    if shutil.which(_UNSHARE[0]) is None:
        return False
    return subprocess.run([*_UNSHARE, "true"], capture_output=True, timeout=20, check=False).returncode == 0
