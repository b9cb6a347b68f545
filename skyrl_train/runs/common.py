"""What every kind of run does around its training: its first lines, its folder, where it begins, the skeleton of its loop,
its last lines.

Everything heavy is imported inside the functions, so that printing a plan or an error stays quick.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from skyrl_train.config import LoopConfig, RunConfig
from skyrl_train.config.fields import unusual_values
from skyrl_train.interfaces import Learner, Scorer
from skyrl_train.model import source_line
from skyrl_train.model.layers import set_numerics
from skyrl_train.parts import TRACKERS
from skyrl_train.plan import BatchPlan
from skyrl_train.registry import part_name
from skyrl_train.runs.cli.composition import write_yaml
from skyrl_train.runs.construction.sft_data import SFTPlan
from skyrl_train.system import detect_platform, multiplies_bfloat16
from skyrl_train.telemetry import Activity, Alerts, MetricsLog, RunFolder
from skyrl_train.telemetry.logs import RunConsole, redact
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
from skyrl_train.trainers import LoopSettings, Observers, TrainingLoop
from skyrl_train.trainers.checkpoints import (
    CheckpointStore,
    DataFingerprint,
    ResumeSettings,
    Start,
    find_start,
    prepare_run_folder,
    settings_of,
)

P = ParamSpec("P")
R = TypeVar("R")
OnEnd = Callable[[BaseException | None], None]
"""Told how a run ended, before any part of it is closed."""


def tell_nobody(error: BaseException | None) -> None:
    """The `OnEnd` of a caller who handles errors himself."""


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


def open_folder(config: RunConfig) -> RunFolder:
    """Return the run's folder, which exists from here on. Raises SkyrlTrainError where it cannot be made."""
    folder = RunFolder(Path(config.output_dir))
    folder.create(private=config.output_access == "owner")
    return folder


def open_checkpoints(folder: Path, trainer: LoopConfig, *, keep: int | None = None) -> CheckpointStore:
    """Return the checkpoints in a `folder` of a run's own, and at its URL, where one is stated. `keep`: as many as
    `trainer` says unless given. Raises SaveError where the URL cannot be written to."""
    url = f"{trainer.checkpoint_url.rstrip('/')}/{folder.name}" if trainer.checkpoint_url else ""
    keep = trainer.max_ckpts_to_keep if keep is None else keep
    checkpoints = CheckpointStore(folder, keep=keep, url=url, timeout_s=trainer.checkpoint_timeout_s)
    checkpoints.check()
    return checkpoints


def first_lines(config: RunConfig, *own: str, data: Sequence[str], promise: str) -> list[str]:
    """What a user wants to know before anything happens: where it runs, what it trains on which `data`, lines of its
    `own`, where it writes. `promise` is what `resume_promise` says."""
    detected = detect_platform()
    why = detected.reason if detected.name == config.platform.name else "chosen on the command line"
    is_emulated = config.platform.name == "cpu" and config.model.dtype == "bfloat16" and not multiplies_bfloat16()
    slow = (
        "            this processor multiplies no bfloat16, so that it takes fifty times as long: model.dtype=float32"
    )
    return [
        f"platform    {config.platform.name} ({why})",
        f"placement   {config.placement.backend}, strategy {part_name(config.strategy.name)}",
        f"model       {config.model.path} ({config.model.dtype} on {config.platform.device})",
        *([slow] if is_emulated else []),
        *([f"            {source}"] if (source := source_line(config.model)) else []),
        f"data        {', '.join(data)}",
        *own,
        *config.derived,
        *([] if promise == "identical" else [f"resume      {promise}"]),
        f"output      {config.output_dir}",
    ]


def resume_promise(config: RunConfig, *, engine_seeds: bool = False, max_staleness: int = 0) -> str:
    """What a resumed run has in common with one that was not interrupted; also kept in `plan.json`.

    `engine_seeds`: the engine draws samples with a seed of its own. `max_staleness`: as the setting.
    """
    if max_staleness:
        return (
            "identical in what was trained on before, and no prompt is lost or comes twice; which weights sample what "
            f"comes next depends on time (trainer.max_staleness={max_staleness})"
        )
    if engine_seeds:
        return "not identical: samples are left to the engine's own seed (generator.seeds=engine)"
    if config.platform.name == "cpu":
        return "identical"
    if config.deterministic:
        return "identical (deterministic=true)"
    return "identical in data, prompts and seeds, not in rounding (deterministic=false)"


