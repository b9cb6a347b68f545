"""Signals that ask a process to end: which they are, and what answers them while it starts.

    starting    `end_at_once_on_signals`   the process ends: nothing was begun
    running     runs/cli/exits.py               what was opened is closed
    training    trainers/stop.py           the running step is finished and a checkpoint written

Needs nothing but the standard library, since it comes before every other import of an entry point.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

TYPE_CHECKING = False  # as type checkers know it: `typing` takes a while to import, and a signal may come meanwhile
if TYPE_CHECKING:
    from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, a terminal that closes, and the warnings of Slurm, Kubernetes and others before they kill."""
_SHOW_CURSOR = "\x1b[?25h"

terminal_descriptors: list[int] = [2]
"""The terminal itself, also where descriptor 2 is copied to a log."""
log_descriptors: list[int] = []
"""Open files that keep what `say` says: that of `run.log`."""

Handler = Callable[[int, "FrameType | None"], object]


def say(line: str) -> None:
    """Write to the terminal's file descriptor, and to the log's: a handler may interrupt a print that holds the stream's
    lock."""
    for descriptor in (*terminal_descriptors, *log_descriptors):
        with suppress(OSError):  # the terminal may be what went away
            cursor = _SHOW_CURSOR if os.isatty(descriptor) else ""
            os.write(descriptor, f"{cursor}{line}\n".encode())


def answer(handler: Handler) -> dict[signal.Signals, Any]:
    """Have `handler` answer the signals, and return what did before, for `signal.signal`.

    Those that the process was started to ignore (`nohup`) stay ignored; on a thread other than the main one, where Python
    allows no handlers, all stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {
        signum: signal.signal(signum, handler)
        for signum in STOP_SIGNALS
        if signum is signal.SIGINT or signal.getsignal(signum) is not signal.SIG_IGN
    }


def end_at_once_on_signals() -> None:
    """Answer signals by a line and the exit status that shells expect, before anything is imported that takes time."""

    def end(signum: int, frame: FrameType | None) -> None:
        del frame
        sys.stderr.flush()
        say(f"{signal.Signals(signum).name}: ended at once")
        os._exit(128 + signum)

    answer(end)
