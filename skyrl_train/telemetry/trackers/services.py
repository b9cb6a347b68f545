"""TensorBoard, Weights & Biases, Trackio, MLflow and an endpoint for Prometheus. Implement Tracker.

Nothing here waits without a limit: starts, calls and ends have deadlines, Trackio and wandb send from threads of their own,
and Prometheus asks us.

Weights & Biases is offline where no key is configured. What it would collect by itself and could hold a secret or a path
(command line, git remote, console output, code) is turned off; the configuration is redacted before it is handed over. The
commit, and `run.log`, which is redacted, are handed over where settings say so.
"""

from __future__ import annotations

import math
import netrc
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

from skyrl_train.config import MlflowConfig, PrometheusConfig, TrackioConfig, WandbConfig
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.system import in_time, install_command
from skyrl_train.system.files import write_atomically
from skyrl_train.telemetry.declared import declaration_of
from skyrl_train.telemetry.logs.console import RunConsole
from skyrl_train.telemetry.run_folder import RunFolder, git_commit
from skyrl_train.telemetry.trackers.base import SAMPLE_COLUMNS, SampleRow

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 30.0
_PARAMETERS_PER_CALL = 100
_PARAMETER_LENGTH = 500
PROBE_TIMEOUT_S = 4.0
"""For the server to answer anything at all, where the mode is left to us."""
AUTO_TIMEOUT_S = 10.0
"""For the server to start the run then. With PROBE_TIMEOUT_S: how long it takes at most to choose the mode."""
INIT_TIMEOUT_S = 30.0
"""For the server to start the run where `tracker.wandb.mode=online`."""
FINISH_TIMEOUT_S = 60.0
"""Upload at the end; what is left is in the folder for `wandb sync`."""
_TEARDOWN_TIMEOUT_S = 5.0
_NOT_SERVED = frozenset({403, 407, 500, 502, 503, 504})
"""HTTP statuses of proxies, portals and servers that are down."""
_RUN_ID = "run_id"
_DEFAULT_SERVER = "https://api.wandb.ai"
R = TypeVar("R")
Mode = Literal["online", "offline", "disabled", "shared"]


class TensorboardTracker:
    """TensorBoard event files. Implements Tracker."""

    def __init__(self, folder: Path, *, start_step: int) -> None:
        """Events after `start_step`, which an earlier attempt may have written, are purged from the view.

        Raises SkyrlTrainError where TensorBoard is not installed or the folder cannot be written.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter

            purge_step = start_step + 1 if start_step else None
            self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        except (ImportError, OSError) as error:
            raise SkyrlTrainError(
                f"tracker.tensorboard cannot start ({type(error).__name__}: {error}). "
                f"{install_command('tensorboard')}, or leave tensorboard out of tracker=..."
            ) from error

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class TableTracker:
    """What wandb and Trackio, whose words are the same, do alike. `run` is one of `library`."""

    def __init__(self, library: Any, run: Any, num_samples: int) -> None:
        self._library, self._run, self.num_samples = library, run, num_samples

    def log_samples(self, rows: Sequence[SampleRow], *, step: int) -> None:
        """Show a table of an evaluation's rollouts."""
        data = [[row[name] for name in SAMPLE_COLUMNS] for row in rows]
        self._run.log({"samples": self._library.Table(columns=list(SAMPLE_COLUMNS), data=data)}, step=step)

    def alert(self, title: str, text: str) -> None:
        """Show an alert with the run, or have its user told as their settings say."""
        self._run.alert(title=title, text=text)


