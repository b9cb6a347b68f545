"""SIGTERM and Ctrl-C: the first asks for a stop at the next safe point, the second one ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from skyrl_train.errors import StopRequested

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SHOW_CURSOR = "\x1b[?25h"


class StopFlag:
    """Whether a signal came, and which."""

    def __init__(self, exit_now: Callable[[int], None] = os._exit) -> None:
        """`exit_now` receives the exit status at the second signal; by default it ends the process without clean-up,
        since whatever the first signal waits for may be what hangs."""
        self.signal_name: str | None = None
        self._exit_now = exit_now

    @property
    def is_set(self) -> bool:
        return self.signal_name is not None

    def raise_if_set(self, global_step: int) -> None:
        """Raises StopRequested where a signal came. Call it once the checkpoint of `global_step` is written."""
        if self.signal_name is not None:
            raise StopRequested(self.signal_name, global_step)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler."""
        del frame
        name = signal.Signals(signum).name
        if self.signal_name is None:
            self.signal_name = name
            _say(f"{name}: finishing the running step, then writing a checkpoint. Once more stops at once.")
            return
        _say(f"{name} again: stopping at once. The last complete checkpoint is the one to resume from.")
        self._exit_now(128 + signum)


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Installs the handler and puts back the ones before it. In another thread than the main one, where Python allows
    no handlers, the flag is never set."""
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = {signum: signal.signal(signum, flag.handle) for signum in SIGNALS}
    try:
        yield flag
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _say(line: str) -> None:
    """Straight to the file descriptor: a handler may interrupt a print that holds the stream's lock."""
    cursor = _SHOW_CURSOR if sys.stderr.isatty() else ""
    os.write(2, f"\n{cursor}{line}\n".encode())
