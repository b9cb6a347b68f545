"""The training loop of PPO and GRPO.

    generate -> assemble -> score -> estimate -> update -> sync -> finish

Each verb but the last is one function in `steps.py`. `finish` is what makes a step count: evaluate where it is due,
write the record, save a checkpoint where it is due, and stop where a signal asked for it. The record is on disk before
the checkpoint of its step is; a run that is killed in between repeats the step and writes the same record again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from skyrl_train.algorithms.entropy_controller import EntropyControllerState
from skyrl_train.algorithms.kl_controller import initial_state, next_state
from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.config.schema import Config
from skyrl_train.interfaces import CheckpointStore, Generator, Learner, Tracker, WeightTransport
from skyrl_train.telemetry.console import RunConsole
from skyrl_train.telemetry.learning_curve import draw_learning_curve
from skyrl_train.telemetry.metrics import to_values
from skyrl_train.telemetry.pictures import draw_or_warn
from skyrl_train.telemetry.run_folder import RunFolder
from skyrl_train.telemetry.timing import StepTimer
from skyrl_train.trainers import steps
from skyrl_train.trainers.evaluate import EvaluationResult, Evaluator
from skyrl_train.trainers.evaluation_report import (
    evaluation_line,
    evaluation_table,
    read_evaluations,
    write_evaluation,
)
from skyrl_train.trainers.loop_parts import export_whole, is_due, naming_last_checkpoint
from skyrl_train.trainers.observers import NO_METRICS, EventKind, Observers, RunEvent, StepFacts
from skyrl_train.trainers.resume import FRESH, Start, mark_complete
from skyrl_train.trainers.state import DataFingerprint, TrainerState, flat_config, library_versions
from skyrl_train.trainers.step_metrics import (
    batch_metrics,
    document_metrics,
    rollout_metrics,
    speed_metrics,
    step_totals,
)
from skyrl_train.trainers.steps import PromptBatches
from skyrl_train.trainers.stop import StopFlag, stop_on_signals
from skyrl_train.types import RolloutBatch

if TYPE_CHECKING:
    from skyrl_train.batch.plan import BatchPlan

__all__ = ["PPOTrainer", "PromptBatches", "RolloutSink", "TrainingResult"]


class RolloutSink(Protocol):
    """Where rollouts are kept."""

    def write(self, rollouts: RolloutBatch, batch: TrainingInputBatch, *, step: int) -> None:
        """May return before they are on disk."""
        ...

    def flush(self) -> None:
        """Returns when all of them are on disk; raises what went wrong."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a run that reached its last step leaves to its caller."""

    global_step: int
    evaluations: tuple[EvaluationResult, ...]
    """All that were made, resumed parts included."""


