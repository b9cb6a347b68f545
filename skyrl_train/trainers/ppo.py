"""The training loop of PPO and GRPO.

    generate -> assemble -> score -> estimate -> update -> sync -> finish

Each verb but the last is one function in `steps.py`; `finish` makes the step count (`loop.py`). What each verb waits
for, and what it unblocks:

    verb      waits for                                           unblocks
    --------  --------------------------------------------------  -----------------------------------------------------
    generate  the engine at weight version `step - 1`, which      assemble, which needs every trajectory of the batch
              `sync` of the step before gave it                   (with dynamic sampling: enough prompts that differ)
    assemble  the rollouts                                        score; the rollout log, which writes on its own thread
    score     the models that are not updated now: policy as it   estimate
              is, reference, critic
    estimate  the columns of `score`, and the KL weight of the    update
              step before
    update    advantages; per optimizer step all micro-batches    sync: the weights of version `step`
    sync      the engine, idle since `generate` returned          generate of the next step; the evaluation of this one
    finish    the rollout log, which is flushed to disk           the checkpoint, which follows the record of its step

`generate` alone reads the engine, and it depends on nothing of its own step. With `trainer.max_staleness` above 0 a stream
takes its place (`rollout/stream/stream.py`), which makes rollouts while the other verbs run: `generate` then waits for
a batch whose oldest token is of version `step - 1 - max_staleness` at least, and `sync` lets further groups begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from skyrl_train.algorithms import KLControllerState, next_state
from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.plane import DataPlane
from skyrl_train.config import TrainerConfig
from skyrl_train.data import Curriculum
from skyrl_train.interfaces import Generator, ReportsMetrics, WeightTransport
from skyrl_train.rollout import ConsumedPrompts
from skyrl_train.rollout.stream import RolloutStream
from skyrl_train.telemetry import to_values
from skyrl_train.trainers import steps
from skyrl_train.trainers.capsules.writer import CapsuleWriter
from skyrl_train.trainers.checkpoints.state import LoopState
from skyrl_train.trainers.checkpoints.writer import export_whole
from skyrl_train.trainers.evaluation.evaluate import (
    EvaluationResult,
    Evaluator,
    evaluation_table,
    read_evaluations,
    write_evaluation,
)
from skyrl_train.trainers.loop import TrainingLoop, is_due
from skyrl_train.trainers.observers import StepFacts, StepInputs
from skyrl_train.trainers.rollout_sink import RolloutLog
from skyrl_train.trainers.step_metrics import (
    StepWarnings,
    batch_metrics,
    document_metrics,
    rollout_metrics,
    speed_metrics,
    step_totals,
)
from skyrl_train.types import RolloutBatch, SamplingParams

DECLARED_METRICS = """
kl/reward_coef | | Weight of the KL in rewards. | with `kl_reward_coef` | verl `actor/reward_kl_penalty_coeff`
"""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a run that reached its last step leaves to its caller."""

    global_step: int
    evaluations: tuple[EvaluationResult, ...]
    """All that were made, resumed parts included."""


