"""The training loop of supervised fine-tuning.

    collate -> update -> finish

`collate` fetches a batch that was made while the last one trained; `update` is one optimizer step; `finish` makes the
step count, as in `ppo.py`: evaluate where it is due, write the record, keep the best, save a checkpoint, and stop where
a signal, or the lack of progress, asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from skyrl_train.algorithms.kl_controller import KLControllerState
from skyrl_train.config.sft import SFTConfig
from skyrl_train.data.feed import SFTBatch
from skyrl_train.errors import NonFiniteError
from skyrl_train.interfaces import CheckpointStore, Learner, Tracker
from skyrl_train.telemetry.console import RunConsole
from skyrl_train.telemetry.loss_curve import draw_loss_curve
from skyrl_train.telemetry.metrics import StepMetrics, merge_metrics, to_values
from skyrl_train.telemetry.metrics_log import read_metrics
from skyrl_train.telemetry.pictures import draw_or_warn
from skyrl_train.telemetry.run_folder import RunFolder
from skyrl_train.telemetry.timing import StepTimer
from skyrl_train.trainers.loop_parts import export_whole, is_due, naming_last_checkpoint
from skyrl_train.trainers.resume import FRESH, Start, mark_complete
from skyrl_train.trainers.sft_evaluate import LOSS, LossHistory, SFTEvaluator, evaluation_line, evaluation_table
from skyrl_train.trainers.sft_samples import SampleWriter
from skyrl_train.trainers.state import DataFingerprint, Totals, TrainerState, flat_config, library_versions
from skyrl_train.trainers.stop import StopFlag, stop_on_signals

TRAIN_LOSS = "train/loss"
"""Mean negative log-probability of the step's trained tokens, before the update."""


class Feed(Protocol):
    """Batches in order; `data/feed.py: BatchFeed`."""

    def seek(self, position: int) -> None:
        """Where the next batch begins."""
        ...

    def get(self, step: int) -> SFTBatch: ...

    def prefetch(self, step: int) -> None:
        """May start to make the batch of `step`."""
        ...


@dataclass(frozen=True, kw_only=True)
class SFTResult:
    """What a run that came to its end leaves to its caller."""

    global_step: int
    stopped_early: bool
    history: LossHistory


