import io
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from skyrl_train.config import Config, ConsoleConfig, TensorboardConfig, TrackerConfig, WandbConfig
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.runs import build_trackers
from skyrl_train.telemetry.logs.console import RunConsole
from skyrl_train.telemetry.metrics_log import MetricsLog, read_metrics
from skyrl_train.telemetry.run_folder import RunFolder
from skyrl_train.telemetry.trackers.base import Trackers
from skyrl_train.telemetry.trackers.services import choose_mode
from tests.support.tracker_cases import rollouts


class MemoryTracker:
    def __init__(self, fail_at=(), fail_on_close=False) -> None:
        self.steps: list[int] = []
        self.closed = False
        self.fail_at, self.fail_on_close = fail_at, fail_on_close

    def log(self, metrics, *, step):
        if step in self.fail_at:
            raise ConnectionError("the server went away")
        self.steps.append(step)

    def close(self):
        self.closed = True
        if self.fail_on_close:
            raise TimeoutError("no answer")


def make(tmp_path, **views):
    output = io.StringIO()
    path = tmp_path / "metrics.jsonl"
    return Trackers(record=MetricsLog(path), views=views, console=RunConsole(file=output)), path, output


def test_a_view_that_fails_is_warned_about_once_tried_again_and_accounted_for(tmp_path):
    broken, other = MemoryTracker(fail_at=(2, 3)), MemoryTracker()
    trackers, path, output = make(tmp_path, wandb=broken, tensorboard=other)
    for step in (1, 2, 3, 4):
        trackers.log({"a": 1.0}, step=step)
    trackers.close()
    assert (broken.steps, other.steps) == ([1, 4], [1, 2, 3, 4])
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4]
    assert output.getvalue().splitlines() == [
        "warning: tracker wandb failed at step 2 (ConnectionError: the server went away); training goes on, "
        "metrics.jsonl is complete",
        "warning: tracker wandb lost 2 steps between 2 and 3; metrics.jsonl has them all",
    ]


def test_a_view_that_does_not_close_does_not_keep_others_from_closing(tmp_path):
    broken, other = MemoryTracker(fail_on_close=True), MemoryTracker()
    trackers, _, output = make(tmp_path, wandb=broken, tensorboard=other)
    trackers.close()
    assert other.closed
    assert output.getvalue() == "warning: tracker wandb did not close: TimeoutError: no answer\n"


def test_a_record_that_cannot_be_written_stops_the_run(tmp_path):
    trackers, path, _ = make(tmp_path, other=MemoryTracker())
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        trackers.log({"a": 1.0}, step=1)


def configured(tmp_path, *, console=False, wandb=False, tensorboard=False, **wandb_changes) -> Config:
    tracker = TrackerConfig(
        console=ConsoleConfig(enabled=console),
        wandb=WandbConfig(enabled=wandb, **wandb_changes),
        tensorboard=TensorboardConfig(enabled=tensorboard),
    )
    environment = replace(
        Config().environment, env_class={"_target_": "text2sql", "api_key": "s3cr3t-value", "db_path": "x.db"}
    )
    return replace(Config(), output_dir=str(tmp_path), tracker=tracker, environment=environment)


def logged(config, tmp_path, *, steps=(1, 2), start_step=0) -> str:
    output = io.StringIO()
    console = RunConsole(step_lines=config.tracker.console.enabled, file=output)
    trackers = build_trackers(config, RunFolder(tmp_path), console=console, start_step=start_step, total_steps=2)
    for step in steps:
        trackers.log({"reward/mean": step / 2, "timing/step": 1.0, "odd": math.nan}, step=step)
    trackers.close()
    return output.getvalue()


def test_by_default_only_the_record_is_written(tmp_path):
    assert logged(configured(tmp_path), tmp_path) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_console_tracker_shows_steps_but_not_the_first_evaluation(tmp_path):
    shown = logged(configured(tmp_path, console=True), tmp_path, steps=(0, 1))
    assert shown == "step 1/2  reward 0.500  1.0 s  0:01 left\n"


@pytest.mark.parametrize(
    ("mode", "environ", "expected"),
    [
        ("online", {}, "online"),
        ("offline", {"WANDB_API_KEY": "k"}, "offline"),
        ("auto", {"NETRC": "/nowhere"}, "offline"),
        ("auto", {"NETRC": "/nowhere", "WANDB_API_KEY": "k"}, "online"),
        ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}, "disabled"),
        ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "dryrun"}, "offline"),
    ],
)
def test_wandb_is_online_only_where_a_key_is_configured(mode, environ, expected):
    assert choose_mode(mode, environ) == expected


def test_wandb_finds_the_key_that_its_login_stored(tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.wandb.ai login user password abc\n")
    assert choose_mode("auto", {"NETRC": str(netrc)}) == "online"
    assert choose_mode("auto", {"NETRC": str(netrc), "WANDB_BASE_URL": "https://other.example"}) == "offline"


def test_tensorboard_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SkyrlTrainError, match=r"pip install 'tensorboard[<>]"):
        logged(configured(tmp_path, tensorboard=True), tmp_path, steps=(1,))


