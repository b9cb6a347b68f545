"""Keeps the rollouts of every step without keeping the step waiting: they are written on a thread of their own.

`write` returns at once; the trainer calls `flush` at the end of the step, before the step's record is written. A record
in `metrics.jsonl` therefore means that the rollouts of its step are on disk.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.plane import DataPlane
from skyrl_train.config import RolloutsConfig
from skyrl_train.errors import DeadlineError, SaveError, SkyrlTrainError, StopRequested
from skyrl_train.system import WorkerThread
from skyrl_train.telemetry.logs import redact_text
from skyrl_train.telemetry.records import (
    FloatColumns,
    TurnValues,
    pairs_of,
    remove_rollouts,
    rollouts_sum,
    write_failed_rollouts,
    write_parts,
    write_rollouts,
)
from skyrl_train.trainers.observers import StepInputs
from skyrl_train.types import Prompt, RolloutBatch, Trajectory

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 1800.0
CLOSE_TIMEOUT_S = 30.0
_FILE = re.compile(r"\.?(?P<kind>[a-z]+)_step_(?P<step>\d+)\.(?:parquet|jsonl)(?:\.tmp)?")
"""Versions before wrote JSON lines."""
_COLUMNS = {
    "advantages": "advantages",
    "policy_logprobs": "old_logprobs",
    "reference_logprobs": "ref_logprobs",
    "entropies": "entropies",
}
"""What is written of each token beside the rollouts themselves, and the batch's names for it."""


