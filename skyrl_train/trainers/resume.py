"""Where a run starts: at its first step, from its newest checkpoint, from a stated one, or as a fork; and whether it may
continue there.

A resumed run repeats the steps after the checkpoint and writes the same lines again, so what was written of them is cut.
That only holds while nothing changed that training depends on. Settings are therefore compared one by one
(`checkpoints/changes.py`), by the class that each states in the schema. Those that change rounding alone are reported; those
that make another run of it are refused, all at once, with the old and the new value. Data may move, since the prompts
themselves are compared.

A fork is a new run, in a folder of its own, that begins at a checkpoint of another with settings changed. Weights, optimizer
state, the critic, the place in the data and the count of steps are kept. What follows from a setting that changed is
recreated: the weights that controllers moved, the place in the data counted in batches of another size, and models whose
paths changed. The rest of the run then reads its configuration as any other does: the learning rate, for one, is set from it
at each step and is no part of a checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_train.config import LoopConfig, TrainerConfig
from skyrl_train.config.fields import Resume
from skyrl_train.errors import CheckpointError, ConfigError, SaveError, Violation, counted
from skyrl_train.interfaces import Learner, Scorer
from skyrl_train.registry import code_digests
from skyrl_train.system.files import read_json, shown, whole_number, write_atomically, write_json
from skyrl_train.telemetry import RunFolder, cut_metrics_after, environment_of_run
from skyrl_train.trainers.capsules.record import cut_capsules_after
from skyrl_train.trainers.checkpoints.changes import START_ANEW, Change, Flat, begin_another, changes_since, flat_config
from skyrl_train.trainers.checkpoints.state import (
    STATE_FILE,
    DataFingerprint,
    LoopState,
    TrainerState,
    library_versions,
)
from skyrl_train.trainers.checkpoints.store import HISTORY, CheckpointStore
from skyrl_train.trainers.evaluation.evaluate import cut_evaluations_after
from skyrl_train.trainers.rollout_sink import cut_rollouts_after
from skyrl_train.trainers.steps import Learners

_KL_WEIGHT = ("trainer.algorithm.kl_reward_coef", "trainer.algorithm.kl_controller")
_ENTROPY_WEIGHT = ("trainer.algorithm.entropy_coef", "trainer.algorithm.entropy_controller")


@dataclass(frozen=True, kw_only=True)
class Start:
    """The place where a run starts."""

    checkpoint: Path | None = None
    """None starts from the model's own weights."""
    state: TrainerState | None = None
    """Of the checkpoint, as the run begins with it."""
    own: bool = True
    """The checkpoint lies in this run's own folder."""
    is_fetched: bool = False
    """It came from a URL, with the record of its run."""
    complete: bool = False
    """The run in this folder has nothing left to do."""
    notes: tuple[str, ...] = ()
    """What to tell the user, one line each."""
    begins_again: bool = False
    """A run that was to go on has no checkpoint yet: where the one in the folder is the same, its steps are repeated."""
    fork: Mapping[str, Any] | None = None
    """Where this is a new run that begins at another's checkpoint: the content of `fork.json`."""
    fresh_models: frozenset[str] = frozenset()
    """Of `critic` and `reference`: those that begin from their own paths, and not from the checkpoint."""

    @property
    def is_first(self) -> bool:
        """This run has no steps of its own yet."""
        return self.state is None or self.fork is not None

    @property
    def holds_reference(self) -> bool:
        """The reference is taken from the checkpoint, where an earlier part of the training had moved it."""
        has = self.checkpoint is not None and (self.checkpoint / "reference").is_dir()
        return has and "reference" not in self.fresh_models

    @property
    def global_step(self) -> int:
        """The number of steps that are done."""
        return self.state.global_step if self.state else 0