class WandbTracker(TableTracker):
    """A run on Weights & Biases. Implements Tracker."""

    def __init__(
        self,
        settings: WandbConfig,
        folder: RunFolder,
        *,
        run_name: str,
        config: Mapping[str, Any],
        console: RunConsole,
        run_log: Path | None = None,
    ) -> None:
        """`config` is shown with the run, without secrets: hand over what `redact` gives. `run_log` is handed over where
        `tracker.wandb.console` says so.

        Raises SkyrlTrainError where wandb is not installed, or cannot start in the mode that was asked for.

        Mode `auto` falls back to offline, with a warning, where the server does not answer, refuses, or does not start the
        run, each within its time.
        """
        try:
            import wandb
        except ImportError as error:
            raise SkyrlTrainError("tracker.wandb needs wandb. Install it, or leave wandb out of tracker=...") from error
        if settings.git:
            commit, dirty, _ = git_commit(Path.cwd()).partition("-dirty")
            config = {**config, "git": {"commit": commit, "is_changed": bool(dirty)} if commit else {}}
        mode = choose_mode(settings.mode, os.environ)
        is_auto = settings.mode == "auto" and mode == "online"
        start = partial(_start_wandb, settings, folder, run_name, config)
        try:
            if is_auto:
                _probe(_server(os.environ))
            timeout_s = AUTO_TIMEOUT_S if is_auto else INIT_TIMEOUT_S
            # Its own limits do not count the start of its service, nor every retry.
            run = in_time(lambda: start(mode, timeout_s), what="starting the run at wandb", timeout_s=timeout_s)
        except Exception as error:  # wandb raises its own kinds for keys, network and time-outs
            if not is_auto:
                raise SkyrlTrainError(
                    f"tracker.wandb cannot start in mode {mode} ({type(error).__name__}: {error}). "
                    "Check the key and the network, or set tracker.wandb.mode=offline"
                ) from error
            console.warn(f"wandb is offline: the server could not be used ({type(error).__name__}: {error})")
            mode = "offline"
            with suppress(Exception):  # its service holds the run's id until then
                in_time(wandb.teardown, what="wandb.teardown", timeout_s=_TEARDOWN_TIMEOUT_S)
            run = _offline(folder, lambda: start(mode, INIT_TIMEOUT_S))
        super().__init__(wandb, run, settings.samples)
        if mode == "offline":
            console.note(f"wandb: offline; upload later with `wandb sync {folder.wandb}/offline-run-*`")
        if settings.console and run_log is not None and run_log.exists():
            run.save(str(run_log), base_path=str(folder.root), policy="live")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload what is left. Raises DeadlineError where that hangs."""
        in_time(self._run.finish, what="wandb's upload", timeout_s=FINISH_TIMEOUT_S + _TEARDOWN_TIMEOUT_S)


def choose_mode(mode: str, environ: Mapping[str, str]) -> Mode:
    """`auto` follows WANDB_MODE where set, and is online where a key is configured, offline where none is."""
    if mode != "auto":
        return cast(Mode, mode)
    if stated := environ.get("WANDB_MODE"):
        return cast(Mode, "offline" if stated == "dryrun" else stated)
    return "online" if _has_key(environ) else "offline"


def _has_key(environ: Mapping[str, str]) -> bool:
    """A key in the environment, or in the netrc file where `wandb login` keeps it."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(_server(environ)).hostname or ""
    try:
        return netrc.netrc(environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _server(environ: Mapping[str, str]) -> str:
    return environ.get("WANDB_BASE_URL") or _DEFAULT_SERVER


def _probe(server: str) -> None:
    """Raise where the server does not answer, or something in its place refuses everybody: through the proxies of this
    machine, as wandb asks it. Nothing of ours is sent, so that certificates are left to wandb."""
    import httpx

    def ask() -> None:
        answer = httpx.get(server, timeout=PROBE_TIMEOUT_S, verify=False, follow_redirects=True)
        if answer.status_code in _NOT_SERVED:
            raise ConnectionError(f"{server} answers with HTTP status {answer.status_code}")

    in_time(ask, what=server, timeout_s=PROBE_TIMEOUT_S)


def _offline(folder: RunFolder, start: Callable[[], R]) -> R:
    """What `start` gives offline. Where the service of the attempt before neither ended nor let go of the run's id, a run
    under another id."""
    try:
        return in_time(start, what="wandb offline", timeout_s=INIT_TIMEOUT_S)
    except Exception:  # its own kind, which says that the id is in use
        (folder.wandb / _RUN_ID).unlink(missing_ok=True)
        return in_time(start, what="wandb offline", timeout_s=INIT_TIMEOUT_S)


def _start_wandb(
    settings: WandbConfig, folder: RunFolder, run_name: str, config: Mapping[str, Any], mode: Mode, timeout_s: float
) -> Any:
    import wandb

    return wandb.init(
        project=settings.project,
        entity=settings.entity,
        tags=list(settings.tags) or None,
        group=settings.group,
        notes=settings.notes or None,
        name=run_name,
        id=kept_name(folder.wandb / _RUN_ID, uuid.uuid4().hex[:12]),
        resume="allow",
        dir=str(folder.root),
        mode=mode,
        config=dict(config),
        settings=wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            finish_timeout=FINISH_TIMEOUT_S,
            init_timeout=timeout_s,
            save_code=False,
            silent=True,
            use_dot_wandb=False,
            x_disable_meta=True,
        ),
    )


