"""The skeleton that every training loop shares: begin, record a step, save, evaluate, stop, and what is said of it.

A trainer writes down its verbs; everything that makes a step count is here, written once:

    begin      load the checkpoint, evaluate where curves start
    record     timings, the step's line in the record, the picture, callbacks
    conclude   a checkpoint where one is due (`checkpoints/writer.py`), and the end where a signal asked for it
    complete   the mark that the run has nothing left to do

The record is on disk before the checkpoint of its step is. A run that is killed in between repeats the step and writes
the same record again. Signals ask for a stop at the next safe point (`stop.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

from skyrl_train.config import LoopConfig
from skyrl_train.errors import ActorLostError, NonFiniteError, SkyrlTrainError, StopRequested
from skyrl_train.interfaces import HeldState, Learner, Scorer
from skyrl_train.system import resident_bytes
from skyrl_train.system.files import FileSums
from skyrl_train.telemetry import Activity, Alerts, RunFolder
from skyrl_train.telemetry.logs import RunConsole
from skyrl_train.telemetry.records import Timeline
from skyrl_train.telemetry.trackers import Trackers
from skyrl_train.trainers.checkpoints.folder import checkpoint_name
from skyrl_train.trainers.checkpoints.state import DataFingerprint, LoopState, TrainerState
from skyrl_train.trainers.checkpoints.store import CheckpointStore
from skyrl_train.trainers.checkpoints.writer import Saves
from skyrl_train.trainers.observers import Observers
from skyrl_train.trainers.resume import Start
from skyrl_train.trainers.step_timer import StepTimer
from skyrl_train.trainers.stop import GivenUp, StopFlag, stop_on_signals

DECLARED_METRICS = """
timing/step | s | The step, from the last one's end. | | TRL `step_time`; verl `timing_s/step`; SkyRL `timing/step`
timing/{generate,assemble,score,estimate,update,sync} | s | Phases (`docs/architecture.md`). | reinforcement learning |
    verl `timing_s/gen`, `timing_s/old_log_prob`, `timing_s/adv`, `timing_s/update_actor`; SkyRL `timing/generate`,
    `timing/policy_train`, `timing/sync_weights`
timing/{collate,sample} | s | Waiting for examples; sampling at an evaluation. | supervised training
timing/{load,evaluate,log,record,checkpoint} | s | Loading, evaluation, metrics and rollouts to disk, record and
    checkpoint of the step before. | where it ran | verl `timing_s/testing`, `timing_s/save_checkpoint`
timing/capsule | s | Keeping what executes the step again. | with `trainer.capsules`
timing/wait/checkpoint | s | Within `timing/checkpoint`, the wait for the last one. | where one was due, or the run
    ended
timing/background/checkpoint | s | Writing and uploading a checkpoint beside the steps. | at the step after which it was
    done