class SFTTrainer:
    """Runs the loop from `start` to the last step. It constructs nothing and closes nothing it is given."""

    def __init__(
        self,
        *,
        config: SFTConfig,
        total_steps: int,
        feed: Feed,
        data: DataFingerprint,
        policy: Learner,
        evaluator: SFTEvaluator | None,
        samples: SampleWriter | None,
        checkpoints: CheckpointStore,
        best: CheckpointStore | None,
        trackers: Tracker,
        folder: RunFolder,
        console: RunConsole,
        start: Start = FRESH,
    ) -> None:
        """`folder` is prepared for `start`. `best` keeps the checkpoint with the lowest held-out loss, or is None."""
        self.config, self.total_steps, self.feed, self.data = config, total_steps, feed, data
        self.policy, self.evaluator, self.samples = policy, evaluator, samples
        self.checkpoints, self.best, self.trackers = checkpoints, best, trackers
        self.folder, self.console, self.start = folder, console, start
        self.timer = StepTimer()
        self.totals = start.totals
        self.data_position = start.data_position
        self.history = LossHistory()
        self._last_checkpoint = start.checkpoint

    def train(self) -> SFTResult:
        """All remaining steps, or fewer where the held-out loss no longer falls; then the export.

        Raises:
            StopRequested: A signal came; the checkpoint of the last finished step is written.
            NonFiniteError: A loss or gradient is not finite; checkpoints are as they were.
        """
        with stop_on_signals() as stop, naming_last_checkpoint(lambda: self._last_checkpoint):
            self._begin(stop)
            step = self.start.global_step
            while step < self.total_steps and not self._has_stalled():
                step += 1
                with self._phase("collate"):
                    batch = self.feed.get(step)
                    if step < self.total_steps:
                        self.feed.prefetch(step + 1)
                with self._phase("update"):
                    metrics = update(self.policy, batch)
                self._finish_step(step, batch, metrics, stop)
            return self._finish(step)

    def _begin(self, stop: StopFlag) -> None:
        """Weights and data position of the checkpoint, and the evaluation that curves start from."""
        if self.start.checkpoint is not None:
            with self._phase("load"):
                self.policy.load(self.start.checkpoint / "policy")
        self.feed.seek(self.data_position)
        self.history = LossHistory.of(read_metrics(self.folder.metrics_file))
        step = self.start.global_step
        if self.start.is_first and self.config.trainer.eval_before_train:
            metrics = self._evaluate(step)
            if metrics:
                self.trackers.log({**metrics, **self.timer.finish_step()}, step=step)
        if stop.is_set:
            self._save(step)
            stop.raise_if_set(step)

    def _finish_step(self, step: int, batch: SFTBatch, metrics: dict[str, float], stop: StopFlag) -> None:
        """Makes the step count: evaluation, record, best, checkpoint, stop."""
        trainer, last = self.config.trainer, step == self.total_steps
        self.data_position = batch.position
        self.totals = self.totals.plus(_consumed(batch))
        evaluation = self._evaluate(step) if last or is_due(step, trainer.eval_interval) else {}
        if evaluation:
            self.history = self.history.plus(step, evaluation[LOSS])
        timings = self.timer.finish_step()
        with self._phase("record"):
            record = {**metrics, **batch_metrics(batch), **evaluation, **_total_metrics(self.totals), **timings}
            self.trackers.log({**record, **_speed(batch, timings)}, step=step)
            if evaluation and not last:
                self._draw()
        if evaluation and self.best is not None and self.history.best_step == step:
            self._write(self.best, step)
        stopping = stop.is_set
        if last or stopping or self._has_stalled() or is_due(step, trainer.ckpt_interval):
            self._save(step)
        if stopping:
            stop.raise_if_set(step)

    def _finish(self, step: int) -> SFTResult:
        """What a run leaves behind at its end."""
        stopped_early = step < self.total_steps
        if stopped_early:
            self.console.note(
                f"stopped after step {step} of {self.total_steps}: the last {self.config.trainer.early_stopping_patience} "
                "evaluations brought no lower loss"
            )
        self._export()
        self._draw()
        table = evaluation_table(read_metrics(self.folder.metrics_file))
        if table is not None:
            self.console.show(table)
        mark_complete(self.folder, step)
        return SFTResult(global_step=step, stopped_early=stopped_early, history=self.history)

    def _has_stalled(self) -> bool:
        trainer = self.config.trainer
        return self.history.should_stop(
            patience=trainer.early_stopping_patience, min_delta=trainer.early_stopping_min_delta
        )

    def _evaluate(self, step: int) -> dict[str, float]:
        """Metrics of an evaluation; none where there is no evaluator."""
        if self.evaluator is None:
            return {}
        with self._phase("evaluate"):
            metrics = self.evaluator.evaluate(self.policy, step=step, on_progress=self.console.on_progress)
        self.console.note(evaluation_line(metrics, step=step))
        if self.samples is not None:
            with self._phase("sample"):
                first = self.samples.write(self.policy, step=step)[0]
            self.console.note(f"  {first.example}: {first.answer!r}")
        return metrics

    def _save(self, step: int) -> None:
        self._last_checkpoint = self._write(self.checkpoints, step)

    def _write(self, store: CheckpointStore, step: int) -> Path:
        """The model, and the state of the loop."""
        with self._phase("checkpoint"):
            state = TrainerState(
                global_step=step,
                data_position=self.data_position,
                weight_version=step,
                kl_controller=KLControllerState(coef=0.0),
                totals=self.totals,
                config=flat_config(self.config),
                data=self.data,
                versions=library_versions(),
            )

            def write(folder: Path) -> None:
                self.policy.save(folder / "policy")
                state.write(folder)

            return store.write(step, write)

    def _export(self) -> None:
        """The last weights, or the best."""
        export = self.config.trainer.export
        if export == "none":
            return
        if export == "best" and self.best is not None:
            checkpoint = self.best.latest()
            if checkpoint is None:
                self.console.warn("there is no best checkpoint, so the last weights are exported")
            else:
                self.policy.load(checkpoint / "policy")
                self.console.note(f"exporting the weights of {checkpoint}")
        export_whole(self.policy, self.folder.export)

    def _draw(self) -> None:
        draw_or_warn(draw_loss_curve, self.folder, self.console, title=self.config.run_name)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self.timer.phase(name), self.console.phase(name):
            yield


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


def _consumed(batch: SFTBatch) -> Totals:
    return Totals(
        prompts=batch.num_examples, trajectories=batch.num_examples, tokens=batch.num_tokens, optimizer_steps=1
    )


def _total_metrics(totals: Totals) -> dict[str, float]:
    return {
        "total/examples": float(totals.prompts),
        "total/tokens": float(totals.tokens),
        "total/optimizer_steps": float(totals.optimizer_steps),
    }


def _speed(batch: SFTBatch, timings: Mapping[str, float]) -> dict[str, float]:
    """Of the examples' tokens, over the two phases that every step has."""
    seconds = timings.get("timing/collate", 0.0) + timings.get("timing/update", 0.0)
    return {"timing/tokens_per_s": batch.num_tokens / seconds} if seconds > 0 else {}
