"""How a run ends outside of its training steps: by a status and a line, never by a traceback."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from omegaconf import OmegaConf

from skyrl_train.cli.exits import exit_on_known_errors
from skyrl_train.errors import EngineError

NODE = OmegaConf.create({"output_dir": "outputs"})


def interrupt() -> None:
    raise KeyboardInterrupt


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def terminate_in_a_call_that_changes_the_status() -> None:
    try:
        terminate()
    except SystemExit:
        raise SystemExit(1) from None


def refuse() -> None:
    raise EngineError("the server is not up")


@pytest.mark.parametrize(
    ("ends", "status", "says"),
    [
        (interrupt, 130, "SIGINT"),
        (terminate, 143, "SIGTERM"),
        (terminate_in_a_call_that_changes_the_status, 143, "SIGTERM"),
        (refuse, 2, "EngineError: the server is not up"),
    ],
)
def test_the_way_a_run_ends_is_a_status_and_what_it_opened_is_closed(
    ends: Callable[[], None], status: int, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    closed: list[bool] = []
    opened = ExitStack()
    opened.callback(closed.append, True)
    with pytest.raises(SystemExit) as ended, exit_on_known_errors(NODE), opened:
        ends()
    assert (ended.value.code, closed) == (status, [True])
    assert says in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_somebody_else_installed_stays() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with exit_on_known_errors(NODE):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
