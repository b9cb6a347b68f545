"""How a run ends for the person at the terminal: errors without tracebacks, and the command that resumes.

An error is told before anything is closed, since closing may take long or hang, and may fail itself. Its traceback is in
`run.log`. Closing has a limit, behind which the process ends whatever still waits.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from skyrl_train.errors import DeadlineError, SkyrlTrainError, StopRequested
from skyrl_train.system.processes import answer, say
from skyrl_train.telemetry.logs import redact_text, stacks

logger = logging.getLogger(__name__)

STATUS_DEFECT = 1
STATUS_USER_ERROR = 2
CLOSE_TIMEOUT_S = 180.0
"""For closing all parts of a run together, each of which has a limit of its own, and for the end of the process."""


class Ending:
    """Tells once how a run ends, and sees to it that it does."""

    def __init__(self, node: DictConfig) -> None:
        self._node = node
        self.status: int | None = None
        """The exit status, from the moment that `begins` was called."""

    def begins(self, error: BaseException | None) -> None:
        """Tell the error, if there is one, and begin to count the time of closing.

        Call it before parts are closed. Called again, for an error of closing, it changes nothing.
        """
        if self.status is not None:
            return
        self.status = 0 if error is None else self._tell(error)
        threading.Thread(target=self._end_late, args=(self.status,), name="ending", daemon=True).start()

    def _tell(self, error: BaseException) -> int:
        """Say what happened; the exit status."""
        if isinstance(error, SystemExit):
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error, KeyboardInterrupt):  # in the steps `trainers/stop.py` answers it
            return 128 + signal.SIGINT
        if isinstance(error, StopRequested):
            sys.stderr.write(f"{error}. To go on:\n  {resume_command(str(self._node.output_dir))}\n")
            return 128 + signal.Signals[error.signal_name]
        if isinstance(error, SkyrlTrainError):
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            logger.info("the run ended", exc_info=error)  # to run.log alone
            if isinstance(error, DeadlineError):
                logger.info("What every process is doing:\n%s", stacks.of_run())
            return STATUS_USER_ERROR
        sys.stderr.write("".join(traceback.format_exception(type(error), error, error.__traceback__)))
        return STATUS_DEFECT

    def _end_late(self, status: int) -> None:
        time.sleep(CLOSE_TIMEOUT_S)
        say(f"closing did not end within {CLOSE_TIMEOUT_S:g} s, so the process ends now. Its threads were here:")
        with suppress(OSError):
            faulthandler.dump_traceback(2, all_threads=True)
        os._exit(status)


@contextmanager
def exit_on_errors(node: DictConfig) -> Iterator[Ending]:
    """Turns errors and signals into a message and an exit status: the project's own errors without their traceback, which
    goes to `run.log`; anything else is a defect and shows it."""
    ending = Ending(node)
    stacks.begin("trainer")
    try:
        with _unwinding_on_signals():
            yield ending
    except BaseException as error:
        ending.begins(error)
        raise SystemExit(ending.status) from None


@contextmanager
def _unwinding_on_signals() -> Iterator[None]:
    """A signal ends the process by an exception, so that actors, servers and folders go with it; a second one at once."""
    received: list[int] = []

    def end(signum: int, frame: FrameType | None) -> None:
        del frame
        signal.alarm(0)  # by which Ray, while it starts, aborts a process that takes longer than three seconds to end
        name = signal.Signals(signum).name
        received.append(signum)
        if len(received) > 1:
            say(f"{name} again: ended at once")
            os._exit(128 + received[0])
        say(f"{name} outside of the training steps: stopped at once")
        raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)

    before = answer(end)
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        if received:  # a call of Ray's that was waiting makes a status of its own of it
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def resume_command(output_dir: str) -> str:
    """The command line of this run with its folder pinned, so that `trainer.resume_mode=latest` finds it, and with the
    folder of the user's own groups. Secrets are to be typed again."""
    job = HydraConfig.get()
    start = ("output_dir=", "trainer.resume_mode=", "trainer.resume_path=")
    kept = [redact_text(text) for text in job.overrides.task if not text.startswith(start)]
    module = job.job.name if "." in job.job.name else f"skyrl_train.{job.job.name}"
    own = [f"--config-dir={each.path}" for each in job.runtime.config_sources if each.provider == "command-line"]
    own += [text for text in job.overrides.hydra if text.lstrip("+").startswith("hydra.searchpath=")]
    words = [*own, f"hydra.run.dir={output_dir}", *kept]
    return f"python -m {module} {' '.join(shlex.quote(word) for word in words)}"
