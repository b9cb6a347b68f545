"""What a kind of run is to the driver, and an attempt at it: where it begins, and the skeleton of its loop."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

import torch

from skyrl_train.config import AnyConfig, Config, LoopConfig, RunConfig
from skyrl_train.config.derived import reference_is_base
from skyrl_train.config.fields import unusual_values
from skyrl_train.doctor import problems_of
from skyrl_train.interfaces import Learner, Scorer
from skyrl_train.model.layers import set_numerics
from skyrl_train.parts import TRACKERS
from skyrl_train.plan import BatchPlan, SFTPlan
from skyrl_train.registry import part_name
from skyrl_train.runs.cli.composition import write_yaml
from skyrl_train.runs.resolving import limit_threads
from skyrl_train.runs.restarts import OnEnd, Restarts
from skyrl_train.telemetry import Activity, Alerts, MetricsLog, RunFolder
from skyrl_train.telemetry.logs import RunConsole, redact
from skyrl_train.telemetry.records import draw_timeline
from skyrl_train.telemetry.trackers import (
    ConsoleTracker,
    MlflowTracker,
    PrometheusTracker,
    TensorboardTracker,
    Tracker,
    Trackers,
    TrackioTracker,
    WandbTracker,
)
from skyrl_train.trainers import Observers, Start, TrainingLoop, find_start, prepare_run_folder
from skyrl_train.trainers.capsules import CapsuleWriter
from skyrl_train.trainers.checkpoints import (
    CheckpointStore,
    DataFingerprint,
    flat_config,
    settings_of,
)

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=AnyConfig)
PlanT = TypeVar("PlanT", BatchPlan, SFTPlan)
ResultT = TypeVar("ResultT")


class Parts(ExitStack):
    """Closes the parts of a run, the last one first. What one of them raises is a warning: it neither keeps the others
    open nor takes the place of the error that ended the run."""

    def __init__(self, console: RunConsole, on_end: OnEnd) -> None:
        super().__init__()
        self._console, self._on_end = console, on_end

    def callback(self, callback: Callable[P, R], /, *args: P.args, **kwds: P.kwargs) -> Callable[P, R]:
        """Register what closes a part."""
        super().callback(self._close, lambda: callback(*args, **kwds), getattr(callback, "__qualname__", str(callback)))
        return callback

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        """Say first how the run ended, since closing may take long."""
        self._on_end(error)
        return super().__exit__(kind, error, trace)

    def _close(self, close: Callable[[], object], name: str) -> None:
        try:
            close()
        except Exception as error:  # of any kind: parts of others are among them
            self._console.warn(f"{name} failed: {type(error).__name__}: {error}")


def open_checkpoints(folder: Path, trainer: LoopConfig, *, keep: int | None = None) -> CheckpointStore:
    """Return the checkpoints in a `folder` of a run's own, and at its URL, where one is stated. `keep`: as many as
    `trainer` says unless given. Raises SaveError where the URL cannot be written to."""
    url = f"{trainer.checkpoint_url.rstrip('/')}/{folder.name}" if trainer.checkpoint_url else ""
    keep = trainer.max_ckpts_to_keep if keep is None else keep
    checkpoints = CheckpointStore(folder, keep=keep, url=url, timeout_s=trainer.checkpoint_timeout_s)
    checkpoints.check()
    return checkpoints


@dataclass(frozen=True, kw_only=True)
class Attempt(Generic[C, PlanT]):
    """An attempt at a run: what its parts are built from, and where it begins."""

    config: C
    plan: PlanT
    data: DataFingerprint
    start: Start
    folder: RunFolder
    console: RunConsole
    checkpoints: CheckpointStore
    stack: ExitStack
    """Closes the parts of this attempt, the last one first."""
    num_restarts: int = 0

    @property
    def is_fresh(self) -> bool:
        """Whether the models have the weights that they are given, rather than those of a checkpoint."""
        return self.start.checkpoint is None and not self.num_restarts

    def loop(
        self,
        models: Mapping[str, Learner | Scorer],
        *,
        draw: Callable[..., object],
        draw_timeline: Callable[..., object] = draw_timeline,
        activity: Activity | None = None,
    ) -> TrainingLoop:
        """Return the skeleton of the loop, with its trackers and observers. `models` are those that a checkpoint holds;
        `draw` draws the learning curve; the rest is as `TrainingLoop` takes it."""
        config, console, total_steps = self.config, self.console, self.plan.total_steps
        trainer: LoopConfig = config.trainer
        if trainer.profile_steps:
            memory = (
                "and snapshots of memory"
                if config.platform.on_gpu
                else "without snapshots of memory, which CUDA alone takes"
            )
            console.note(
                f"steps {list(trainer.profile_steps)} are profiled: traces in {self.folder.profiles}, {memory}"
            )
        first = self.start.global_step
        trackers = build_trackers(config, self.folder, console=console, start_step=first, total_steps=total_steps)
        self.stack.callback(trackers.close)
        return TrainingLoop(
            trainer=trainer,
            total_steps=total_steps,
            run_name=config.run_name,
            config=flat_config(settings_of(config)),
            models=models,
            data=self.data,
            start=self.start,
            checkpoints=self.checkpoints,
            trackers=trackers,
            observers=Observers(trainer.metrics, trainer.callbacks, console, total_steps=total_steps),
            folder=self.folder,
            console=console,
            alerts=Alerts(
                config.alerts,
                console,
                trackers.alert,
                run_name=config.run_name,
                examine=partial(problems_of, self.folder.root),
            ),
            draw=draw,
            draw_timeline=draw_timeline,
            activity=activity,
            num_restarts=self.num_restarts,
        )

    def capsules(self, loop: TrainingLoop) -> CapsuleWriter:
        """Return what keeps steps of the loop so that they can be executed again."""
        return CapsuleWriter(
            self.folder,
            keep=self.config.trainer.capsules,
            seed=self.config.seed,
            total_steps=self.plan.total_steps,
            hold_state=loop.hold_state,
            console=self.console,
        )


class Task(ABC, Generic[C, PlanT, ResultT]):
    """One kind of run: its data, what follows from them, and what trains on them."""

    fingerprint: DataFingerprint
    """Of the training prompts, or of the examples of supervised training."""
    notes: Sequence[str]
    """What was left out of them, one line each."""

    @abstractmethod
    def plan(self, config: C) -> PlanT:
        """Return the sizes of the run. Raises ConfigError where nothing fills a step."""

    @abstractmethod
    def plan_lines(self, config: C, plan: PlanT) -> list[str]:
        """Return them for a reader."""

    @abstractmethod
    def build(self, attempt: Attempt[C, PlanT]) -> Callable[[], ResultT] | None:
        """Build all parts and return what trains them; None where nothing is to be trained."""

    @abstractmethod
    def goodbye(self, config: C, result: ResultT, folder: RunFolder) -> list[str]:
        """Return what the run left beside its record, and where, one line each."""


def begin(
    config: C,
    restarts: Restarts,
    folder: RunFolder,
    console: RunConsole,
    checkpoints: CheckpointStore,
    *,
    data: DataFingerprint,
    plan: BatchPlan | SFTPlan,
    promise: str,
) -> Start | None:
    """Decides where the run starts and prepares its folder for that; None where it is complete.

    Raises what `find_start` raises.
    """
    for name, value, usual in unusual_values(config):
        console.warn(f"{name}={value:g} is above the usual {usual.value:g}: {usual.why}")
    checkpoints.clean()
    settings = settings_of(config)
    is_base = isinstance(config, Config) and reference_is_base(config)
    start = find_start(
        restarts.resume(config.trainer),
        settings,
        type(config),
        folder,
        checkpoints,
        data=data,
        total_steps=plan.total_steps,
        reference_is_base=is_base,
    )
    for note in start.notes:
        console.note(note)
    if start.complete:
        checkpoints.tidy(start.checkpoint)
        return None
    notes = prepare_run_folder(
        folder,
        start,
        write_config=lambda path: write_yaml(redact(settings), path),
        plan={**dataclasses.asdict(plan), "resume": promise},
    )
    own = start.checkpoint if start.own else None
    if own is not None:
        checkpoints.tidy(own)
    checkpoints.take_over(own)
    for note in notes:
        console.note(note)
    return start


def build_trackers(
    config: RunConfig, folder: RunFolder, *, console: RunConsole, start_step: int, total_steps: int
) -> Trackers:
    """The trackers of `config.tracker`, ready to go on after `start_step`.

    Raises SkyrlTrainError where a tracker that was asked for cannot start: better now than after an hour.
    """
    views: dict[str, Tracker] = {}
    chosen, name = config.tracker, config.run_name
    shown = redact(settings_of(config))
    if chosen.tensorboard.enabled:
        views["tensorboard"] = TensorboardTracker(folder.tensorboard, start_step=start_step)
    if chosen.trackio.enabled:
        views["trackio"] = TrackioTracker(chosen.trackio, folder.trackio, run_name=name, config=shown)
    if chosen.mlflow.enabled:
        views["mlflow"] = MlflowTracker(chosen.mlflow, folder.mlflow, run_name=name, config=shown)
    if chosen.prometheus.enabled:
        views["prometheus"] = PrometheusTracker(chosen.prometheus, run_name=name, console=console)
    if chosen.wandb.enabled:  # whose server may be waited for, last
        log = folder.root / "run.log"
        views["wandb"] = WandbTracker(chosen.wandb, folder, run_name=name, config=shown, console=console, run_log=log)
    for spec in config.tracker.custom:
        views[part_name(spec)] = TRACKERS.resolve(spec)(folder.root)
    views["console"] = ConsoleTracker(console, total_steps=total_steps)
    return Trackers(record=MetricsLog(folder.metrics_file), views=views, console=console)


def prepare_process(config: RunConfig) -> None:
    """Settles threads and kernels; call before anything computes."""
    limit_threads(config)

    if config.platform.name == "cpu":
        torch.set_num_threads(config.platform.num_threads)

    set_numerics(deterministic=config.deterministic)