def find_start(
    trainer: LoopConfig,
    settings: Mapping[str, Any],
    schema: type,
    folder: RunFolder,
    checkpoints: CheckpointStore,
    *,
    data: DataFingerprint,
    total_steps: int,
    reference_is_base: bool = False,
) -> Start:
    """Decides where the run starts. Changes nothing on disk but to bring a checkpoint there from a URL; needs no model.

    Args:
        trainer: Of the run, whose `resume_mode` and `resume_path` say where to look.
        settings: The whole configuration as `settings_of` gives it.
        schema: The root of the configuration: what a setting's class and default are found in.
        reference_is_base: Whether the reference is the model under the policy's adapter.

    Raises:
        ConfigError: Settings changed that training depends on: all of them, with old and new values.
        CheckpointError: The stated checkpoint cannot be used, or the training prompts are not the same.
    """
    mode, path, flat = trainer.resume_mode, trainer.resume_path, flat_config(settings)
    if mode == "none":
        return Start()
    if mode != "latest" and not path:
        rule = f"must name a checkpoint or a run's output folder where trainer.resume_mode={mode}"
        remedy = "try trainer.resume_path=OUTPUT_DIR/checkpoints/step_000010"
        raise ConfigError([Violation(field="trainer.resume_path", rule=rule, value="''", remedy=remedy)])
    is_begun_fork = mode == "fork" and _is_fork_of(folder, path)
    checkpoint = checkpoints.latest() if is_begun_fork or mode == "latest" else None
    is_new_fork = mode == "fork" and checkpoint is None
    if checkpoint is None and mode != "latest":
        checkpoint = checkpoints.find(path)
    if checkpoint is None:
        return Start(begins_again=True)
    state = TrainerState.read(checkpoint)
    changes = changes_since(state.config, flat, schema)
    if is_new_fork:
        fresh_models = _fresh_models(flat, checkpoint, changes, reference_is_base=reference_is_base)
        start = _fork(
            checkpoint, state, trainer, flat, changes, fresh_models, folder=folder, data=data, total_steps=total_steps
        )
        return replace(start, begins_again=is_begun_fork)
    if refused := [change for change in changes if change.resume in (Resume.FORKS, Resume.FIXED)]:
        raise ConfigError([change.violation(checkpoint) for change in refused])
    if state.data != data:
        versions = "".join(f" ({line.partition(':')[0]})" for line in _version_changes(state.versions, {}))
        raise CheckpointError(
            f"the training prompts changed since {checkpoint}: {counted(state.data.num_prompts, 'prompt')} with fingerprint "
            f"{state.data.sha256[:12]} then, {data.num_prompts} with {data.sha256[:12]} now{versions}. "
            f"Restore the data, or {begin_another(checkpoint)}, or {START_ANEW}"
        )
    own = checkpoint.resolve().is_relative_to(folder.checkpoints.resolve())
    complete = own and _completed_steps(folder) >= max(total_steps, 1) and state.global_step >= total_steps
    layout = [change for change in changes if change.resume is Resume.LAYOUT]
    notes = [
        f"resuming from {checkpoint}, after step {state.global_step} of {total_steps}",
        *(f"{change.line()}: the same training up to rounding" for change in layout),
        *_version_changes(state.versions, flat),
    ]
    if complete:
        notes = [
            f"{folder.root}: this run is complete ({counted(state.global_step, 'step')}); nothing to do. "
            "For another run choose another output_dir=..., or set trainer.resume_mode=none"
        ]
    return Start(
        checkpoint=checkpoint,
        state=state,
        own=own,
        is_fetched=checkpoint == checkpoints.fetched,
        complete=complete,
        notes=tuple(notes),
    )