def begin(
    config: RunConfig,
    resume: ResumeSettings,
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
    start = find_start(resume, folder, checkpoints, data=data, total_steps=plan.total_steps)
    for note in start.notes:
        console.note(note)
    if start.complete:
        checkpoints.tidy(start.checkpoint)
        return None
    notes = prepare_run_folder(
        folder,
        start,
        write_config=lambda path: write_yaml(redact(settings_of(config)), path),
        plan={**dataclasses.asdict(plan), "resume": promise},
    )
    own = start.checkpoint if start.own else None
    if own is not None:
        checkpoints.tidy(own)
    checkpoints.take_over(own)
    for note in notes:
        console.note(note)
    return start


def build_loop(
    config: RunConfig,
    trainer: LoopConfig,
    recorded: Mapping[str, Any],
    folder: RunFolder,
    console: RunConsole,
    stack: ExitStack,
    *,
    models: Mapping[str, Learner | Scorer],
    data: DataFingerprint,
    start: Start,
    total_steps: int,
    checkpoints: CheckpointStore,
    draw: Callable[..., object],
    draw_timeline: Callable[..., object],
    activity: Activity | None = None,
    num_restarts: int = 0,
) -> TrainingLoop:
    """The skeleton of the run's loop, with its trackers, which `stack` closes, and its observers.

    `recorded`: every setting by its dotted name, for checkpoints (`trainers/checkpoints/changes.py: flat_config`).
    `draw` draws the learning curve; the rest is as `TrainingLoop` takes it.
    """
    if trainer.profile_steps:
        memory = (
            "and snapshots of memory"
            if config.platform.on_gpu
            else "without snapshots of memory, which CUDA alone takes"
        )
        console.note(f"steps {list(trainer.profile_steps)} are profiled: traces in {folder.profiles}, {memory}")
    trackers = build_trackers(config, folder, console=console, start_step=start.global_step, total_steps=total_steps)
    stack.callback(trackers.close)
    return TrainingLoop(
        settings=LoopSettings(
            run_name=config.run_name,
            total_steps=total_steps,
            eval_before_train=trainer.eval_before_train,
            eval_interval=trainer.eval_interval,
            ckpt_interval=trainer.ckpt_interval,
            stop_grace_s=trainer.stop_grace_s,
            max_failed_saves=trainer.max_failed_saves,
            background_checkpoints=trainer.background_checkpoints,
            config=recorded,
            num_restarts=num_restarts,
        ),
        models=models,
        data=data,
        start=start,
        checkpoints=checkpoints,
        trackers=trackers,
        observers=Observers(trainer.metrics, trainer.callbacks, console, total_steps=total_steps),
        folder=folder,
        console=console,
        alerts=Alerts(config.alerts, console, trackers.alert, run_name=config.run_name),
        draw=draw,
        draw_timeline=draw_timeline,
        activity=activity,
    )


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
    if chosen.trackio.enabled or chosen.mlflow.enabled or chosen.prometheus.enabled:
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


def say_goodbye(
    console: RunConsole, folder: RunFolder, *, step: int, is_exported: bool, best_step: int | None = None
) -> None:
    """What the run left, and where. `best_step` is that of the checkpoint in `best/`, if one is kept."""
    console.header(
        f"done after step {step}",
        [
            f"learning curve  {folder.learning_curve_file}",
            f"metrics         {folder.metrics_file}",
            *([f"best            step {best_step}, {folder.best}"] if best_step is not None else []),
            *([f"model           {folder.export}"] if is_exported else []),
        ],
    )


def limit_threads(config: RunConfig) -> None:
    """Settles the threads of libraries that are imported later. Idle OpenMP threads spin on busy cores and make all of it
    several times slower."""
    os.environ.setdefault("OMP_NUM_THREADS", str(config.platform.num_threads))
    if config.platform.num_threads > 1:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def prepare_process(config: RunConfig) -> None:
    """Settles threads and kernels; call before anything computes."""
    limit_threads(config)

    if config.platform.name == "cpu":
        torch.set_num_threads(config.platform.num_threads)

    set_numerics(deterministic=config.deterministic)
