"""How a run ends outside of its training steps: by a status and a line, never by a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from skyrl_train.errors import DeadlineError, EngineError, SkyrlTrainError
from skyrl_train.runs.cli import exits
from skyrl_train.runs.cli.command_line import config_loader
from skyrl_train.runs.cli.composition import as_in_a_run
from skyrl_train.runs.cli.exits import exit_on_errors, resume_command
from skyrl_train.runs.cli.resolvers import register_resolvers
from skyrl_train.runs.task import Parts
from skyrl_train.telemetry.logs import RunConsole, stacks

NODE = OmegaConf.create({"output_dir": "outputs"})


@pytest.fixture(autouse=True)
def these_tests_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end no process, so that none is to be ended late."""
    monkeypatch.setattr(exits, "CLOSE_TIMEOUT_S", 1e9)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def terminate_in_a_call_that_changes_the_status() -> None:
    try:
        terminate()
    except SystemExit:
        raise SystemExit(1) from None


def hang_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


def break_down() -> None:
    1 / 0  # noqa: B018


def refuse() -> None:
    raise EngineError("the server is not up")


@pytest.mark.parametrize(
    ("ends", "status", "says"),
    [
        (interrupt, 130, "SIGINT"),
        (terminate, 143, "SIGTERM"),
        (terminate_in_a_call_that_changes_the_status, 143, "SIGTERM"),
        (hang_up, 129, "SIGHUP"),
        (refuse, 2, "EngineError: the server is not up"),
        (break_down, 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_the_way_a_run_ends_is_a_status_and_what_it_opened_is_closed(
    ends: Callable[[], None], status: int, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    closed: list[bool] = []
    opened = ExitStack()
    opened.callback(closed.append, True)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup, which a run respects
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        opened.callback(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    with pytest.raises(SystemExit) as ended, exit_on_errors(NODE), opened:
        ends()
    assert (ended.value.code, closed) == (status, [True])
    assert says in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_somebody_else_installed_stays() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with exit_on_errors(NODE):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_error_is_told_before_anything_is_closed_and_its_traceback_is_logged(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    with caplog.at_level("INFO"), pytest.raises(SystemExit) as ended:
        refused_with_parts(lambda: said.append(capfd.readouterr().err))
    assert ended.value.code == 2
    assert said == ["EngineError: the server is not up\n"]
    assert "failed: ValueError: parts of a part" in capfd.readouterr().out
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [EngineError]


def refused_with_parts(close: Callable[[], None]) -> None:
    def break_in_closing() -> None:
        raise ValueError("parts of a part")

    with exit_on_errors(NODE) as ending, Parts(RunConsole(), ending.begins) as parts:
        parts.callback(break_in_closing)
        parts.callback(close)
        refuse()


HANGS = """
import threading
from omegaconf import OmegaConf
from skyrl_train.runs.cli import exits
from skyrl_train.errors import EngineError
exits.CLOSE_TIMEOUT_S = 0.3
from skyrl_train.runs.task import Parts
from skyrl_train.telemetry.logs.console import RunConsole
with exits.exit_on_errors(OmegaConf.create({"output_dir": "x"})) as ending, Parts(RunConsole(), ending.begins) as parts:
    parts.callback(threading.Event().wait)
    raise EngineError("the server is not up")
"""


@pytest.mark.slow
def test_closing_that_hangs_ends_with_the_process_and_the_status_of_the_error() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "EngineError: the server is not up"
    assert "closing did not end within 0.3 s" in done.stderr
    assert "wait" in done.stderr


def test_a_deadline_leaves_the_stacks_of_all_processes_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    waits, goes_on = threading.Event(), threading.Event()

    def wait_for_what_never_comes() -> None:
        waits.set()
        goes_on.wait(60)

    thread = threading.Thread(target=wait_for_what_never_comes, daemon=True)
    thread.start()
    code = "from skyrl_train.telemetry.logs import stacks; stacks.answer('worker'); print(flush=True); input()"
    stacks.begin("trainer")
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline()
    assert waits.wait(10)
    try:
        assert exits.Ending(NODE)._tell(DeadlineError("a disk", 5.0)) == 2
        assert "in wait_for_what_never_comes" in caplog.text
        assert f"worker, pid {child.pid}:" in caplog.text
        caplog.clear()
        exits.Ending(NODE)._tell(SkyrlTrainError("no such file"))
        assert "pid" not in caplog.text
    finally:
        child.communicate(timeout=10)
        goes_on.set()
        thread.join(10)


def test_the_command_that_goes_on_finds_the_groups_of_the_users_own(tmp_path: Path) -> None:
    register_resolvers()
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 7\n")
    overrides = [f"hydra.searchpath=[{tmp_path}]", "hydra.job.name=main", "+experiment=mine", "output_dir=old"]
    with config_loader(str(tmp_path)) as loader:
        config = loader.load_configuration("config", overrides, RunMode.RUN, from_shell=False)
    with as_in_a_run(config, 0, multirun=False):
        told = resume_command("new")
    own = f"--config-dir={tmp_path} 'hydra.searchpath=[{tmp_path}]'"
    assert told == f"python -m skyrl_train.main {own} hydra.run.dir=new +experiment=mine"
