"""Writes each step's rollouts beside the training: JSON of millions of tokens takes seconds; no one should wait."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.telemetry.rollout_log import TurnAdvantages, write_rollouts
from skyrl_train.types import RolloutBatch, Trajectory


class RolloutWriter:
    """One thread, at most one step in flight. Implements the trainer's `RolloutSink`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-writer")
        self._pending: Future[Path] | None = None

    def write(self, rollouts: RolloutBatch, batch: TrainingInputBatch, *, step: int) -> None:
        """Starts to write `rollouts/train_step_NNNNNN.jsonl`; first waits for the step before, and raises what
        went wrong with it."""
        self.flush()
        self._pending = self._thread.submit(self._write, rollouts, batch, step)

    def flush(self) -> None:
        """Returns when all is on disk; raises what went wrong (a full disk, say)."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Ends the thread, after what is in flight."""
        self._thread.shutdown(wait=True)

    def _write(self, rollouts: RolloutBatch, batch: TrainingInputBatch, step: int) -> Path:
        advantages = turn_advantages(rollouts, batch) if "advantages" in batch else None
        return write_rollouts(
            self._folder, rollouts, purpose="train", global_step=step, advantages=advantages
        )


def turn_advantages(rollouts: RolloutBatch, batch: TrainingInputBatch) -> list[TurnAdvantages | None]:
    """Per trajectory, the advantages of each turn's response tokens; None for a failed trajectory.

    A turn's response starts, in the row that holds it, after the turn's prompt: rows of one turn and rows of a whole
    trajectory both begin with it.
    """
    rows_of: dict[int, list[tuple[int, int]]] = {}
    columns = (batch[name].tolist() for name in ("trajectory_index", "step_index", "is_padding"))
    for row, (trajectory, step, is_padding) in enumerate(zip(*columns)):
        if not is_padding:
            rows_of.setdefault(trajectory, []).append((step, row))
    values = batch["advantages"].to(torch.float32)
    offsets = batch.row_offsets.tolist()

    def of(trajectory: Trajectory, rows: list[tuple[int, int]]) -> TurnAdvantages:
        turns = []
        for index, turn in enumerate(trajectory.turns):
            row = next((row for step, row in sorted(rows, reverse=True) if step <= index), min(rows)[1])
            start = offsets[row] + len(turn.prompt_token_ids)
            turns.append(values[start : start + len(turn.response_token_ids)].tolist())
        return turns

    return [
        of(trajectory, rows_of[index]) if index in rows_of else None
        for index, trajectory in enumerate(rollouts.trajectories)
    ]


def cut_rollouts_after(folder: Path, step: int) -> None:
    """Deletes training rollouts of later steps: a resumed run writes the same ones again."""
    for path in folder.glob("train_step_*.jsonl"):
        digits = path.stem.removeprefix("train_step_")
        if digits.isdigit() and int(digits) > step:
            path.unlink()
