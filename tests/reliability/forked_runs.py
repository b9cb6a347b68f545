"""The real command in children of a process that has imported what it needs: each starts in a second instead of ten."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


class ForkedRun:
    """`python -m skyrl_train.main OVERRIDES` in a child of its own process group. As a `subprocess.Popen`, as far as tests
    of killed runs use one."""

    def __init__(self, folder: Path, overrides: Sequence[str], *, modules: Path | None = None) -> None:
        """Starts it into `folder`; what it prints goes into a file beside that. At its end the names of the modules that it
        had imported are in the file `modules`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _child(folder, overrides, modules)

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


def import_all(modules: Path) -> None:
    """Import what a run before had imported, for children to share."""
    for name in json.loads(modules.read_text()):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _child(folder: Path, overrides: Sequence[str], modules: Path | None) -> NoReturn:
    status = 1
    try:
        os.setsid()
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
            modules.write_text(json.dumps(sorted(sys.modules)))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