timing/other | s | The rest of `timing/step`, which no phase covers.
timing/wait/sync | s | Time in which new weights kept the engine from answering. | where synced
memory/controller_gib | GiB | Host memory of the loop's process, models too if there. | on Linux
run/restarts | count | Restarts of the run by itself after a lost worker. | from the first on
"""

Figures = Mapping[str, float]
"""Metrics by name, as numbers."""
Pictures = tuple[tuple[Callable[..., object], Path, Path], ...]
"""What draws, of which record, and the image."""


class TrainingLoop:
    """One run's loop around the verbs of its trainer. It constructs nothing and closes nothing it is given."""

    def __init__(
        self,
        *,
        trainer: LoopConfig,
        total_steps: int,
        run_name: str,
        config: Mapping[str, Any],
        models: Mapping[str, Learner | Scorer],
        data: DataFingerprint,
        start: Start,
        checkpoints: CheckpointStore,
        trackers: Trackers,
        observers: Observers,
        folder: RunFolder,
        console: RunConsole,
        draw: Callable[..., object],
        draw_timeline: Callable[..., object],
        activity: Activity | None = None,
        alerts: Alerts | None = None,
        num_restarts: int = 0,
    ) -> None:
        """
        Args:
            config: Every setting by its dotted name (`checkpoints.flat_config`), which checkpoints record.
            models: Those that a checkpoint holds, by the names of their folders in it.
            folder: Is prepared for `start` (see `resume.prepare_run_folder`).
            draw: `draw(metrics file, image file, title=...)` draws the learning curve; `draw_timeline` what ran when.
            activity: What rollouts are at.
            num_restarts: How often this process has gone on from a checkpoint after a worker was lost; recorded from the
                first on.
        """
        self.trainer, self.total_steps, self._run_name = trainer, total_steps, run_name
        self._config, self._num_restarts = config, num_restarts
        self.start, self.folder, self.console = start, folder, console
        self.observers, self.trackers, self._alerts = observers, trackers, alerts
        self.timer = StepTimer()
        self._models, self._data, self._checkpoints = models, data, checkpoints
        self._pictures: Pictures = (
            (draw, folder.metrics_file, folder.learning_curve_file),
            (draw_timeline, folder.timeline_file, folder.timeline_image),
        )
        self._timeline, self._activity = Timeline(folder.timeline_file), activity
        self._stop = StopFlag()
        self._finished: tuple[int, LoopState] | None = None
        """The last step that is finished and the state after it, which the models have until the next update."""
        self.saves = Saves(
            folder=folder,
            store=checkpoints,
            last_checkpoint=start.checkpoint,
            last_step=start.global_step,
            policy=cast("Learner", models["policy"]),
            trainer=trainer,
            console=console,
            timer=self.timer,
            observers=observers,
            flush_record=trackers.flush,
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wraps all steps: signals ask for a stop at the next safe point, and a NonFiniteError says where the run can be
        continued from."""
        watched = nullcontext() if self._alerts is None else self._alerts.watching(self.start.global_step)
        with _start_up_uncollected(), stop_on_signals(grace_s=self.trainer.stop_grace_s) as stop, watched:
            self._stop = stop
            try:
                with closing(self.saves):
                    yield
            except GivenUp:
                assert self._finished is not None, "a step is given up behind the one before"
                step, state = self._finished
                last = self.saves.last_checkpoint
                if last is None or last.name != checkpoint_name(step):
                    self.saves.save(step, partial(self.hold_state, step, state), [self._checkpoints])
                stop.raise_if_set(step)
            except NonFiniteError as error:
                checkpoint = self.saves.last_checkpoint
                kept = f"The last checkpoint is {checkpoint}" if checkpoint else "There is no checkpoint"
                raise NonFiniteError(f"{error} {kept}; it was not touched by this step.") from error
            except ActorLostError as error:
                if stop.signal_name is not None:  # who asked for an end gets no restart
                    self.console.warn(f"{type(error).__name__}: {error}")
                    raise StopRequested(stop.signal_name, self.saves.last_step) from error
                raise

    @contextmanager
    def phase(self, name: str, *, can_give_up: bool = False) -> Iterator[None]:
        """Wraps one verb: its seconds become `timing/<name>`, and a bar of that name shows its progress.

        `can_give_up`: it leaves the models as they are, so that a second signal may break it off.
        """
        with self.timer.phase(name), self.console.phase(name):
            if not can_give_up or self._finished is None:
                yield
                return
            with self._stop.can_give_up():
                yield

    def load(self) -> None:
        """Gives each model its weights from the checkpoint that the run starts from, if there is one."""
        if self.start.checkpoint is not None:
            with self.phase("load"):
                for name, learner in self._models.items():
                    if name not in self.start.fresh_models:
                        learner.load(self.start.checkpoint / name)

    def begin(self, state: LoopState, evaluate: Callable[[int], Figures]) -> None:
        """Tells callbacks of the start, evaluates where the run's curves start, and stops if a signal came before
        the first step."""
        step = self.start.global_step
        self.observers.tell("start", step, path=self.folder.root)
        if self.start.is_first and self.trainer.eval_before_train and (metrics := self._evaluate(step, evaluate)):
            timings = self._finish_timing(step)
            with self.saves.attempt():
                self.trackers.log({**metrics, **timings}, step=step)
        self._finished = step, state
        if self._stop.is_set and step < self.total_steps:
            self.saves.save(step, partial(self.hold_state, step, state), [self._checkpoints])
            self._stop.raise_if_set(step)

    def steps(self) -> range:
        """The numbers of the steps that remain, from 1."""
        return range(self.start.global_step + 1, self.total_steps + 1)

    def is_last(self, step: int) -> bool:
        return step == self.total_steps

    def evaluate_where_due(self, step: int, evaluate: Callable[[int], Figures]) -> Figures:
        """The metrics of `evaluate(step)` after the last step and every `eval_interval` steps; none otherwise."""
        if self.is_last(step) or is_due(step, self.trainer.eval_interval):
            return self._evaluate(step, evaluate)
        return {}

    def record(self, step: int, metrics: Figures, *, speed: Callable[[Figures], Figures], is_evaluated: bool) -> None:
        """Writes the step's record, with its timings and with what `speed` makes of them, and tells callbacks.

        `is_evaluated`: `metrics` hold an evaluation, so that the learning curve has a new point.
        """
        timings = self._finish_timing(step)
        with self.phase("record"):
            restarts = {"run/restarts": float(self._num_restarts)} if self._num_restarts else {}
            held = resident_bytes()
            memory = {"memory/controller_gib": held / 2**30} if held else {}
            # An engine that says for how long it was kept from answering knows better than its caller.
            record = {**timings, **metrics, **speed(timings), **memory, **restarts}
            with self.saves.attempt():
                self.trackers.log(record, step=step)
            if is_evaluated and not self.is_last(step):
                self._draw(self._pictures[:1])
        if self._alerts is not None:
            self._alerts.check(step, record)
        self.observers.tell("step", step, metrics=record)

    def conclude(self, step: int, state: LoopState, *, ends: bool = False, best: CheckpointStore | None = None) -> None:
        """Saves a checkpoint where one is due, or where the last one failed. Raises StopRequested, with the checkpoint
        written, where a signal came and there is more to train, and SaveError where the run cannot go on writing
        (`checkpoints/writer.py`).

        `ends`: the trainer ends the run after this step, whatever the number of steps is. `best`: where the step is to be
        kept, too.
        """
        saves, hold = self.saves, partial(self.hold_state, step, state)
        stopping, ends = self._stop.is_set, ends or self.is_last(step)
        goes_on = not (ends or stopping)
        is_due_now = is_due(step, self.trainer.ckpt_interval)
        saves.collect(step, hold, waits=is_due_now or best is not None or not goes_on or saves.has_failed)
        if is_lost := saves.is_last_lost:
            self.console.warn(f"{saves.last_checkpoint}, the last checkpoint, was deleted: another is written now")
        is_saved = is_due_now or not goes_on or saves.has_failed or is_lost
        stores = ([] if best is None else [best]) + ([self._checkpoints] if is_saved else [])
        saves.save(step, hold, stores, can_retry=goes_on)
        self._finished = step, state
        if stopping and not ends:
            self._stop.raise_if_set(step)

    def hold_state(self, step: int, state: LoopState, *, copies: bool) -> HeldState:
        """Each model and the state of the loop after `step` steps, to be written; see `HeldState`."""
        held = {name: model.hold_state(copies=copies) for name, model in self._models.items()}
        record = TrainerState.at(step, state, config=self._config, data=self._data)

        def write(folder: Path) -> FileSums:
            sums = {
                f"{name}/{file}": each
                for name, model in held.items()
                for file, each in model.write(folder / name).items()
            }
            record.write(folder)
            return sums

        return HeldState(is_copied=copies and all(model.is_copied for model in held.values()), write=write)

    def draw(self) -> None:
        """Draws the learning curve, and what ran when."""
        self._finish_timing(self.saves.last_step)
        self._draw(self._pictures)

    def _draw(self, pictures: Pictures) -> None:
        """A failure is a line on the console: a picture is no reason to end a run."""
        for draw, record, image in pictures:
            try:
                draw(record, image, title=self._run_name)
            except SkyrlTrainError as error:  # what draws is not installed: said once
                self.console.warn(f"no pictures: {error}")
                self._pictures = ()
                return
            except Exception as error:  # matplotlib, its fonts and its caches fail in many ways
                self.console.warn(f"{image.name} could not be drawn: {type(error).__name__}: {error}")
            gc.collect()  # a figure is rings of objects, which would lie there for tens of pictures

    def complete(self, step: int) -> None:
        """Marks the run as complete, which is its last act, and tells callbacks."""
        self.saves.complete(step)
        self.observers.tell("end", step, path=self.folder.root)

    def _finish_timing(self, step: int) -> dict[str, float]:
        """Ends the step's clock: its timings, and those of rollouts since the last time. What ran when is written down."""
        timings, spans = self.timer.finish_step(), self.timer.take_spans()
        report = None if self._activity is None else self._activity.take()
        try:
            self._timeline.write(step, spans, report)
        except OSError as error:  # the record of metrics says what becomes of a run that cannot write
            self.console.warn(f"{self.folder.timeline_file.name} could not be written: {error}")
        return timings if report is None else {**timings, **report.metrics}

    def _evaluate(self, step: int, evaluate: Callable[[int], Figures]) -> Figures:
        metrics = evaluate(step)
        if metrics:
            self.observers.tell("evaluation", step, metrics=metrics)
        return metrics


def is_due(step: int, interval: int) -> bool:
    """Return whether `step` is one of every `interval`; no step is for 0."""
    return interval > 0 and step % interval == 0


_FEW_OBJECTS = 200_000
"""Those of torch and transformers are twice as many or more, through which a collection takes a quarter of a second."""


@contextmanager
def _start_up_uncollected() -> Iterator[None]:
    """Within the block the garbage collector leaves alone what there was before it: modules of torch and transformers, of
    which each look through all objects took 0.3 s, every fifth step of the quickstart. A caller's own freeze of
    most of that stays; Python 3.12 has a few objects frozen at its start."""
    # To count what is frozen is to walk through it, which takes longer than to look through few objects that are not.
    unfrozen = len(gc.get_objects())
    if unfrozen < _FEW_OBJECTS or gc.get_freeze_count() > unfrozen:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