class PPOTrainer:
    """Runs the loop from `start` to the last step of the plan. It constructs nothing and closes nothing it is given."""

    def __init__(
        self,
        *,
        config: Config,
        plan: BatchPlan,
        prompts: PromptBatches,
        data: DataFingerprint,
        generator: Generator,
        learners: steps.Learners,
        transport: WeightTransport,
        evaluator: Evaluator | None,
        checkpoints: CheckpointStore,
        trackers: Tracker,
        rollout_log: RolloutSink | None,
        folder: RunFolder,
        console: RunConsole,
        start: Start = FRESH,
        observers: Observers | None = None,
    ) -> None:
        """`folder` is prepared for `start` (see `resume.prepare_run_folder`). `evaluator` and `rollout_log` are None
        where evaluation and rollout dumps are off."""
        self.observers = observers or Observers((), (), console)
        self.config, self.plan, self.data, self.start = config, plan, data, start
        self.prompts, self.generator, self.learners = prompts, generator, learners
        self.transport, self.evaluator, self.checkpoints = transport, evaluator, checkpoints
        self.trackers, self.rollout_log, self.folder, self.console = trackers, rollout_log, folder, console
        self.timer = StepTimer()
        self.totals = start.totals
        self.data_position = start.data_position
        self.entropy = start.state.entropy_controller if start.state else None
        self.kl = start.state.kl_controller if start.state else initial_state(config.trainer.algorithm)
        self._last_checkpoint = start.checkpoint

    def train(self) -> TrainingResult:
        """All remaining steps, then the export and the table of evaluations.

        Raises:
            StopRequested: A signal came; the checkpoint of the last finished step is written.
            NonFiniteError: A loss or gradient is not finite; checkpoints are as they were.
        """
        config, learners = self.config, self.learners
        with stop_on_signals() as stop, naming_last_checkpoint(lambda: self._last_checkpoint):
            self._begin(stop)
            for step in range(self.start.global_step + 1, self.plan.total_steps + 1):
                with self._phase("generate"):
                    generated = steps.generate(
                        self.generator, self.prompts, config, step=step, position=self.data_position
                    )
                with self._phase("assemble"):
                    batch = steps.assemble(generated.rollouts, config, step=step, weight_version=step - 1)
                with self._phase("score"):
                    batch = steps.score(batch, learners, config, rollouts=generated.rollouts)
                with self._phase("estimate"):
                    batch = steps.estimate(batch, config, kl_coef=self.kl.coef)
                with self._phase("log"):
                    self._keep(generated.rollouts, batch, step)
                with self._phase("update"):
                    update = steps.update(
                        batch, learners, config, on_progress=self.console.on_progress, entropy=self.entropy
                    )
                    self.entropy = update.entropy
                with self._phase("sync"):
                    steps.sync(learners.policy, self.transport, version=step)
                    self._move_reference(step)
                self._finish_step(step, generated, batch, update, stop)
            return self._finish()

    def _begin(self, stop: StopFlag) -> None:
        """Weights of the checkpoint, the first sync, and the evaluation that curves start from."""
        if self.start.checkpoint is not None:
            with self._phase("load"):
                self._load(self.start.checkpoint)
        step = self.start.global_step
        with self._phase("sync"):
            steps.sync(self.learners.policy, self.transport, version=step)
        if self.start.is_first and self.config.trainer.eval_before_train:
            metrics = self._evaluate(step)
            if metrics:
                self._flush_rollouts()
                self.trackers.log({**metrics, **self.timer.finish_step()}, step=step)
        self._tell("start", step, path=self.folder.root)
        if stop.is_set:
            self._save(step)
            stop.raise_if_set(step)

    def _finish_step(
        self, step: int, generated: steps.Generated, batch: TrainingInputBatch, update: steps.Update, stop: StopFlag
    ) -> None:
        """Makes the step count: evaluation, record, checkpoint, stop."""
        self.data_position += generated.num_prompt_batches
        consumed = step_totals(generated.everything, batch, optimizer_steps=update.num_optimizer_steps)
        self.totals = self.totals.plus(consumed)
        last = step == self.plan.total_steps
        evaluation = self._evaluate(step) if last or is_due(step, self.config.trainer.eval_interval) else {}
        with self._phase("log"):
            metrics = {
                **rollout_metrics(generated.everything),
                **generated.metrics,
                **batch_metrics(batch, self.config.trainer.algorithm),
                **document_metrics(batch, self.config.trainer.docs_per_step),
                **to_values(update.metrics),
                **evaluation,
                **self.totals.metrics(),
            }
            self._control_kl(metrics, len(generated.rollouts.trajectories))
            facts = StepFacts(step=step, rollouts=generated.everything, batch=batch)
            metrics = self.observers.measure(facts, metrics)
        self._flush_rollouts()
        timings = self.timer.finish_step()
        with self._phase("record"):
            self.trackers.log({**metrics, **timings, **speed_metrics(timings, batch)}, step=step)
            if evaluation and not last:
                self._draw()
        self._tell("step", step, metrics)
        stopping = stop.is_set
        if last or stopping or is_due(step, self.config.trainer.ckpt_interval):
            self._save(step)
        if stopping:
            stop.raise_if_set(step)

    def _move_reference(self, step: int) -> None:
        """Every `ref_update_interval` steps the reference becomes the policy as it is now."""
        if self.learners.reference is not None and is_due(step, self.config.trainer.algorithm.ref_update_interval):
            self.learners.reference.load_weights(self.learners.policy.weights())

    def _control_kl(self, metrics: dict[str, float], num_trajectories: int) -> None:
        """The weight of the KL in the rewards of the next step."""
        algorithm = self.config.trainer.algorithm
        if algorithm.kl_reward_coef > 0 and "kl/reference" in metrics:
            metrics["kl/reward_coef"] = self.kl.coef
            self.kl = next_state(
                self.kl, mean_kl=metrics["kl/reference"], num_trajectories=num_trajectories, config=algorithm
            )

    def _finish(self) -> TrainingResult:
        """What a run leaves behind at its end: the export, the curve, the table, and the mark that it is complete."""
        global_step = max(self.start.global_step, self.plan.total_steps)
        if self.config.trainer.export_hf:
            export_whole(self.learners.policy, self.folder.export)
        self._draw()
        evaluations = read_evaluations(self.folder.evaluation_file)
        if evaluations:
            self.console.show(evaluation_table(evaluations[0], evaluations[-1]))
        mark_complete(self.folder, global_step)
        self._tell("end", global_step, path=self.folder.root)
        return TrainingResult(global_step=global_step, evaluations=tuple(evaluations))

    def _evaluate(self, step: int) -> dict[str, float]:
        """Metrics of an evaluation; none where there is no evaluator."""
        if self.evaluator is None:
            return {}
        with self._phase("evaluate"):
            result = self.evaluator.evaluate(step)
            write_evaluation(self.folder.evaluation_file, result)
        self.console.note(evaluation_line(result))
        self._tell("evaluation", step, result.metrics())
        return result.metrics()

    def _keep(self, rollouts: RolloutBatch, batch: TrainingInputBatch, step: int) -> None:
        if self.rollout_log is not None:
            self.rollout_log.write(rollouts, batch, step=step)

    def _flush_rollouts(self) -> None:
        if self.rollout_log is not None:
            with self._phase("log"):
                self.rollout_log.flush()

    def _save(self, step: int) -> None:
        """A checkpoint: each model that learns, and the state of the loop."""
        with self._phase("checkpoint"):
            state = TrainerState(
                global_step=step,
                data_position=self.data_position,
                weight_version=step,
                kl_controller=self.kl,
                entropy_controller=self.entropy or EntropyControllerState(),
                totals=self.totals,
                config=flat_config(self.config),
                data=self.data,
                versions=library_versions(),
            )

            def write(folder: Path) -> None:
                for name, learner in self._changing_models():
                    learner.save(folder / name)
                state.write(folder)

            self._last_checkpoint = self.checkpoints.write(step, write)
        self._tell("checkpoint", step, path=self._last_checkpoint)

    def _load(self, checkpoint: Path) -> None:
        for name, learner in self._changing_models():
            if name not in self.start.models_anew:
                learner.load(checkpoint / name)

    def _changing_models(self) -> Iterator[tuple[str, Learner]]:
        """Those that a checkpoint holds: a reference that stays what it was at the start is not among them. One that moved
        before the run was forked is, though it moves no more."""
        yield "policy", self.learners.policy
        if self.learners.critic is not None:
            yield "critic", self.learners.critic
        moves = self.config.trainer.algorithm.ref_update_interval > 0
        if self.learners.reference is not None and (moves or self.start.holds_reference):
            yield "reference", self.learners.reference

    def _tell(
        self, kind: EventKind, step: int, metrics: Mapping[str, float] = NO_METRICS, path: Path | None = None
    ) -> None:
        total = self.plan.total_steps
        self.observers.tell(RunEvent(kind=kind, step=step, total_steps=total, metrics=metrics, path=path))

    def _draw(self) -> None:
        draw_or_warn(draw_learning_curve, self.folder, self.console, title=self.config.run_name)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self.timer.phase(name), self.console.phase(name):
            yield
