"""Counts the file operations of a run, and kills it before one of them.

    python -m tests.reliability.file_operations KILLED_AT COUNT OVERRIDES hydra.run.dir=FOLDER

is `python -m skyrl_train.main OVERRIDES hydra.run.dir=FOLDER`, killed with its process group before its file operation of
number KILLED_AT, from 1; 0 kills it never. At its end the number of its operations is in the file COUNT.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any


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


def main() -> None:
    """Runs the command of the module's docstring."""
    killed_at, count, *overrides = sys.argv[1:]
    operations = FileOperations(Path(overrides[-1].removeprefix("hydra.run.dir=")), int(killed_at) or None)
    sys.argv = ["skyrl_train.main", *overrides]
    from skyrl_train.main import main as run

    try:
        run()
    finally:
        Path(count).write_text(str(operations.count))


if __name__ == "__main__":
    main()