class PPOTrainer:
    """The verbs of reinforcement learning, in order. It constructs nothing and closes nothing it is given."""

    def __init__(
        self,
        *,
        loop: TrainingLoop,
        trainer: TrainerConfig,
        assemble: steps.Assemble,
        n_samples_per_prompt: int,
        sampling: SamplingParams,
        seed: int,
        scores_entropies: bool,
        prompts: steps.PromptBatches,
        curriculum: Curriculum | None = None,
        generator: Generator,
        learners: steps.Learners,
        transport: WeightTransport,
        evaluator: Evaluator | None,
        rollout_log: RolloutLog | None,
        stream: RolloutStream | None = None,
        capsules: CapsuleWriter,
        plane: DataPlane | None = None,
    ) -> None:
        """`sampling` is how training rollouts are sampled; with `scores_entropies` they get entropies, which no loss reads;
        `evaluator` and `rollout_log` are None where evaluation and rollout dumps are off; a `curriculum` chooses prompts
        in place of `prompts`; a `stream`, which reads both itself, makes rollouts while the learner updates; `capsules`
        keep steps so that they can be executed again; `plane` has the arrays of training rows, if they are not here."""
        self.loop, self.trainer, self.prompts, self.generator = loop, trainer, prompts, generator
        self._assemble, self._seed, self._scores_entropies = assemble, seed, scores_entropies
        self._n_samples_per_prompt, self._sampling = n_samples_per_prompt, sampling
        self.curriculum, self.stream, self.capsules = curriculum, stream, capsules
        self.plane: DataPlane = plane or DataPlane()
        self.learners, self.transport, self.evaluator, self.rollout_log = learners, transport, evaluator, rollout_log
        self.state: LoopState = loop.start.state or LoopState.first(trainer.algorithm)
        self._warnings = StepWarnings(trainer.algorithm, is_recorded=generator.is_recorded)

    def train(self) -> TrainingResult:
        """Train for all remaining steps, then write the export and show the table of evaluations.

        Raises:
            StopRequested: A signal came; the checkpoint of the last finished step is written.
            NonFiniteError: A loss or gradient is not finite; checkpoints are as they were.
        """
        loop, trainer, learners = self.loop, self.trainer, self.learners
        with loop.running():
            self._begin()
            for step in loop.steps():
                with self._failures_kept(step) as known:
                    with loop.phase("generate", can_give_up=True):
                        generated = self._generate(step)
                    known.rollouts = generated.rollouts
                    with loop.phase("assemble"):
                        batch = known.batch = self.plane.make_rows(
                            self._assemble, generated.rollouts, step=step, weight_version=step - 1
                        )
                    with loop.phase("score"):
                        batch = known.batch = steps.score(
                            batch,
                            learners,
                            trainer,
                            rollouts=generated.rollouts,
                            with_entropies=self._scores_entropies,
                        )
                    with loop.phase("estimate"):
                        batch = known.batch = self.plane.add_columns(
                            steps.estimate,
                            batch,
                            trainer.algorithm,
                            kl_coef=self.state.kl_controller.coef,
                            seed=self._seed,
                        )
                    with loop.phase("log"):
                        if self.rollout_log is not None:
                            self.rollout_log.write(generated.rollouts, batch, step=step)
                        batch = known.batch = batch.without_columns("entropies")  # nothing else reads them
                    with loop.phase("update"):
                        update = steps.update(
                            batch,
                            learners,
                            trainer,
                            on_progress=loop.console.on_progress,
                            entropy=self.state.entropy_controller,
                            plane=self.plane,
                        )
                    with loop.phase("sync"):
                        self._sync(step)
                        if self.stream is not None:
                            self.stream.publish(step)
                        self._move_reference(step)
                    self._finish_step(step, generated, batch, update)
            return self._finish()

    def _begin(self) -> None:
        """Loads the checkpoint's weights and gives them to the engine, which the first evaluation asks."""
        self.loop.load()
        version = self.loop.start.global_step
        with self.loop.phase("sync"):
            self._sync(version)
        if self.stream is not None:
            first = self.state.data_position * self.trainer.train_batch_size
            self.stream.learn(self.state.solve_rates)
            self.stream.begin(version=version, settled=self.state.settled or ConsumedPrompts(watermark=first))
        if self.capsules.keep:
            with self.loop.phase("capsule"):
                self.capsules.write_state(version, self.state)
        self.loop.begin(self.state, self._evaluate)

    def _sync(self, version: int) -> None:
        """Gives the engine the policy's weights, for which it is kept from answering."""
        with self.loop.timer.wait("sync"):
            steps.sync(self.learners.policy, self.transport, version=version)

    def _generate(self, step: int) -> steps.Generated:
        """The rollouts to train on: made now, or taken from the stream."""
        position = self.state.data_position
        if self.stream is not None:
            return steps.take(self.stream, self.trainer, position=position, hold=self.plane.hold)
        return steps.generate(
            self.generator,
            self._prompts_of(step),
            self.trainer,
            n_samples_per_prompt=self._n_samples_per_prompt,
            sampling=self._sampling,
            step=step,
            position=position,
            hold=self.plane.hold,
        )

    def _finish_step(
        self, step: int, generated: steps.Generated, batch: TrainingInputBatch, update: steps.Update
    ) -> None:
        """Makes the step count: evaluation, record, checkpoint, stop."""
        consumed = step_totals(generated.everything, batch, optimizer_steps=update.num_optimizer_steps)
        totals = self.state.totals.plus(consumed)
        evaluation = self.loop.evaluate_where_due(step, self._evaluate)
        with self.loop.phase("log"):
            metrics = {
                **rollout_metrics(generated.everything),
                **generated.metrics,
                **self._learn_solve_rates(step, generated.everything),
                **(self.generator.take_metrics() if isinstance(self.generator, ReportsMetrics) else {}),
                **self.plane.ask(batch_metrics, batch, self.trainer.algorithm),
                **self.plane.take_metrics(),
                **document_metrics(batch, self.trainer.docs_per_step),
                **to_values(update.metrics),
                **evaluation,
                **totals.metrics(),
            }
            controlled, kl = self._control_kl(metrics, len(generated.rollouts.trajectories))
            self.state = replace(
                self.state,
                data_position=self.state.data_position + generated.num_prompt_batches,
                totals=totals,
                kl_controller=kl,
                entropy_controller=update.entropy,
                settled=generated.settled,
            )
            facts = StepFacts(step=step, rollouts=generated.everything, batch=batch)
            metrics = self.loop.observers.measure(facts, {**metrics, **controlled})
        for warning in self._warnings.of(step, metrics, generated.rollouts):
            self.loop.console.warn(warning)
        self._flush_rollouts()
        self.loop.record(
            step, metrics, speed=lambda timings: speed_metrics(timings, batch), is_evaluated=bool(evaluation)
        )
        if self.capsules.keep:
            with self.loop.phase("capsule"), self.loop.saves.attempt():
                self.capsules.write(step, self.state, batch, metrics)
        self.loop.conclude(step, self.state)

    def _prompts_of(self, step: int) -> steps.PromptBatches:
        """What gives `step` its prompts: those of its position, or those that the curriculum takes by now."""
        curriculum, rates = self.curriculum, self.state.solve_rates
        return self.prompts if curriculum is None else lambda position: curriculum.batch(rates, position, step)

    def _learn_solve_rates(self, step: int, everything: RolloutBatch) -> dict[str, float]:
        """Carries on the curriculum's estimates; its metrics."""
        if self.curriculum is None:
            return {}
        rates = self.state.solve_rates
        self.state = replace(self.state, solve_rates=self.curriculum.after(rates, everything, step))
        if self.stream is not None:
            self.stream.learn(self.state.solve_rates)
        return self.curriculum.metrics(rates, everything.prompts, step)

    def _move_reference(self, step: int) -> None:
        """Every `ref_update_interval` steps the reference becomes the policy as it is now."""
        if self.learners.reference is not None and is_due(step, self.trainer.algorithm.ref_update_interval):
            self.learners.reference.load_weights(self.learners.policy.weights())

    def _control_kl(
        self, metrics: Mapping[str, float], num_trajectories: int
    ) -> tuple[dict[str, float], KLControllerState]:
        """The weight of the KL in this step's rewards, as a metric, and the weight of the next step's."""
        algorithm, state = self.trainer.algorithm, self.state.kl_controller
        if algorithm.kl_reward_coef <= 0 or "kl/reference" not in metrics:
            return {}, state
        mean_kl = metrics["kl/reference"]
        moved = next_state(state, mean_kl=mean_kl, num_trajectories=num_trajectories, config=algorithm)
        return {"kl/reward_coef": state.coef}, moved

    def _finish(self) -> TrainingResult:
        """What a run leaves behind at its end: the export, the curve, the table, and the mark that it is complete."""
        loop = self.loop
        global_step = max(loop.start.global_step, loop.total_steps)
        if self.trainer.export_hf:
            with loop.console.phase("export"):
                export_whole(self.learners.policy, loop.folder.export)
        loop.draw()
        if evaluations := read_evaluations(loop.folder.evaluation_file):
            loop.console.show(evaluation_table(*evaluations[:1], *evaluations[1:][-1:]))
        loop.complete(global_step)
        return TrainingResult(global_step=global_step, evaluations=tuple(evaluations))

    def _evaluate(self, step: int) -> dict[str, float]:
        """Metrics of an evaluation whose rollouts are on disk; none where there is no evaluator."""
        if self.evaluator is None:
            return {}
        with self.loop.phase("evaluate"):
            result = self.evaluator.evaluate(step)
            with self.loop.saves.attempt():
                write_evaluation(self.loop.folder.evaluation_file, result)
        self._flush_rollouts()
        self.loop.console.note(result.line())
        return result.metrics()

    @contextmanager
    def _failures_kept(self, step: int) -> Iterator[StepInputs]:
        """Wraps a step. Where it fails its rollouts stay, unless none are kept, and a capsule where numbers were refused."""
        known = StepInputs()
        kept = nullcontext() if self.rollout_log is None else self.rollout_log.failures_kept(step, known)
        with kept, self.capsules.failures_kept(step, self.state, known):
            yield known

    def _flush_rollouts(self) -> None:
        if self.rollout_log is not None:
            with self.loop.phase("log"), self.loop.saves.attempt():
                self.rollout_log.flush()
