"""Trackio, MLflow and an endpoint for Prometheus. Implement Tracker; each package is an extra.

Nothing here waits without a limit: Trackio sends from a thread of its own, MLflow's requests have a deadline, and Prometheus
asks us.
"""

from __future__ import annotations

import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from skyrl_train.config import MlflowConfig, PrometheusConfig, TrackioConfig
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.system import in_time, install_command
from skyrl_train.system.files import write_atomically
from skyrl_train.telemetry.declared import declaration_of
from skyrl_train.telemetry.logs.console import RunConsole
from skyrl_train.telemetry.trackers.base import SAMPLE_COLUMNS, SampleRow, TableTracker, kept_name

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 60.0
_PARAMETERS_PER_CALL = 100
_PARAMETER_LENGTH = 500
R = TypeVar("R")


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

        def start() -> tuple[Any, Any]:
            from prometheus_client import CollectorRegistry, start_http_server

            registry = CollectorRegistry()
            registry.register(self)  # type: ignore[arg-type,unused-ignore]
            server, thread = start_http_server(settings.port, addr="127.0.0.1", registry=registry)
            return server, thread

        self._server, self._thread = _started("prometheus", start)
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
