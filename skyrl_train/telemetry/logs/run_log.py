"""`run.log`: everything that the console shows, every error with its traceback, and Python's logging.

The streams of this process are replaced by ones that write without secrets, hand each line to the log, and outlive their
terminal: where it is gone (a closed connection, `| head`), a run goes on and its log tells the rest.

    Python's prints    ConsoleStream --> terminal, and line by line, without secrets --> run.log
    C, C++, children   descriptors 1 and 2 --> `tee`, a process of its own that outlives a crash --> terminal and run.log
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from skyrl_train.system.processes import (
    STOP_SIGNALS,
    DirectProcess,
    log_descriptors,
    start_directly,
    terminal_descriptors,
)
from skyrl_train.telemetry.logs.redaction import redact_text

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Colours and movements of a terminal."""
_DRAIN_TIMEOUT_S = 2.0
"""For what was written to a descriptor to reach terminal and log."""


class RunLogHandler(logging.FileHandler):
    """Writes to `run.log`. A disk that refuses costs the lines, is named once, and ends nothing."""

    _is_refused = False

    def flush(self) -> None:
        """Write what is buffered, also where Hydra asks for it at the end of a run."""
        try:
            super().flush()
        except OSError as error:
            self._say_refused(error)

    def handleError(self, record: logging.LogRecord) -> None:
        """Say what keeps a record from the log."""
        del record
        self._say_refused(sys.exc_info()[1])

    def _say_refused(self, error: BaseException | None) -> None:
        if not self._is_refused:
            self._is_refused = True
            sys.stderr.write(f"warning: {self.baseFilename} cannot be written ({error}); the run goes on without it\n")


class ConsoleStream:
    """A standard stream. Everything but `write` and `flush` is the terminal's own."""

    def __init__(self, terminal: TextIO, name: str) -> None:
        """`name`: that of its lines in the log."""
        self.terminal = terminal
        self._name = name
        self._unshown = ""
        self._line = ""
        self._lock = threading.RLock()
        self._is_logging = False
        self._tee: tuple[int, TextIO, DirectProcess] | None = None
        """Descriptor, what wrote to it, and the process that copies it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)

    def write(self, text: str) -> int:
        """Show whole lines; the rest follows with its end, or with `flush`."""
        with self._lock:
            whole, newline, rest = text.rpartition("\n")
            if newline:
                whole, self._unshown = self._unshown + whole + newline, rest
                self._show(whole)
            else:
                self._unshown += rest
        return len(text)

    def flush(self) -> None:
        """Show what there is of a line."""
        with self._lock:
            rest, self._unshown = self._unshown, ""
            self._show(rest)
            with self._outliving_the_terminal():
                self.terminal.flush()

    def copy_descriptor(self, log: str) -> None:
        """Have what others write to this stream's descriptor shown and appended to the file `log`. Where there is no
        descriptor, or no `tee`, it is shown alone."""
        self.restore_descriptor()
        with suppress(OSError, ValueError):
            descriptor = self.terminal.fileno()
            kept = os.dup(descriptor)
            try:
                copier, writer = _start_tee(log, kept)
            except OSError:
                os.close(kept)
                raise
            self.flush()
            os.dup2(writer, descriptor)
            os.close(writer)
            self._tee = descriptor, self.terminal, copier
            encoding, errors = self.terminal.encoding, self.terminal.errors
            self.terminal = os.fdopen(kept, "w", buffering=1, encoding=encoding, errors=errors)
            if descriptor in terminal_descriptors:
                terminal_descriptors[terminal_descriptors.index(descriptor)] = kept

    def restore_descriptor(self) -> None:
        """Undo `copy_descriptor`, once what was written has arrived."""
        if self._tee is None:
            return
        (descriptor, terminal, copier), self._tee = self._tee, None
        self.flush()
        kept = self.terminal.fileno()
        os.dup2(kept, descriptor)
        if kept in terminal_descriptors:
            terminal_descriptors[terminal_descriptors.index(kept)] = descriptor
        own, self.terminal = self.terminal, terminal
        with suppress(subprocess.TimeoutExpired):  # a child that goes on holds the descriptor
            copier.wait(timeout=_DRAIN_TIMEOUT_S)
        with suppress(OSError):
            own.close()

    def _show(self, text: str) -> None:
        shown = redact_text(text)
        with self._outliving_the_terminal():
            self.terminal.write(shown)
        if self._is_logging:  # the log itself failed and says so
            return
        *lines, self._line = (self._line + shown).split("\n")
        self._is_logging = True
        try:
            for line in lines:
                # A bar is drawn over by a carriage return: what stands behind the last one stayed on the terminal.
                self._log(_CONTROL.sub("", line).rpartition("\r")[2].rstrip())
        finally:
            self._is_logging = False

    def _log(self, line: str) -> None:
        record = logging.LogRecord(self._name, logging.INFO, "", 0, line, None, None)
        for handler in logging.getLogger().handlers if line else ():
            if isinstance(handler, logging.FileHandler):
                handler.handle(record)

    @contextmanager
    def _outliving_the_terminal(self) -> Iterator[None]:
        try:
            yield
        except UnicodeEncodeError as error:
            self.terminal.write(str(error.object).encode("ascii", "backslashreplace").decode())
        except (OSError, ValueError):  # ValueError: it is closed
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.terminal.fileno())
                os.close(nowhere)


@contextmanager
def console_streams() -> Iterator[None]:
    """Replace `sys.stdout` and `sys.stderr` for as long as the block runs."""
    before = sys.stdout, sys.stderr
    streams = ConsoleStream(before[0], "stdout"), ConsoleStream(before[1], "stderr")
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in streams:
            stream.flush()
            stream.restore_descriptor()
        sys.stdout, sys.stderr = before


def _start_tee(log: str, terminal: int) -> tuple[DirectProcess, int]:
    """Return a process that copies to `terminal` and to the end of the file `log` what is written to the descriptor that
    comes with it. It ends when nobody can write there any more, and by no signal that ends the run."""
    reader, writer = os.pipe()
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGPIPE})  # which it inherits
        try:
            copier = start_directly(["tee", "-a", log], stdin=reader, stdout=terminal, stderr=subprocess.DEVNULL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except OSError:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    return copier, writer


def log_once() -> None:
    """Keep lines of Python's logging that reach the terminal out of the log's copy of the terminal, which has them
    already, and begin that copy. Call it where logging is configured."""
    log_descriptors.clear()
    logs = [handler.baseFilename for handler in logging.getLogger().handlers if isinstance(handler, RunLogHandler)]
    for stream in (sys.stdout, sys.stderr):
        if logs and isinstance(stream, ConsoleStream):
            stream.copy_descriptor(logs[0])
    if logs:
        faulthandler.enable(file=2)  # the stack of a crash
    for handler in logging.getLogger().handlers:
        if isinstance(handler, RunLogHandler) and handler.stream is not None:
            log_descriptors.append(handler.stream.fileno())
        if isinstance(handler, logging.StreamHandler) and isinstance(handler.stream, ConsoleStream):
            handler.setStream(handler.stream.terminal)
