"""How a run ends for the person at the terminal: errors without tracebacks, and the command that resumes."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from skyrl_train.errors import SkyrlTrainError, StopRequested

logger = logging.getLogger(__name__)

STATUS_USER_ERROR = 2


@contextmanager
def exit_on_known_errors(node: DictConfig) -> Iterator[None]:
    """Turns the project's own errors, Ctrl-C and SIGTERM into a message and an exit status. Anything else is a defect and
    keeps its traceback, which Hydra prints."""
    try:
        with _unwinding_on_sigterm():
            yield
    except KeyboardInterrupt:
        # In the steps `trainers/loop.py` answers it; here is what comes before them and after.
        sys.stderr.write("SIGINT outside of the training steps: stopped at once\n")
        raise SystemExit(128 + signal.SIGINT) from None
    except StopRequested as stop:
        sys.stderr.write(f"{stop}. To go on:\n  {resume_command(str(node.output_dir))}\n")
        raise SystemExit(128 + signal.Signals[stop.signal_name]) from None
    except SkyrlTrainError as error:
        logger.debug("the run ended", exc_info=error)
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(STATUS_USER_ERROR) from None


@contextmanager
def _unwinding_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the process by an exception, so that actors, servers and folders go with it, as they do on Ctrl-C."""
    received: list[int] = []

    def end(signum: int, frame: FrameType | None) -> None:
        del frame
        received.append(signum)
        signal.alarm(0)  # by which Ray, while it starts, aborts a process that takes longer than three seconds to end
        os.write(2, b"SIGTERM outside of the training steps: stopped at once\n")
        raise SystemExit(128 + signum)

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SystemExit:
        if received:  # a call of Ray's that was waiting makes a status of its own of it
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def resume_command(output_dir: str) -> str:
    """The command line of this run with its folder pinned, so that `trainer.resume_mode=latest` finds it."""
    job = HydraConfig.get()
    start = ("output_dir=", "trainer.resume_mode=", "trainer.resume_path=")
    kept = [text for text in job.overrides.task if not text.startswith(start)]
    module = job.job.name if "." in job.job.name else f"skyrl_train.{job.job.name}"
    words = [f"hydra.run.dir={output_dir}", *kept]
    return f"python -m {module} {' '.join(shlex.quote(word) for word in words)}"