@pytest.mark.slow
def test_all_trackers_together_and_resumed(tmp_path, monkeypatch):
    """Real wandb, offline, and real TensorBoard; no secret reaches the disk."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setattr("sys.argv", ["main", "environment.env_class.api_key=s3cr3t-value"])
    config = configured(tmp_path, console=True, wandb=True, tensorboard=True)
    shown = logged(config, tmp_path, steps=(1, 2, 3))
    assert "wandb: offline; upload later with `wandb sync" in shown
    run_id = (tmp_path / "wandb" / "run_id").read_text()
    logged(config, tmp_path, steps=(3, 4), start_step=2)
    assert (tmp_path / "wandb" / "run_id").read_text() == run_id
    runs = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(runs) == 2
    # wandb numbers the folders of runs that begin in the same second.
    assert all(f"-{run_id.strip()}" in name for name in runs)
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"s3cr3t-value" not in path.read_bytes(), path

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3, 4]
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 3, 4]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["odd"] is None


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def server(kind: str) -> Iterator[str]:
    """The address of a dead server: none that listens, one that takes connections and says nothing, one that sends a byte
    a second, one that refuses everybody by HTTP."""
    if kind == "unreachable":
        yield f"http://127.0.0.1:{closed_port()}"
        return
    stopped = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection:
            if kind == "refusing":
                connection.settimeout(5)
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
            while kind != "refusing" and not stopped.wait(1):
                if kind == "dripping":
                    connection.sendall(b"H")

    def accept() -> None:
        while not stopped.is_set():
            with suppress(OSError):
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stopped.set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["hanging", "refusing", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("unreachable", "dripping"))],
)
def test_wandb_with_a_key_and_a_dead_server_is_offline_within_15_s(kind, tmp_path, monkeypatch):
    """Real wandb, in a process of its own as a run's is."""
    with server(kind) as address:
        environ = {"WANDB_API_KEY": "0123456789abcdef" * 3, "WANDB_BASE_URL": address, "NETRC": str(tmp_path / "none")}
        program = (
            "import json, sys, time\n"
            "from pathlib import Path\n"
            "from skyrl_train.config.schema import WandbConfig\n"
            "from skyrl_train.telemetry.logs.console import RunConsole\n"
            "from skyrl_train.telemetry.run_folder import RunFolder\n"
            "from skyrl_train.telemetry.trackers.services import WandbTracker\n"
            "import wandb\n"
            "class Console(RunConsole):\n"
            "    def warn(self, line):\n"
            "        print('after', time.monotonic() - start, line, flush=True)\n"
            "start = time.monotonic()\n"
            "tracker = WandbTracker(WandbConfig(enabled=True), RunFolder(Path(sys.argv[1])), run_name='x', config={},\n"
            "                       console=Console())\n"
            "for step in (1, 2): tracker.log({'a': 1.0}, step=step)\n"
            "tracker.close()\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("after")]
    assert "wandb is offline: the server could not be used" in line
    assert float(line.split()[1]) < 15
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert next(run.glob("*.wandb")).stat().st_size > 0


@pytest.mark.slow
def test_wandb_online_without_a_key_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    with pytest.raises(
        SkyrlTrainError, match=r"tracker\.wandb cannot start in mode online.*tracker\.wandb\.mode=offline"
    ):
        logged(configured(tmp_path, wandb=True, mode="online"), tmp_path)


@pytest.mark.slow
def test_wandb_has_samples_commit_log_and_what_finds_a_run(tmp_path, monkeypatch):
    """Real wandb, offline."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    (tmp_path / "run.log").write_text("what the console said\n")
    config = configured(tmp_path, wandb=True, tags=("short", "try"), group="sizes", notes="smaller", git=True)
    config = replace(config, tracker=replace(config.tracker, wandb=replace(config.tracker.wandb, console=True)))
    console = RunConsole(file=io.StringIO())
    trackers = build_trackers(config, RunFolder(tmp_path), console=console, start_step=0, total_steps=2)
    trackers.log_samples(1, rollouts())
    trackers.log({"reward/mean": 0.5}, step=1)
    trackers.alert(1, "entropy", "it collapsed")
    trackers.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert (run / "files" / "run.log").read_text() == "what the console said\n"
    (table,) = run.rglob("*.table.json")
    assert json.loads(table.read_text())["data"][0][2] == "first\n\n[user] no\n\nsecond"
    (record,) = run.glob("*.wandb")
    deadline = time.monotonic() + 60
    while b"it collapsed" not in (content := record.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.2)  # its service writes when it likes
    for expected in (b"short", b"sizes", b"smaller", b"it collapsed", b'"is_changed"'):
        assert expected in content, expected
    assert b"s3cr3t-value" not in content
