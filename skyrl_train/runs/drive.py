"""One driver for every kind of run.

resolve   refuse what is wrong, choose what is open (resolving.py)
open      the folder, the console and the first lines; the rows
--------  torch is imported
load      the task: its data, tokenised and measured (rl.py, sft.py)
attempt   the plan, where it begins, the models and the loop; once more where a worker is lost (restarts.py)
train     the verbs of the task's trainer (trainers/ppo.py, trainers/sft.py)
goodbye   what it left, and where
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_train.config import AnyConfig, Config, RunConfig, SFTConfig
from skyrl_train.runs.resolving import Resolved, read_all_rows, resolve
from skyrl_train.runs.restarts import OnEnd, Restarts, tell_nobody, with_room
from skyrl_train.telemetry import RunFolder
from skyrl_train.telemetry.logs import RunConsole

if TYPE_CHECKING:
    from skyrl_train.runs.task import Task
    from skyrl_train.trainers import SFTResult, TrainingResult

C = TypeVar("C", bound=AnyConfig)
R = TypeVar("R", bound="TrainingResult | SFTResult")
T = TypeVar("T")


def train(config: Config, *, on_end: OnEnd = tell_nobody, only_looks: bool = False) -> TrainingResult | None:
    """Trains by reinforcement learning, or goes on training, in `config.output_dir`; None where the run there is complete,
    or where it `only_looks` (`look.py`). `on_end` is called before parts are closed.

    Raises SkyrlTrainError for whatever the user can fix, before anything expensive where that can be known;
    StopRequested after a signal, with the checkpoint written.
    """
    resolved = resolve(config)
    console = _opened(resolved)
    rows = read_all_rows(resolved.config)
    with uncollected():
        from skyrl_train.runs.rl import ReinforcementLearning  # and with it torch

    return drive(resolved, console, partial(ReinforcementLearning, rows=rows, only_looks=only_looks), on_end=on_end)


def train_sft(config: SFTConfig, *, on_end: OnEnd = tell_nobody) -> SFTResult | None:
    """Trains on answers that are given; all else as in `train`."""
    resolved = resolve(config)
    console = _opened(resolved)
    with uncollected():
        from skyrl_train.runs.sft import SupervisedLearning

    return drive(resolved, console, SupervisedLearning, on_end=on_end)


def evaluate(config: Config, *, on_end: OnEnd = tell_nobody) -> None:
    """One evaluation on `data.validation` with the weights of `model.path`, or of the checkpoint `trainer.resume_path`.

    Writes `evaluation.json` and, with `trainer.dump_rollouts`, `rollouts/`. `on_end` is called before parts are closed.
    Raises SkyrlTrainError.
    """
    of = config.trainer.resume_path or config.model.path
    resolved = resolve(config, purpose="generate")
    console = _opened(resolved, title=f"evaluation of {of}")
    rows = read_all_rows(resolved.config)
    with uncollected():
        from skyrl_train.runs.rl import evaluate_once

    evaluate_once(resolved.config, rows, console, on_end)


@contextmanager
def uncollected() -> Iterator[None]:
    """Within the block Python looks for no garbage. Modules and models are imported and made there, whose hundreds of
    thousands of objects all stay: to look through them again and again took a fifth of that time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def open_folder(config: RunConfig) -> RunFolder:
    """Return the run's folder, which exists from here on. Raises SkyrlTrainError where it cannot be made."""
    folder = RunFolder(Path(config.output_dir))
    folder.create(private=config.output_access == "owner")
    return folder


def _opened(resolved: Resolved[C], title: str = "") -> RunConsole:
    """Make the run's folder, and return the console, which has said what the run is."""
    config = resolved.config
    console = RunConsole(step_lines=bool(title) or config.tracker.console.enabled)
    open_folder(config)
    console.header(f"skyrl_train: {title or config.run_name}", resolved.lines)
    return console


def drive(
    resolved: Resolved[C], console: RunConsole, load: Callable[[C, RunConsole], Task[C, Any, R]], *, on_end: OnEnd
) -> R | None:
    """Return what the task that `load` gives makes of the run; None where there is nothing to train."""
    from skyrl_train.runs.task import Attempt, Parts, begin, open_checkpoints, prepare_process

    config, folder = resolved.config, RunFolder(Path(resolved.config.output_dir))
    prepare_process(config)
    checkpoints = open_checkpoints(folder.checkpoints, config.trainer)
    with uncollected():
        task = load(config, console)

    def attempt(config: C, restarts: Restarts) -> R | None:
        plan = task.plan(config)
        if not restarts.count:
            console.header("plan", [*task.plan_lines(config, plan), *task.notes])
        start = begin(
            config,
            restarts,
            folder,
            console,
            checkpoints,
            data=task.fingerprint,
            plan=plan,
            promise=resolved.promise,
        )
        if start is None:
            return None
        restarts.begun(start.global_step, policy_num_workers=config.placement.policy_num_workers)
        with Parts(console, restarts.ends) as stack:
            attempted = Attempt(
                config=config,
                plan=plan,
                data=task.fingerprint,
                start=start,
                folder=folder,
                console=console,
                checkpoints=checkpoints,
                stack=stack,
                num_restarts=restarts.count,
            )
            with uncollected():
                go = task.build(attempted)
            return None if go is None else go()

    with folder.locked():
        result = run_with_restarts(config, folder, console, attempt, on_end=on_end)
        if result is not None:
            curve = f"learning curve  {folder.learning_curve_file}"
            metrics = f"metrics         {folder.metrics_file}"
            own = task.goodbye(config, result, folder)
            console.header(f"done after step {result.global_step}", [curve, metrics, *own])
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
