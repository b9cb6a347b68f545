"""One driver for every kind of run.

resolve   refuse what is wrong, choose what is open (resolve.py)
open      the folder, the console and the first lines; the rows
--------  torch is imported
load      the task: its data, tokenised and measured (rl.py, sft.py)
attempt   the plan, where it begins, the models and the loop; once more where a worker is lost (restarts.py)
train     the verbs of the task's trainer (trainers/ppo.py, trainers/sft.py)
goodbye   what it left, and where
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from skyrl_train.config import AnyConfig, Config, RunConfig, SFTConfig
from skyrl_train.runs.resolve import Resolved, read_all_rows, resolve
from skyrl_train.runs.restarts import OnEnd, Restarts, tell_nobody, with_room
from skyrl_train.telemetry import RunFolder
from skyrl_train.telemetry.logs import RunConsole

if TYPE_CHECKING:
    from skyrl_train.runs.task import Task
    from skyrl_train.trainers import SFTResult, TrainingResult

C = TypeVar("C", bound=AnyConfig)
R = TypeVar("R", bound="TrainingResult | SFTResult")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Opened(Generic[C]):
    """A run that has said what it is."""

    resolved: Resolved[C]
    folder: RunFolder
    console: RunConsole


def train(config: Config, *, on_end: OnEnd = tell_nobody, only_looks: bool = False) -> TrainingResult | None:
    """Trains by reinforcement learning, or goes on training, in `config.output_dir`; None where the run there is complete,
    or where it `only_looks` (`look.py`). `on_end` is called before parts are closed.

    Raises SkyrlTrainError for whatever the user can fix, before anything expensive where that can be known;
    StopRequested after a signal, with the checkpoint written.
    """
    run = _opened(resolve(config))
    rows = read_all_rows(run.resolved.config)
    from skyrl_train.runs.rl import ReinforcementLearning  # and with it torch

    return drive(run, partial(ReinforcementLearning, rows=rows, only_looks=only_looks), on_end=on_end)


def train_sft(config: SFTConfig, *, on_end: OnEnd = tell_nobody) -> SFTResult | None:
    """Trains on answers that are given; all else as in `train`."""
    run = _opened(resolve(config))
    from skyrl_train.runs.sft import SupervisedLearning

    return drive(run, SupervisedLearning, on_end=on_end)


def evaluate(config: Config, *, on_end: OnEnd = tell_nobody) -> None:
    """One evaluation on `data.validation` with the weights of `model.path`, or of the checkpoint `trainer.resume_path`.

    Writes `evaluation.json` and, with `trainer.dump_rollouts`, `rollouts/`. `on_end` is called before parts are closed.
    Raises SkyrlTrainError.
    """
    of = config.trainer.resume_path or config.model.path
    run = _opened(resolve(config, trains=False), title=f"evaluation of {of}")
    rows = read_all_rows(run.resolved.config)
    from skyrl_train.runs.rl import evaluate_once

    evaluate_once(run.resolved.config, rows, run.folder, run.console, on_end)


def open_folder(config: RunConfig) -> RunFolder:
    """Return the run's folder, which exists from here on. Raises SkyrlTrainError where it cannot be made."""
    folder = RunFolder(Path(config.output_dir))
    folder.create(private=config.output_access == "owner")
    return folder


def _opened(resolved: Resolved[C], title: str = "") -> Opened[C]:
    config = resolved.config
    console = RunConsole(step_lines=bool(title) or config.tracker.console.enabled)
    folder = open_folder(config)
    console.header(f"skyrl_train: {title or config.run_name}", resolved.lines)
    return Opened(resolved=resolved, folder=folder, console=console)


def drive(run: Opened[C], load: Callable[[C, RunConsole], Task[C, Any, R]], *, on_end: OnEnd) -> R | None:
    """Return what the task that `load` gives makes of the run; None where there is nothing to train."""
    from skyrl_train.runs.task import Attempt, Parts, begin, open_checkpoints, prepare_process
    from skyrl_train.trainers.checkpoints import resume_settings

    config, folder, console = run.resolved.config, run.folder, run.console
    prepare_process(config)
    checkpoints = open_checkpoints(folder.checkpoints, config.trainer)
    task = load(config, console)

    def attempt(config: C, restarts: Restarts) -> R | None:
        plan = task.plan(config)
        if not restarts.count:
            console.header("plan", [*task.plan_lines(config, plan), *task.notes])
        resume = restarts.resume(resume_settings(config))
        start = begin(
            config, resume, folder, console, checkpoints, data=task.fingerprint, plan=plan, promise=run.resolved.promise
        )
        if start is None:
            return None
        restarts.begun(start.global_step, policy_num_workers=config.placement.policy_num_workers)
        with Parts(console, restarts.ends) as stack:
            go = task.build(
                Attempt(
                    config=config,
                    plan=plan,
                    recorded=resume.settings,
                    data=task.fingerprint,
                    start=start,
                    folder=folder,
                    console=console,
                    checkpoints=checkpoints,
                    stack=stack,
                    num_restarts=restarts.count,
                )
            )
            return None if go is None else go()

    with folder.locked():
        return _said_goodbye(run, task, run_with_restarts(config, folder, console, attempt, on_end=on_end))


def _said_goodbye(run: Opened[C], task: Task[C, Any, R], result: R | None) -> R | None:
    if result is not None:
        curve = f"learning curve  {run.folder.learning_curve_file}"
        metrics = f"metrics         {run.folder.metrics_file}"
        own = task.goodbye(run.resolved.config, result, run.folder)
        run.console.header(f"done after step {result.global_step}", [curve, metrics, *own])
    return result


def run_with_restarts(
    config: C,
    folder: RunFolder,
    console: RunConsole,
    attempt: Callable[[C, Restarts], T | None],
    *,
    on_end: OnEnd = tell_nobody,
) -> T | None:
    """Return what `attempt` does, which is made again up to `trainer.max_restarts` times where a worker is lost.

    Raises whatever else an attempt raises; ActorLostError where a worker is lost once more, or in the very first start.
    """
    restarts, now = Restarts(file=folder.restarts_file, limit=config.trainer.max_restarts, on_end=on_end), config
    while True:
        try:
            return attempt(now, restarts)
        except Exception as error:
            lost = restarts.answered(error)
            if lost is None:
                raise
            restarts.reason = str(lost).partition("\n")[0]
        # Behind the handler: the error's traceback holds the models and engines of the attempt.
        gc.collect()
        restarts.count += 1
        console.warn(
            f"restart {restarts.count} of {config.trainer.max_restarts} (trainer.max_restarts), from the last checkpoint: "
            f"{restarts.reason}"
        )
        now = with_room(config, console)
