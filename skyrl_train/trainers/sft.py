"""The training loop of supervised fine-tuning.

    collate -> update -> finish

`collate` waits for the batch that a worker thread made while the step before trained, and starts the next one; `update`
is one optimizer step. `finish` makes the step count (`loop.py`) and keeps the best checkpoint. The loop ends at its last
step, at a signal, or where the held-out loss no longer falls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from skyrl_train.config import SFTTrainerConfig
from skyrl_train.data import BatchLoader, SFTBatch
from skyrl_train.errors import NonFiniteError, counted
from skyrl_train.interfaces import Learner
from skyrl_train.telemetry import StepMetrics, merge_metrics, read_metrics, to_values
from skyrl_train.trainers.capsules.writer import CapsuleWriter
from skyrl_train.trainers.checkpoints.state import LoopState, Totals
from skyrl_train.trainers.checkpoints.store import CheckpointStore
from skyrl_train.trainers.checkpoints.writer import export_whole
from skyrl_train.trainers.evaluation.sft_evaluate import (
    LOSS,
    TRAIN_LOSS,
    LossHistory,
    SampleWriter,
    SFTEvaluator,
    evaluation_line,
    evaluation_table,
)
from skyrl_train.trainers.loop import TrainingLoop
from skyrl_train.trainers.observers import StepFacts, StepInputs

DECLARED_METRICS = """
train/loss | nats | Mean cross-entropy of a trained token. | supervised training | TRL `loss`
batch/examples | count | Examples. | supervised training
"""


@dataclass(frozen=True, kw_only=True)
class SFTResult:
    """What a run that came to its end leaves to its caller."""

    global_step: int
    stopped_early: bool
    history: LossHistory


class SFTTrainer:
    """The verbs of supervised training. It constructs nothing and closes nothing it is given."""

    def __init__(
        self,
        *,
        loop: TrainingLoop,
        settings: SFTTrainerConfig,
        loader: BatchLoader,
        policy: Learner,
        evaluator: SFTEvaluator | None,
        samples: SampleWriter | None,
        best: CheckpointStore | None,
        capsules: CapsuleWriter,
    ) -> None:
        """`best` keeps the checkpoint with the lowest held-out loss, or is None."""
        self.loop, self.settings, self.loader, self.policy = loop, settings, loader, policy
        self.evaluator, self.samples, self.best, self.capsules = evaluator, samples, best, capsules
        self.state: LoopState = loop.start.state or LoopState.first(None)
        self.history = LossHistory()

    def train(self) -> SFTResult:
        """Train for all remaining steps, or fewer if the held-out loss no longer falls; then write the export.

        Raises:
            StopRequested: A signal came; the checkpoint of the last finished step is written.
            NonFiniteError: A loss or gradient is not finite; checkpoints are as they were.
        """
        loop, step = self.loop, self.loop.start.global_step
        with loop.running():
            self._begin()
            while step < loop.total_steps and not self._has_stalled():
                step += 1
                with loop.phase("collate"):
                    batch = self.loader.get(step)
                    if not loop.is_last(step):
                        self.loader.prefetch(step + 1)
                known = StepInputs(batch=batch.mini_batch)
                with self.capsules.failures_kept(step, self.state, known), loop.phase("update"):
                    metrics = update(self.policy, batch)
                self._finish_step(step, batch, metrics)
            return self._finish(step)

    def _begin(self) -> None:
        """Loads the checkpoint's weights and goes to its place in the data; the held-out losses are those on record."""
        self.loop.load()
        self.loader.seek(self.state.data_position)
        self.history = LossHistory.of(read_metrics(self.loop.folder.metrics_file))
        if self.capsules.keep:
            with self.loop.phase("capsule"):
                self.capsules.write_state(self.loop.start.global_step, self.state)
        self.loop.begin(self.state, self._evaluate)

    def _finish_step(self, step: int, batch: SFTBatch, metrics: dict[str, float]) -> None:
        """Makes the step count: evaluation, record, best, checkpoint, stop."""
        count, tokens = batch.num_examples, batch.num_tokens
        totals = self.state.totals.plus(Totals(prompts=count, trajectories=count, tokens=tokens, optimizer_steps=1))
        self.state = replace(self.state, data_position=batch.position, totals=totals)
        evaluation = self.loop.evaluate_where_due(step, self._evaluate)
        if evaluation:
            self.history = self.history.plus(step, evaluation[LOSS])
        measured = {
            **metrics,
            **batch_metrics(batch),
            **evaluation,
            "total/examples": float(totals.prompts),
            "total/tokens": float(totals.tokens),
            "total/optimizer_steps": float(totals.optimizer_steps),
        }
        measured = self.loop.observers.measure(StepFacts(step=step, batch=batch.mini_batch.batch), measured)
        self.loop.record(step, measured, speed=partial(_speed, batch), is_evaluated=bool(evaluation))
        if self.capsules.keep:
            with self.loop.phase("capsule"), self.loop.saves.attempt():
                self.capsules.write(step, self.state, batch.mini_batch, measured)
        best = self.best if evaluation and self.history.best_step == step else None
        self.loop.conclude(step, self.state, ends=self._has_stalled(), best=best)

    def _finish(self, step: int) -> SFTResult:
        """What a run leaves behind at its end."""
        loop, total_steps = self.loop, self.loop.total_steps
        stopped_early = step < total_steps
        if stopped_early:
            loop.console.note(
                f"stopped after step {step} of {total_steps}: no lower loss in the last "
                f"{counted(self.settings.early_stopping_patience, 'evaluation')}"
            )
        self._export()
        loop.draw()
        table = evaluation_table(read_metrics(loop.folder.metrics_file))
        if table is not None:
            loop.console.show(table)
        loop.complete(step)
        return SFTResult(global_step=step, stopped_early=stopped_early, history=self.history)

    def _has_stalled(self) -> bool:
        return self.history.should_stop(
            patience=self.settings.early_stopping_patience, min_delta=self.settings.early_stopping_min_delta
        )

    def _evaluate(self, step: int) -> dict[str, float]:
        """Metrics of an evaluation; none where there is no evaluator."""
        if self.evaluator is None:
            return {}
        console = self.loop.console
        with self.loop.phase("evaluate"):
            metrics = self.evaluator.evaluate(self.policy, step=step, on_progress=console.on_progress)
        console.note(evaluation_line(metrics, step=step))
        if self.samples is not None:
            with self.loop.phase("sample"):
                first = self.samples.write(self.policy, step=step)[0]
            console.note(f"  {first.example}: {first.answer!r}")
        return metrics

    def _export(self) -> None:
        """Write the last weights, or the best."""
        if self.settings.export == "none":
            return
        if self.settings.export == "best" and self.best is not None:
            checkpoint = self.best.latest()
            if checkpoint is None:
                self.loop.console.warn("there is no best checkpoint, so the last weights are exported")
            else:
                self.policy.load(checkpoint / "policy")
                self.loop.console.note(f"exporting the weights of {checkpoint}")
        with self.loop.console.phase("export"):
            export_whole(self.policy, self.loop.folder.export)