def _is_fork_of(folder: RunFolder, resume_path: str) -> bool:
    """Whether the run in `folder` is a fork that was begun with this `trainer.resume_path`."""
    try:
        return bool(read_json(folder.fork_file)["resume_path"] == resume_path)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _fork(
    checkpoint: Path,
    state: TrainerState,
    trainer: LoopConfig,
    settings: Flat,
    changes: Sequence[Change],
    fresh_models: frozenset[str],
    *,
    folder: RunFolder,
    data: DataFingerprint,
    total_steps: int,
) -> Start:
    """What a new run in `folder`, of these `settings`, takes from the checkpoint, and begins without its `fresh_models`.

    Raises ConfigError where the folder is that of the checkpoint's own run, where settings changed that decide shapes or
    the meaning of token ids, and where no steps are left.
    """
    algorithm = trainer.algorithm if isinstance(trainer, TrainerConfig) else None
    problems = [change.violation(checkpoint) for change in changes if change.resume is Resume.FIXED]
    place = checkpoint.resolve()
    if place.is_relative_to(folder.root.resolve()) and not place.is_relative_to(folder.origin.resolve()):
        problems.append(
            Violation(
                field="output_dir",
                rule=f"must be another folder than that of the run with {checkpoint}: a fork is a new run",
                value=str(folder.root),
                remedy="Set output_dir=..., or go on with that run with trainer.resume_mode=from_path",
            )
        )
    if total_steps <= state.global_step:
        name = "trainer.num_steps" if algorithm is None else "trainer.total_steps"
        problems.append(
            Violation(
                field=name,
                rule=f"must be more than the {state.global_step} steps that are done at the checkpoint",
                value=str(total_steps),
                remedy=f"Try {name}={2 * max(state.global_step, 1)}",
            )
        )
    if problems:
        raise ConfigError(problems)
    changed = {change.setting: change for change in changes}
    position = _data_position(state, changed, data)
    notes = [f"forking from {checkpoint}, after step {state.global_step} of {total_steps}; fork.json lists all changes"]
    notes += [change.line() for change in changes if change.resume is not Resume.FREE]
    if data != state.data:
        notes.append(f"the training prompts changed: {state.data.num_prompts} then, {data.num_prompts} now")
    if position != state.data_position:
        notes.append(f"the data go on at position {position}, which was {state.data_position}")
    notes += [f"the {name} begins from its own path, not from the checkpoint" for name in sorted(fresh_models)]
    notes += _version_changes(state.versions, settings)
    # A weight whose setting changed begins anew, even if a controller had moved it.
    first = LoopState.first(algorithm)
    return Start(
        checkpoint=checkpoint,
        state=replace(
            state,
            data_position=position,
            settled=None,
            kl_controller=state.kl_controller if changed.keys().isdisjoint(_KL_WEIGHT) else first.kl_controller,
            entropy_controller=(
                state.entropy_controller if changed.keys().isdisjoint(_ENTROPY_WEIGHT) else first.entropy_controller
            ),
        ),
        own=False,
        notes=tuple(notes),
        fork={
            "resume_path": trainer.resume_path,
            "checkpoint": str(checkpoint),
            "global_step": state.global_step,
            "data_position": position,
            "changed": [change.to_json() for change in changes],
            "models_anew": sorted(fresh_models),
        },
        fresh_models=fresh_models,
    )


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


def _fresh_models(
    settings: Flat, checkpoint: Path, changes: Sequence[Change], *, reference_is_base: bool
) -> frozenset[str]:
    """A model is kept where the checkpoint has it and its path is the same."""
    fresh, changed = set(), {change.setting for change in changes}
    if settings.get("critic.model.path") and ("critic.model.path" in changed or not (checkpoint / "critic").is_dir()):
        fresh.add("critic")
    is_held = (checkpoint / "reference").is_dir()
    if is_held and ("reference.model.path" in changed or reference_is_base):
        fresh.add("reference")
    return frozenset(fresh)


def prepare_run_folder(
    folder: RunFolder, start: Start, *, write_config: Callable[[Path], None], plan: Mapping[str, Any]
) -> list[str]:
    """Makes the folder fit for a run from `start`: cuts what lies beyond it, moves older runs aside, writes
    `config.yaml` and `plan.json`. Returns what to tell the user.

    `write_config` writes the resolved, redacted configuration to the path that it is given.
    Call it while the folder is locked (`folder.locked()`), before trackers are built. Raises SaveError where the disk
    refuses.
    """
    folder.create()
    shutil.rmtree(folder.export.with_name(f".{folder.export.name}.tmp"), ignore_errors=True)  # of a run that was killed
    try:
        return _prepare(folder, start, write_config, plan)
    except OSError as error:
        raise SaveError(
            f"output_dir={folder.root} cannot be written: {error}. Make room, or choose another with output_dir=..."
        ) from error


