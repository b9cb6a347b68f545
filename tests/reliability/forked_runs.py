"""The real command in children of a process that has imported what it needs: each starts in a second instead of ten."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn


class ForkedRun:
    """`python -m skyrl_train.main OVERRIDES` in a child of its own process group. As a `subprocess.Popen`, as far as tests
    of killed runs use one."""

    def __init__(
        self, folder: Path, overrides: Sequence[str], *, modules: Path | None = None, killed_at: int | None = None
    ) -> None:
        """Starts it into `folder`; what it prints goes into a file beside that. At its end the names of the modules that it
        had imported, and the number of its file operations, are in the file `modules`. Before its file operation of number
        `killed_at`, from 1, it is killed with its process group."""
        folder.mkdir(parents=True, exist_ok=True)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _child(folder, overrides, modules, killed_at)

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit status. Raises TimeoutExpired."""
        ends = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > ends:
                raise subprocess.TimeoutExpired("skyrl_train.main", timeout)
            time.sleep(0.02)
        return status


def import_all(modules: Path) -> int:
    """Import what a run before had imported, for children to share. Return the number of its file operations."""
    found = json.loads(modules.read_text())
    for name in found["modules"]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    return int(found["operations"])


class FileOperations:
    """Counts what this process does to files and folders below `folder`: each is opened for writing, renamed, made or
    removed. Python's own calls alone: writes to an open file are none, nor is what a library in C opens."""

    def __init__(self, folder: Path, killed_at: int | None) -> None:
        self.count = 0
        self._folder, self._killed_at, self._lock = os.fsencode(folder), killed_at, threading.Lock()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            _, mode, flags = arguments
            if not (flags & (os.O_WRONLY | os.O_RDWR) or set(mode or "") & set("wax+")):
                return
        elif event not in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"):
            return
        path = arguments[0]
        if isinstance(path, int):
            return
        named = os.fsencode(path)
        # What `shutil.rmtree` removes is named within a folder that is open.
        if not (named.startswith(self._folder) or (event in ("os.remove", "os.rmdir") and not os.path.isabs(named))):
            return
        self.add()

    def add(self) -> None:
        """Count one more; where it is the one before which the process is killed, it is."""
        with self._lock:
            self.count += 1
            if self.count == self._killed_at:
                os.killpg(0, signal.SIGKILL)


def _child(folder: Path, overrides: Sequence[str], modules: Path | None, killed_at: int | None) -> NoReturn:
    status = 1
    try:
        os.setsid()
        operations = FileOperations(folder, killed_at)
        log = os.open(folder.parent / f"{folder.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, target)
        # Whoever runs the tests may have put others in their place.
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
        os.environ["OMP_NUM_THREADS"] = "1"
        sys.argv = ["skyrl_train.main", *overrides, f"hydra.run.dir={folder}"]
        from skyrl_train.main import main

        try:
            main()
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if modules is not None:
            modules.write_text(json.dumps({"modules": sorted(sys.modules), "operations": operations.count}))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