def update(policy: Learner, batch: SFTBatch) -> dict[str, float]:
    """One optimizer step. Raises NonFiniteError, naming the training step."""
    try:
        metrics = merge_metrics([policy.forward_backward(batch.mini_batch), policy.optim_step()])
    except NonFiniteError as error:
        raise NonFiniteError(f"training step {batch.step} was refused: {error}") from error
    return named_metrics(metrics)


def named_metrics(metrics: StepMetrics) -> dict[str, float]:
    """The learner's metrics; its loss, which is the cross-entropy and nothing else, as `train/loss`."""
    values = to_values(metrics)
    kept = {name: value for name, value in values.items() if not name.startswith("loss/")}
    return {TRAIN_LOSS: values["loss/total"], **kept}


def batch_metrics(batch: SFTBatch) -> dict[str, float]:
    """What the step consisted of."""
    mini_batch = batch.mini_batch
    return {
        "batch/examples": float(batch.num_examples),
        "batch/tokens": float(batch.num_tokens),
        "batch/trained_tokens": float(mini_batch.denominators.num_tokens),
        "batch/rows": float(mini_batch.batch.num_rows),
    }


def _speed(batch: SFTBatch, timings: Mapping[str, float]) -> dict[str, float]:
    """Return tokens of examples per second, over the two phases that every step has."""
    seconds = timings.get("timing/collate", 0.0) + timings.get("timing/update", 0.0)
    return {"timing/tokens_per_s": batch.num_tokens / seconds} if seconds > 0 else {}