def _prepare(
    folder: RunFolder, start: Start, write_config: Callable[[Path], None], plan: Mapping[str, Any]
) -> list[str]:
    notes: list[str] = []
    if start.own and start.state is not None:
        if moved := folder.set_aside_checkpoints_after(start.global_step):
            notes.append(f"checkpoints after step {start.global_step} are now in {moved}")
    elif start.begins_again and _is_same_run(folder, write_config, plan):
        folder.discard()
    elif moved := folder.set_aside():
        why = "" if start.checkpoint else ", which left no checkpoint to go on from or was not asked for"
        notes.append(f"the files of the run that was in {folder.root}{why} are now in {moved}")
    if start.fork is not None:
        write_json(folder.fork_file, start.fork)
    elif start.checkpoint is not None and (start.is_fetched or not start.own or not folder.metrics_file.exists()):
        # Without metrics it may have come from a URL, for a run that was killed before it had its record.
        source = start.checkpoint / HISTORY if start.is_fetched or start.own else start.checkpoint.parent.parent
        record = RunFolder(source).record(is_same_run=start.own)
        for name in sorted(
            record, key=lambda name: name == folder.metrics_file.name
        ):  # last: they say that it is there
            write_atomically(folder.root / name, record[name])
    folder.complete_file.unlink(missing_ok=True)
    cut_metrics_after(folder.metrics_file, start.global_step)
    cut_evaluations_after(folder.evaluation_file, start.global_step)
    cut_rollouts_after(folder.rollouts, start.global_step)
    cut_capsules_after(folder.capsules, start.global_step)
    write_config(folder.config_file)
    write_json(folder.plan_file, plan)
    write_json(folder.environment_file, environment_of_run(Path(__file__).parent, library_versions()))
    return notes


def _is_same_run(folder: RunFolder, write_config: Callable[[Path], None], plan: Mapping[str, Any]) -> bool:
    """Return whether the run in the folder had the same configuration and plan. Raises OSError where the disk refuses, which
    says nothing of the run."""
    temporary = folder.root / f".{folder.config_file.name}.tmp"
    try:
        write_config(temporary)
        written = temporary.read_bytes()
    finally:
        temporary.unlink(missing_ok=True)
    try:
        return written == folder.config_file.read_bytes() and read_json(folder.plan_file) == json.loads(
            json.dumps(plan)
        )
    except (OSError, ValueError):
        return False


def _completed_steps(folder: RunFolder) -> int:
    """What `complete.json` says; 0 where it is absent or unreadable."""
    try:
        return whole_number(read_json(folder.complete_file), "global_step")
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _version_changes(old: Mapping[str, str], settings: Mapping[str, Any]) -> list[str]:
    libraries = [
        f"{name} was {old[name]} and is {version}: results may differ in rounding"
        for name, version in library_versions().items()
        if old.get(name, version) != version
    ]
    files = [
        f"{file} was changed (SHA-256 {old[file][:12]} then, {digest[:12]} now): the run goes on with the code as it is"
        for file, digest in code_digests(settings).items()
        if old.get(file, digest) != digest
    ]
    return [*libraries, *files]


def checkpointed_models(learners: Learners, start: Start, *, ref_update_interval: int) -> dict[str, Learner | Scorer]:
    """The models that a checkpoint holds, by the names of their folders: a reference that stays what it was at the start
    is not among them. One that moved before the run was forked is, though it moves no more."""
    models: dict[str, Learner | Scorer] = {"policy": learners.policy}
    if learners.critic is not None:
        models["critic"] = learners.critic
    if learners.reference is not None and (ref_update_interval > 0 or start.holds_reference):
        models["reference"] = learners.reference
    return models
