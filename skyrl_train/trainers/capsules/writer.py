"""Keeps step capsules while a run trains (`record.py` says what is in one).

A state is written once, after its step: it is what one capsule ends with and the next begins with. So k capsules take k + 1
states, and a step's time grows by that of one checkpoint. Everything is written as checkpoints are, whole or not at all.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.steps import MiniBatch
from skyrl_train.data.sources import IMAGES
from skyrl_train.errors import BatchError, NonFiniteError, SkyrlTrainError
from skyrl_train.interfaces import HeldState
from skyrl_train.telemetry import RunFolder, git_commit
from skyrl_train.telemetry.logs import RunConsole
from skyrl_train.telemetry.records import rollouts_sum
from skyrl_train.trainers.capsules.record import (
    BATCH_FILE,
    CONFIG_FILE,
    FAILED,
    STATES,
    BadInput,
    Capsule,
    Refusal,
    write_batch,
)
from skyrl_train.trainers.checkpoints.folder import checkpoint_name, sha256_of, write_checkpoint
from skyrl_train.trainers.checkpoints.state import LoopState, library_versions
from skyrl_train.trainers.observers import StepInputs
from skyrl_train.types import RolloutBatch

_CODE = Path(__file__).parent
_MOST_BAD_INPUTS = 100
"""Numbers of rollouts that a capsule names; the others are like them."""


class CapsuleWriter:
    """Writes the capsules of one run. `keep`: of how many steps; those of refused steps are written also with 0."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        keep: int,
        seed: int,
        total_steps: int,
        hold_state: Callable[..., HeldState],
        console: RunConsole,
    ) -> None:
        """`hold_state(step, state, copies=False)` gives the models, and the state of the loop after `step` steps."""
        self._folder, self.keep, self._seed, self._total_steps = folder, keep, seed, total_steps
        self._hold_state, self._console = hold_state, console

    def write_state(self, step: int, state: LoopState) -> None:
        """Keep the `state` after `step` steps, which the next step begins with. Raises SaveError."""
        root = self._folder.capsules / STATES
        write_checkpoint(root, step, self._hold_state(step, state, copies=False).write, self.keep + 1)

    def write(
        self, step: int, state: LoopState, batch: TrainingInputBatch | MiniBatch, metrics: Mapping[str, float]
    ) -> None:
        """Keep the capsule of a step that is finished, after which the loop is in `state`, and whose rollouts are on disk.
        Raises SaveError."""
        self.write_state(step, state)
        rollouts = next(iter(sorted(self._folder.rollouts.glob(f"train_{checkpoint_name(step)}.*"))), None)

        def write(folder: Path) -> None:
            self._write_own(folder, step, batch, metrics=metrics, rollouts=rollouts)

        write_checkpoint(self._folder.capsules, step, write, self.keep)
        shutil.rmtree(self._folder.capsules / FAILED / checkpoint_name(step), ignore_errors=True)

    @contextmanager
    def failures_kept(self, step: int, state: LoopState, known: StepInputs) -> Iterator[None]:
        """Wrap a step that begins in `state`, and says what is `known` of it. One that is refused for its numbers leaves a
        capsule, and its error names the command that finds them."""
        try:
            yield
        except (NonFiniteError, BatchError) as error:
            if self._keep_refused(step, state, known, error):
                root = self._folder.root.absolute()
                command = f"skyrl-capsule bisect {root} --step {step}"
                error.args = (f"{error} What makes it so is traced by `{command}`.", *error.args[1:])
            raise

    def _keep_refused(self, step: int, state: LoopState, known: StepInputs, error: SkyrlTrainError) -> bool:
        """Return whether it could be kept; a failure is a warning, since there is an error already."""
        refusal = Refusal(error=str(error))
        if isinstance(error, NonFiniteError):
            refusal = replace(refusal, learner=error.learner, optimizer_steps=error.optimizer_steps)

        def write(folder: Path) -> None:
            self._hold_state(step - 1, state, copies=False).write(folder)
            self._write_own(folder, step, known.batch, refusal=refusal, bad_inputs=bad_inputs(known.rollouts))

        try:
            write_checkpoint(self._folder.capsules / FAILED, step, write, 1)
        except (OSError, SkyrlTrainError) as lost:
            self._console.warn(f"no capsule of step {step} could be kept: {type(lost).__name__}: {lost}")
            return False
        return True

    @cached_property
    def _commit(self) -> str:
        return git_commit(_CODE)

    def _write_own(
        self,
        folder: Path,
        step: int,
        batch: TrainingInputBatch | MiniBatch | None,
        *,
        metrics: Mapping[str, float] | None = None,
        rollouts: Path | None = None,
        refusal: Refusal | None = None,
        bad_inputs: tuple[BadInput, ...] = (),
    ) -> None:
        """Write all that is no model."""
        shutil.copyfile(self._folder.config_file, folder / CONFIG_FILE)
        rows, denominators = (batch.batch, batch.denominators) if isinstance(batch, MiniBatch) else (batch, None)
        if rows is not None:
            write_batch(folder / BATCH_FILE, rows.here())
            used = {span.image.key for spans in rows.metadata.images for span in spans}
            IMAGES.keep(sorted(used), self._folder.images)
        if rollouts is not None:
            copy = partial(shutil.copytree, copy_function=_link) if rollouts.is_dir() else _link
            copy(rollouts, folder / rollouts.name)
        Capsule(
            step=step,
            seed=self._seed,
            config_sha256=sha256_of(folder / CONFIG_FILE),
            rollouts="" if rollouts is None else rollouts.name,
            rollouts_sha256="" if rollouts is None else rollouts_sum(folder / rollouts.name)[1],
            versions=library_versions(),
            git_commit=self._commit,
            metrics={name: value if math.isfinite(value) else None for name, value in (metrics or {}).items()},
            refusal=refusal,
            bad_inputs=bad_inputs,
            total_steps=self._total_steps,
            denominators=denominators,
        ).write(folder)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # the disk has no second names for files
        shutil.copyfile(source, target)


def bad_inputs(rollouts: RolloutBatch | None) -> tuple[BadInput, ...]:
    """Return the first rewards and log-probabilities that are not finite, of trajectories that did not fail."""
    found: list[BadInput] = []
    for trajectory in () if rollouts is None else rollouts.trajectories:
        for number, turn in enumerate(() if trajectory.failed else trajectory.turns):
            numbers = [("reward", 0, turn.reward)]
            numbers += [("logprobs", token, value) for token, value in enumerate(turn.response_logprobs)]
            found += [
                BadInput(
                    uid=trajectory.prompt_uid,
                    sample=trajectory.sample_index,
                    turn=number,
                    column=column,
                    token=token,
                    value=str(float(value)),
                    text=turn.response_text,
                )
                for column, token, value in numbers
                if not math.isfinite(value)
            ]
    return tuple(found[:_MOST_BAD_INPUTS])
