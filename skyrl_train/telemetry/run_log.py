"""`run.log`: everything that the console shows, every error with its traceback, and Python's logging.

The streams of this process are replaced by ones that write without secrets, hand each line to the log, and outlive their
terminal: where it is gone (a closed connection, `| head`), a run goes on and its log tells the rest.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from skyrl_train.signals import log_descriptors
from skyrl_train.telemetry.redaction import redact_text

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Colours and movements of a terminal."""


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
        sys.stdout, sys.stderr = before


def log_once() -> None:
    """Keep lines of Python's logging that reach the terminal out of the log's copy of the terminal, which has them
    already. Call it where logging is configured."""
    log_descriptors.clear()
    for handler in logging.getLogger().handlers:
        if isinstance(handler, RunLogHandler) and handler.stream is not None:
            log_descriptors.append(handler.stream.fileno())
        if isinstance(handler, logging.StreamHandler) and isinstance(handler.stream, ConsoleStream):
            handler.setStream(handler.stream.terminal)