class RolloutLog:
    """Writes Parquet files under `folder`, one a step and purpose, in the background. Where the arrays of a training step
    lie on several nodes, each node writes a part."""

    def __init__(
        self,
        folder: Path,
        settings: RolloutsConfig | None = None,
        *,
        plane: DataPlane | None = None,
        flush_timeout_s: float = FLUSH_TIMEOUT_S,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        """`plane`: where the arrays of training rollouts and rows are, if not here, and who writes them."""
        self._folder, self._settings = folder, settings or RolloutsConfig()
        self._plane: DataPlane = plane or DataPlane()
        self._flush_timeout_s, self._close_timeout_s = flush_timeout_s, close_timeout_s
        self._thread = WorkerThread("rollout-log")
        self._pending: list[Future[Any]] = []

    def write(self, rollouts: RolloutBatch, batch: TrainingInputBatch, *, step: int) -> None:
        """Training rollouts with what `batch` holds of their tokens."""
        self._pending.append(self._thread.submit(self._write_train, rollouts, batch, step))

    def write_evaluation(self, step: int, rollouts: RolloutBatch) -> None:
        """Rollouts of an evaluation after `step` steps."""
        write = partial(write_rollouts, self._folder, rollouts, purpose="eval", global_step=step)
        self._pending.append(self._thread.submit(write))

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
            except (OSError, SaveError) as error:
                raise SaveError(
                    f"rollouts could not be written to {self._folder}: {error}. "
                    "Make room, or set trainer.dump_rollouts=false"
                ) from error

    @contextmanager
    def failures_kept(self, step: int, known: StepInputs | None = None) -> Iterator[None]:
        """Wraps a step. Where it raises, the rollouts that are `known` are written with the error, or those that were
        complete when generating ended by it."""
        try:
            yield
        except StopRequested:
            raise
        except Exception as error:
            ended = error.trajectories if isinstance(error, SkyrlTrainError) else ()
            rollouts = ended or ([] if known is None or known.rollouts is None else list(pairs_of(known.rollouts)))
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
        rollouts, batch = of_prompts(rollouts, batch, sampled(rollouts, self._settings.sample_fraction))
        shares = self._plane.shares(rollouts)
        calls = {
            node: (self._folder, self._settings, *of_prompts(rollouts, batch, prompts), step, part)
            for (node, prompts), part in zip(shares.items(), range(len(shares)) if len(shares) > 1 else (None,))
        }
        write = partial(self._plane.save, write_training_rollouts, calls)
        if len(shares) > 1:
            places = [_trajectories_of(prompts, rollouts.n_samples_per_prompt) for prompts in shares.values()]
            write_parts(self._folder, step, places, write)
        else:
            write()
        if self._settings.keep_last:
            self._delete_up_to(step - self._settings.keep_last)

    def _delete_up_to(self, step: int) -> None:
        """Older files that cannot be deleted stay: the step does not wait for them."""
        for path in self._folder.glob("*"):
            match = _FILE.fullmatch(path.name)
            if match and match["kind"] in ("train", "eval") and int(match["step"]) <= step:
                with suppress(OSError):
                    remove_rollouts(path)


def write_training_rollouts(
    folder: Path,
    settings: RolloutsConfig,
    rollouts: RolloutBatch,
    batch: TrainingInputBatch,
    step: int,
    part: int | None,
) -> tuple[int, str]:
    """Write a step's rollouts, or a `part` of them, with what `batch` holds of their tokens. Return the `rollouts_sum` of
    the part. Raises OSError."""
    found = columns_by_turn(rollouts, batch, settings.columns)
    columns: FloatColumns = {name: found[name] for name in settings.columns if name in found}
    path = write_rollouts(
        folder,
        rollouts,
        purpose="train",
        global_step=step,
        columns=columns,
        to_bfloat16=settings.columns_dtype == "bfloat16",
        sample_fraction=settings.sample_fraction,
        part=part,
    )
    return (0, "") if part is None else rollouts_sum(path)


def cut_rollouts_after(folder: Path, step: int) -> None:
    """Deletes the files of later steps, which a resumed run writes again, and files that were cut short."""
    for path in folder.glob("*"):
        match = _FILE.fullmatch(path.name)
        if match and (int(match["step"]) > step or path.name.endswith(".tmp")):
            remove_rollouts(path)


def sampled(rollouts: RolloutBatch, fraction: float) -> list[int]:
    """Return the numbers of a share of the prompts, one at least. Whether a prompt is among them is decided by its uid, so
    that it is again in the next epoch."""
    digests = [hashlib.blake2b(prompt.uid.encode(errors="replace")).digest() for prompt in rollouts.prompts]
    count = math.ceil(fraction * len(digests))
    return sorted(sorted(range(len(digests)), key=digests.__getitem__)[:count])


def of_prompts(
    rollouts: RolloutBatch, batch: TrainingInputBatch, prompts: Sequence[int]
) -> tuple[RolloutBatch, TrainingInputBatch]:
    """Return the rollouts of some prompts, by their numbers in ascending order, and their rows."""
    if len(prompts) == len(rollouts.prompts):
        return rollouts, batch
    kept = _trajectories_of(prompts, rollouts.n_samples_per_prompt)
    # Element -1 stands for the trajectory of dummy rows, which is none.
    number = torch.full((len(rollouts.trajectories) + 1,), -1, dtype=torch.int32)
    number[kept] = torch.arange(len(kept), dtype=torch.int32)
    of_row = number[batch["trajectory_index"]]
    rows = torch.nonzero(of_row >= 0).flatten()
    taken = batch.take(rows).with_columns(trajectory_index=of_row[rows])
    first_scored = int((rows < batch.metadata.first_scored_row).sum())
    part = replace(
        rollouts,
        prompts=tuple(rollouts.prompts[each] for each in prompts),
        trajectories=tuple(rollouts.trajectories[each] for each in kept),
    )
    return part, replace(taken, metadata=replace(taken.metadata, first_scored_row=first_scored))


def _trajectories_of(prompts: Sequence[int], size: int) -> list[int]:
    return [prompt * size + sample for prompt in prompts for sample in range(size)]


def columns_by_turn(
    rollouts: RolloutBatch, batch: TrainingInputBatch, names: Sequence[str] = tuple(_COLUMNS)
) -> dict[str, list[TurnValues | None]]:
    """Return, by the names of the files' columns, what `batch` holds of each response token, per trajectory and turn;
    None for a trajectory without rows, and for one that was not scored. `names`: of those that are read."""
    spans = _spans(rollouts, batch)
    first_scored = int(batch.row_offsets[batch.metadata.first_scored_row])
    scored = [None if each and each[0][0] < first_scored else each for each in spans]
    found: dict[str, list[TurnValues | None]] = {}
    for name, column in _COLUMNS.items():
        if name in names and column in batch:
            values = batch[column].numpy().astype(np.float32, copy=False)
            each_spans = scored if column == "old_logprobs" else spans
            found[name] = [
                None if each is None else [values[start:stop] for start, stop in each] for each in each_spans
            ]
    return found


def _spans(rollouts: RolloutBatch, batch: TrainingInputBatch) -> list[list[tuple[int, int]] | None]:
    """Return, for each trajectory and turn, where in the batch's flat columns its response tokens are.

    The rows of a trajectory hold its turns in order, one or several each.
    """
    offsets: list[int] = batch.row_offsets.tolist()
    rows_of: dict[int, list[tuple[int, int, int]]] = {}
    columns = zip(batch["trajectory_index"].tolist(), batch["step_index"].tolist(), batch["is_padding"].tolist())
    for row, (trajectory_index, step_index, is_padding) in enumerate(columns):
        if not is_padding:
            rows_of.setdefault(trajectory_index, []).append((step_index, offsets[row], offsets[row + 1]))
    result: list[list[tuple[int, int]] | None] = []
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
            spans.append((first, first + turn.num_response_tokens))
        result.append(spans)
    return result
