"""A fork: a new run, in a folder of its own, that begins at a checkpoint of another with settings changed.

Weights, optimizer state, the critic, the place in the data and the count of steps are kept. What follows from a setting that
changed is recreated: the weights that controllers moved, the place in the data counted in batches of another size, and
models whose paths changed. The rest of the run then reads its configuration as any other does: the learning rate, for one,
is set from it at each step and is no part of a checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.config.fields import Resume
from skyrl_train.errors import CheckpointError, ConfigError, Violation
from skyrl_train.system.files import read_json, shown
from skyrl_train.telemetry import RunFolder
from skyrl_train.trainers.checkpoints.changes import Change, ResumeSettings
from skyrl_train.trainers.checkpoints.state import STATE_FILE, DataFingerprint, LoopState, TrainerState

_KL_WEIGHT = ("trainer.algorithm.kl_reward_coef", "trainer.algorithm.kl_controller")
_ENTROPY_WEIGHT = ("trainer.algorithm.entropy_coef", "trainer.algorithm.entropy_controller")


@dataclass(frozen=True, kw_only=True)
class Fork:
    """The checkpoint where a fork begins, and how the fork differs from the run that it left."""

    resume_path: str
    """As stated: a checkpoint, or the folder of the run that is forked."""
    checkpoint: Path
    state: TrainerState
    """Of the checkpoint, as the new run begins with it."""
    changes: tuple[Change, ...]
    fresh_models: frozenset[str]
    """Of `critic` and `reference`: those that begin from their own paths, and not from the checkpoint."""
    notes: tuple[str, ...]
    """What to tell the user, one line each."""

    def record(self) -> dict[str, Any]:
        """Return the content of `fork.json`."""
        return {
            "resume_path": self.resume_path,
            "checkpoint": str(self.checkpoint),
            "global_step": self.state.global_step,
            "data_position": self.state.data_position,
            "changed": [change.to_json() for change in self.changes],
            "models_anew": sorted(self.fresh_models),
        }


def fork_from(
    checkpoint: Path,
    state: TrainerState,
    run: ResumeSettings,
    changes: Sequence[Change],
    *,
    folder: RunFolder,
    data: DataFingerprint,
    total_steps: int,
) -> Fork:
    """What a new run in `folder` takes from the checkpoint.

    Raises ConfigError where the folder is that of the checkpoint's own run, where settings changed that decide shapes or
    the meaning of token ids, and where no steps are left.
    """
    problems = [change.violation(checkpoint) for change in changes if change.resume is Resume.FIXED]
    place, origin = checkpoint.resolve(), folder.origin.resolve()
    if place.is_relative_to(folder.root.resolve()) and not place.is_relative_to(origin):
        problems.append(_own_folder(folder, checkpoint))
    if total_steps <= state.global_step:
        problems.append(_no_steps_left(run, state.global_step, total_steps))
    if problems:
        raise ConfigError(problems)
    changed = {change.setting: change for change in changes}
    position = _data_position(state, changed, data)
    fresh_models = _fresh_models(run, checkpoint, changed)
    notes = [f"forking from {checkpoint}, after step {state.global_step} of {total_steps}; fork.json lists all changes"]
    notes += [change.line() for change in changes if change.resume is not Resume.FREE]
    notes += _data_notes(state, data, position)
    notes += [f"the {name} begins from its own path, not from the checkpoint" for name in sorted(fresh_models)]
    return Fork(
        resume_path=run.path,
        checkpoint=checkpoint,
        state=dataclasses.replace(_with_controllers(state, run, changed), data_position=position, settled=None),
        changes=tuple(changes),
        fresh_models=fresh_models,
        notes=tuple(notes),
    )


def is_fork_of(folder: RunFolder, resume_path: str) -> bool:
    """Return whether the run in `folder` is a fork that was begun with this `trainer.resume_path`."""
    try:
        return bool(read_json(folder.fork_file)["resume_path"] == resume_path)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _data_position(state: TrainerState, changed: Mapping[str, Change], data: DataFingerprint) -> int:
    """The epochs that are done and the share of the current one are kept, rounded down to whole batches. Other prompts
    begin with their first; prompts count as others where their number differs, not where they are tokenised or worded
    otherwise."""
    num_prompts = state.data.num_prompts
    if data.num_prompts != num_prompts:
        return 0
    size = changed.get("trainer.train_batch_size")
    if size is None:
        return state.data_position
    was, now = size.was, int(size.now)
    if type(was) is not int or was < 1:
        raise CheckpointError(
            f"{STATE_FILE}: config.trainer.train_batch_size must be a positive integer; got {shown(was)}"
        )
    epoch, place = divmod(state.data_position, max(1, num_prompts // was))
    return epoch * (num_prompts // now) + place * was // now


def _data_notes(state: TrainerState, data: DataFingerprint, position: int) -> list[str]:
    notes = []
    if data != state.data:
        notes.append(f"the training prompts changed: {state.data.num_prompts} then, {data.num_prompts} now")
    if position != state.data_position:
        notes.append(f"the data go on at position {position}, which was {state.data_position}")
    return notes


def _with_controllers(state: TrainerState, run: ResumeSettings, changed: Mapping[str, Change]) -> TrainerState:
    """Return the state in which a weight whose setting changed begins at the new value, even if a controller had moved
    it."""
    first = LoopState.first(run.algorithm)
    if not changed.keys().isdisjoint(_KL_WEIGHT):
        state = dataclasses.replace(state, kl_controller=first.kl_controller)
    if not changed.keys().isdisjoint(_ENTROPY_WEIGHT):
        state = dataclasses.replace(state, entropy_controller=first.entropy_controller)
    return state


def _fresh_models(run: ResumeSettings, checkpoint: Path, changed: Mapping[str, Change]) -> frozenset[str]:
    """A model is kept where the checkpoint has it and its path is the same."""
    fresh = set()
    if run.settings.get("critic.model.path") and (
        "critic.model.path" in changed or not (checkpoint / "critic").is_dir()
    ):
        fresh.add("critic")
    is_held = (checkpoint / "reference").is_dir()
    if is_held and ("reference.model.path" in changed or run.reference_is_base):
        fresh.add("reference")
    return frozenset(fresh)


def _own_folder(folder: RunFolder, checkpoint: Path) -> Violation:
    return Violation(
        field="output_dir",
        rule=f"must be another folder than that of the run with {checkpoint}: a fork is a new run",
        value=str(folder.root),
        remedy="Set output_dir=..., or go on with that run with trainer.resume_mode=from_path",
    )


def _no_steps_left(run: ResumeSettings, done: int, total_steps: int) -> Violation:
    name = "trainer.num_steps" if run.algorithm is None else "trainer.total_steps"
    return Violation(
        field=name,
        rule=f"must be more than the {done} steps that are done at the checkpoint",
        value=str(total_steps),
        remedy=f"Try {name}={2 * max(done, 1)}",
    )