def kept_name(file: Path, new: str) -> str:
    """Return the name of a run that a file holds, `new` where there is none: a resumed run continues its curves."""
    if not file.exists():
        write_atomically(file, f"{new}\n".encode())
    return file.read_text(encoding="utf-8").strip()


def _started(name: str, start: Callable[[], R]) -> R:
    """What `start` gives. Raises SkyrlTrainError where the extra is missing or it cannot start."""
    try:
        return in_time(start, what=f"starting tracker.{name}", timeout_s=START_TIMEOUT_S)
    except ImportError as error:
        raise SkyrlTrainError(
            f"tracker.{name} needs a package: {install_command(name)} ({error}). Or leave it out of tracker=..."
        ) from error
    except Exception as error:  # each package raises its own kinds
        raise SkyrlTrainError(
            f"tracker.{name} cannot start ({type(error).__name__}: {error}). Check its settings and the network, or leave "
            f"{name} out of tracker=..."
        ) from error


class TrackioTracker(TableTracker):
    """A run in a project of Trackio, which a resumed run continues; its name is kept in `trackio/` of the run's folder."""

    def __init__(self, settings: TrackioConfig, folder: Path, *, run_name: str, config: Mapping[str, Any]) -> None:
        """`config` has no secrets. Raises SkyrlTrainError where Trackio is missing or cannot start."""

        def start() -> tuple[Any, Any]:
            import trackio

            run = trackio.init(
                project=settings.project,
                # Trackio knows a run by its name, which several folders may have.
                name=kept_name(folder / "run_name", f"{run_name}-{uuid.uuid4().hex[:6]}"),
                group=settings.group,
                space_id=settings.space,
                config=dict(config),
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
            return trackio, run

        super().__init__(*_started("trackio", start), num_samples=settings.samples)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Hand over what is finite; it is sent behind our back."""
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        """Send what is left. Raises DeadlineError where that hangs."""
        in_time(self._run.finish, what="Trackio's upload", timeout_s=FINISH_TIMEOUT_S)


class MlflowTracker:
    """A run of MLflow, at a server or in `mlflow/` of the run's folder, which a resumed run continues."""

    def __init__(self, settings: MlflowConfig, folder: Path, *, run_name: str, config: Mapping[str, Any]) -> None:
        """`config` has no secrets. Raises SkyrlTrainError where MLflow is missing or cannot start."""
        uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or (folder / "runs").resolve().as_uri()
        if uri.startswith("file:"):
            os.environ.setdefault(
                "MLFLOW_ALLOW_FILE_STORE", "true"
            )  # it is enough for one writer, and needs no database
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")

        def start() -> tuple[Any, str]:
            import mlflow

            client = mlflow.MlflowClient(tracking_uri=uri)
            path = folder / "run_id"
            if path.exists():
                run_id = path.read_text().strip()
                client.update_run(run_id, status="RUNNING")
                return client, run_id
            found = client.get_experiment_by_name(settings.experiment)
            experiment = found.experiment_id if found else client.create_experiment(settings.experiment)
            run_id = client.create_run(experiment, run_name=run_name).info.run_id
            write_atomically(path, f"{run_id}\n".encode())
            parameters = list(_parameters(config))
            for first in range(0, len(parameters), _PARAMETERS_PER_CALL):
                client.log_batch(run_id, params=parameters[first : first + _PARAMETERS_PER_CALL])
            return client, run_id

        self.num_samples = settings.samples
        self._client, self._run_id = _started("mlflow", start)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Hand over what is finite, under names that MLflow takes: `eval/pass_1` for `eval/pass@1`."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        batch = [
            Metric(re.sub(r"[^\w\-. /:]", "_", name), float(value), now_ms, step)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        self._in_time("log", lambda: self._client.log_batch(self._run_id, metrics=batch))

    def log_samples(self, rows: Sequence[SampleRow], *, step: int) -> None:
        """A table of an evaluation's rollouts, as an artifact."""
        data = [["" if row[name] != row[name] else row[name] for name in SAMPLE_COLUMNS] for row in rows]
        table = {"columns": list(SAMPLE_COLUMNS), "data": data}
        self._in_time("log_dict", lambda: self._client.log_dict(self._run_id, table, f"samples/step_{step:06d}.json"))

    def alert(self, title: str, text: str) -> None:
        """Keep the last alert as a tag of the run."""
        self._in_time("set_tag", lambda: self._client.set_tag(self._run_id, "alert", f"{title}: {text}"))

    def close(self) -> None:
        """Mark the run as ended. Raises DeadlineError where the server does not answer."""
        self._in_time("set_terminated", lambda: self._client.set_terminated(self._run_id))

    def _in_time(self, name: str, call: Callable[[], object]) -> None:
        in_time(call, what=f"MLflow's {name}", timeout_s=CALL_TIMEOUT_S)


def _parameters(config: Mapping[str, Any], prefix: str = "") -> Iterator[Any]:
    """Every setting by its dotted name, cut to what MLflow takes."""
    from mlflow.entities import Param

    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _parameters(value, f"{prefix}{name}.")
        else:
            yield Param(re.sub(r"[^\w\-. /:]", "_", f"{prefix}{name}"), str(value)[:_PARAMETER_LENGTH])


class PrometheusTracker:
    """Answers Prometheus, on the loopback address alone, with the last record: a gauge `skyrl_...` for each metric."""

    def __init__(self, settings: PrometheusConfig, *, run_name: str, console: RunConsole) -> None:
        """Raises SkyrlTrainError where the package is missing or the port is taken."""
        self._record: dict[str, float] = {}
        self._run_name = run_name

        def start() -> Any:
            from prometheus_client import CollectorRegistry, start_http_server

            registry = CollectorRegistry()
            registry.register(self)  # type: ignore[arg-type,unused-ignore]
            return start_http_server(settings.port, addr="127.0.0.1", registry=registry)[0]

        self._server = _started("prometheus", start)
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"
        console.note(f"prometheus: {self.url}")

    def collect(self) -> Iterator[Any]:
        """The gauges, as Prometheus asks for them, with what each metric means."""
        from prometheus_client.core import GaugeMetricFamily

        for name, value in self._record.items():
            declared = declaration_of(name)
            gauge = GaugeMetricFamily(
                "skyrl_" + re.sub(r"\W+", "_", name), declared.meaning if declared else name, labels=["run"]
            )
            gauge.add_metric([self._run_name], value)
            yield gauge

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """The record that is served from now on; what an evaluation measured stays until the next."""
        self._record = {**self._record, **metrics, "step": float(step)}

    def close(self) -> None:
        """Answer no more."""
        in_time(self._server.shutdown, what="ending the endpoint for Prometheus", timeout_s=CALL_TIMEOUT_S)
        self._server.server_close()
