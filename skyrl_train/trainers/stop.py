"""What signals do to a run in its training steps.

    first signal                the running step is finished, its checkpoint written, and the run ends;
                                in the last step the run is finished, its export included
    second signal, or the       where the step is only generating, it is given up and the checkpoint of the step before
    end of the grace time       written; where weights may be moving, the process ends: the last checkpoint is resumed
    third signal                the process ends

A handler of Python runs between two instructions of the main thread. Where that thread is inside a call that does not
return (a kernel, a disk), a thread of its own sees the signal and ends the process.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from skyrl_train.errors import StopRequested
from skyrl_train.system.processes import STOP_SIGNALS, answer, say

ANSWER_TIMEOUT_S = 5.0
"""For the main thread to answer a second signal."""
_LOOK_EVERY_S = 60.0


class GivenUp(BaseException):
    """Raised in the main thread where the running step is given up. No `except Exception` is to take it for a failure."""


class StopFlag:
    """Says whether a signal came, and which."""

    def __init__(self, *, exit_now: Callable[[int], None] = os._exit) -> None:
        """`exit_now` receives the exit status where nothing is waited for any more; by default it ends the process without
        clean-up, since whatever the first signal waits for may be what hangs."""
        self.signal_name: str | None = None
        self.num_answered = 0
        """Signals that reached the main thread."""
        self._can_give_up = False
        self._exit_now = exit_now

    @property
    def is_set(self) -> bool:
        return self.signal_name is not None

    @contextmanager
    def can_give_up(self) -> Iterator[None]:
        """Wraps what a second signal breaks off by GivenUp: the models are as the last finished step left them."""
        self._can_give_up = True
        try:
            yield
        finally:
            self._can_give_up = False

    def raise_if_set(self, global_step: int) -> None:
        """Raises StopRequested where a signal came. Call it once the checkpoint of `global_step` is written."""
        if self.signal_name is not None:
            raise StopRequested(self.signal_name, global_step)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Take the signal `signum` into account, as the table above says."""
        del frame
        name = signal.Signals(signum).name
        self.num_answered += 1
        if self.signal_name is None:
            self.signal_name = name
            say(f"\n{name}: finishing the running step, then writing a checkpoint. Once more stops at once.")
        elif self._can_give_up and self.num_answered == 2:
            say(f"\n{name} again: giving up the running step, writing the checkpoint of the one before.")
            raise GivenUp
        else:
            say(f"\n{name} again: stopping at once. The last complete checkpoint is the one to resume from.")
            self._exit_now(128 + signum)


@contextmanager
def stop_on_signals(*, grace_s: float = 0.0, exit_now: Callable[[int], None] = os._exit) -> Iterator[StopFlag]:
    """Installs the handler and puts back the ones before it. In another thread than the main one, where Python allows
    no handlers, the flag is never set.

    `grace_s`: seconds after the first signal when a second one is sent; 0 sends none.
    """
    flag = StopFlag(exit_now=exit_now)
    before = answer(flag.handle)
    if not before:
        yield flag
        return
    watcher = _Watcher(flag, grace_s)
    try:
        yield flag
    finally:
        watcher.close()
        for signum, handler in before.items():
            signal.signal(signum, handler)


class _Watcher:
    """A thread that counts signals where the main thread may not: Python's C code writes each into a pipe at once."""

    def __init__(self, flag: StopFlag, grace_s: float) -> None:
        self._flag, self._grace_s = flag, grace_s
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._pid = os.getpid()
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def close(self) -> None:
        """End the thread, which closes its end of the pipe."""
        signal.set_wakeup_fd(self._before)
        os.close(self._write)

    def _watch(self) -> None:
        received: list[int] = []
        signals_came = select.poll()  # select() itself refuses numbers of files from 1,024 on, which a large run has
        signals_came.register(self._read, select.POLLIN)
        grace_ends = answer_ends = float("inf")
        while True:
            wait_s = max(0.0, min(grace_ends, answer_ends) - time.monotonic())
            if signals_came.poll(1000 * min(wait_s, _LOOK_EVERY_S)):
                signals = os.read(self._read, 64)
                if not signals:
                    os.close(self._read)
                    return
                received += [signum for signum in signals if signum in STOP_SIGNALS]
                if len(received) == 1 and self._grace_s:
                    grace_ends = time.monotonic() + self._grace_s
                if len(received) > 1:
                    grace_ends = float("inf")
                    answer_ends = time.monotonic() + ANSWER_TIMEOUT_S
            now = time.monotonic()
            if now >= grace_ends:
                grace_ends = float("inf")
                say(f"\nthe running step did not end within trainer.stop_grace_s={self._grace_s:g}")
                os.kill(self._pid, received[0])
            if now >= answer_ends:
                answer_ends = float("inf")
                if self._flag.num_answered < len(received):
                    say(
                        "\nthe main thread does not answer: stopping at once. Resume from the last complete checkpoint."
                    )
                    os._exit(128 + received[-1])


os.register_at_fork(
    after_in_child=lambda: threading.current_thread() is threading.main_thread() and signal.set_wakeup_fd(-1)
)
