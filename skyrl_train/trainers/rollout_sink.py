"""Keeps the rollouts of every step without keeping the step waiting: they are written on a thread of their own.

`write` returns at once; the trainer calls `flush` at the end of the step, before the step's record is written. A record
in `metrics.jsonl` therefore means that the rollouts of its step are on disk.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.errors import DeadlineError, SaveError, SkyrlTrainError, StopRequested
from skyrl_train.telemetry.redaction import redact_text
from skyrl_train.telemetry.rollout_log import write_failed_rollouts, write_rollouts
from skyrl_train.threads import WorkerThread
from skyrl_train.types import Prompt, RolloutBatch, Trajectory

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 1800.0
CLOSE_TIMEOUT_S = 30.0
_FILE = re.compile(r"\.?[a-z]+_step_(\d+)\.jsonl(?:\.tmp)?")


class RolloutLog:
    """Writes JSON lines under `folder`, one file a step and purpose, in the background."""

    def __init__(
        self, folder: Path, *, flush_timeout_s: float = FLUSH_TIMEOUT_S, close_timeout_s: float = CLOSE_TIMEOUT_S
    ) -> None:
        self._folder = folder
        self._flush_timeout_s, self._close_timeout_s = flush_timeout_s, close_timeout_s
        self._thread = WorkerThread("rollout-log")
        self._pending: list[Future[None]] = []

    def write(self, rollouts: RolloutBatch, batch: TrainingInputBatch, *, step: int) -> None:
        """Training rollouts with the advantages that `batch` holds for them."""
        self._pending.append(self._thread.submit(self._write_train, rollouts, batch, step))

    def write_evaluation(self, step: int, rollouts: RolloutBatch) -> None:
        """Rollouts of an evaluation after `step` steps."""
        self._pending.append(self._thread.submit(self._write, rollouts, "eval", step, None))

    def flush(self) -> None:
        """Waits until everything is on disk. Raises SaveError where writing failed, DeadlineError where it does
        not end."""
        pending, self._pending = self._pending, []
        for future in pending:
            try:
                future.result(timeout=self._flush_timeout_s)
            except FutureTimeoutError as error:
                raise DeadlineError(
                    f"writing rollouts to {self._folder}", self._flush_timeout_s, "Is the disk reachable?"
                ) from error
            except OSError as error:
                raise SaveError(
                    f"rollouts could not be written to {self._folder}: {error}. "
                    "Make room, or set trainer.dump_rollouts=false"
                ) from error

    @contextmanager
    def failures_kept(self, step: int) -> Iterator[list[RolloutBatch]]:
        """Wraps a step, which appends its rollouts to what it is given. Where it raises, they are written with the error,
        or those that were complete when generating ended by it."""
        seen: list[RolloutBatch] = []
        try:
            yield seen
        except StopRequested:
            raise
        except Exception as error:
            ended = error.trajectories if isinstance(error, SkyrlTrainError) else ()
            rollouts = ended or [pair for batch in seen for pair in _pairs(batch)]
            if rollouts:
                self._write_failed(step, rollouts, redact_text(f"{type(error).__name__}: {error}"))
            raise

    def _write_failed(self, step: int, rollouts: Sequence[tuple[Prompt, Trajectory]], error: str) -> None:
        """Within the time of closing, and without an error of its own: there is one already."""
        try:
            written = self._thread.submit(
                write_failed_rollouts, self._folder, rollouts, global_step=step, error=error
            ).result(self._close_timeout_s)
            logger.info("%d rollouts of step %d, which failed: %s", len(rollouts), step, written)
        except Exception as lost:  # of any kind: rollouts are what the environments of others made them
            logger.warning("rollouts of step %d, which failed, are not kept: %s: %s", step, type(lost).__name__, lost)

    def close(self) -> None:
        """Ends the thread; what is pending is still written, unless that takes longer than CLOSE_TIMEOUT_S. Raises
        DeadlineError then."""
        if not self._thread.close(self._close_timeout_s):
            raise DeadlineError(f"writing rollouts to {self._folder}", self._close_timeout_s, "Is the disk reachable?")

    def _write_train(self, rollouts: RolloutBatch, batch: TrainingInputBatch, step: int) -> None:
        self._write(rollouts, "train", step, advantages_by_turn(rollouts, batch))

    def _write(
        self, rollouts: RolloutBatch, purpose: str, step: int, advantages: list[list[list[float]] | None] | None
    ) -> None:
        write_rollouts(self._folder, rollouts, purpose=purpose, global_step=step, advantages=advantages)


def _pairs(rollouts: RolloutBatch) -> Iterator[tuple[Prompt, Trajectory]]:
    for index, trajectory in enumerate(rollouts.trajectories):
        yield rollouts.prompts[index // rollouts.n_samples_per_prompt], trajectory


def cut_rollouts_after(folder: Path, step: int) -> None:
    """Deletes the files of later steps, which a resumed run writes again, and files that were cut short."""
    for path in folder.glob("*"):
        match = _FILE.fullmatch(path.name)
        if match and (int(match[1]) > step or path.name.endswith(".tmp")):
            path.unlink()


def advantages_by_turn(rollouts: RolloutBatch, batch: TrainingInputBatch) -> list[list[list[float]] | None]:
    """Return, for each trajectory and turn, the advantage of each response token; None for a trajectory without rows.

    The rows of a trajectory hold its turns in order, one or several each.
    """
    advantages: np.ndarray = batch["advantages"].numpy()
    offsets: list[int] = batch.row_offsets.tolist()
    rows_of: dict[int, list[tuple[int, int, int]]] = {}
    columns = zip(batch["trajectory_index"].tolist(), batch["step_index"].tolist(), batch["is_padding"].tolist())
    for row, (trajectory_index, step_index, is_padding) in enumerate(columns):
        if not is_padding:
            rows_of.setdefault(trajectory_index, []).append((step_index, offsets[row], offsets[row + 1]))
    result: list[list[list[float]] | None] = []
    for trajectory_index, trajectory in enumerate(rollouts.trajectories):
        rows = sorted(rows_of.get(trajectory_index, ()))
        if not rows:
            result.append(None)
            continue
        spans: list[tuple[int, int]] = []
        _, start, end = rows.pop(0)
        for prompt_length, turn in zip(trajectory.prompt_lengths(), trajectory.turns):
            # A row ends with the response of its last turn; the turn after it is in the next row.
            if spans and spans[-1][1] == end:
                _, start, end = rows.pop(0)
            first = start + prompt_length
            spans.append((first, first + len(turn.response_token_ids)))
        result.append([advantages[first:stop].tolist() for first, stop in spans])
    return result
