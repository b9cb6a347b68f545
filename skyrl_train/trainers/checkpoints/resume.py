"""Where a run starts: at its first step, from its newest checkpoint, from a stated one, or as a fork; and whether it may
continue there.

A resumed run repeats the steps after the checkpoint and writes the same lines again, so what was written of them is cut.
That only holds while nothing changed that training depends on. Settings are therefore compared one by one
(`trainers/checkpoints/changes.py`), by the class that each states in the schema. Those that change rounding alone are
reported; those that make another run of it are refused, all at once, with the old and the new value. Data may move,
since the prompts themselves are compared.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_train.config.fields import Resume
from skyrl_train.errors import CheckpointError, ConfigError, SaveError, Violation, counted
from skyrl_train.interfaces import Learner, Scorer
from skyrl_train.registry import code_digests
from skyrl_train.system.files import read_json, whole_number, write_json
from skyrl_train.telemetry import RunFolder, cut_metrics_after, environment_of_run
from skyrl_train.trainers.capsules.record import cut_capsules_after
from skyrl_train.trainers.checkpoints.changes import START_ANEW, Change, ResumeSettings, begin_another, changes_since
from skyrl_train.trainers.checkpoints.fork import Fork, fork_from, is_fork_of
from skyrl_train.trainers.checkpoints.state import DataFingerprint, Totals, TrainerState, library_versions
from skyrl_train.trainers.checkpoints.store import HISTORY, CheckpointStore
from skyrl_train.trainers.evaluation.report import cut_evaluations_after
from skyrl_train.trainers.rollout_sink import cut_rollouts_after
from skyrl_train.trainers.steps import Learners


@dataclass(frozen=True, kw_only=True)
class Start:
    """The place where a run starts."""

    checkpoint: Path | None
    """None starts from the model's own weights."""
    state: TrainerState | None
    """Of the checkpoint."""
    own: bool
    """The checkpoint lies in this run's own folder."""
    is_fetched: bool = False
    """It came from a URL, with the record of its run."""
    complete: bool
    """The run in this folder has nothing left to do."""
    notes: tuple[str, ...]
    """What to tell the user, one line each."""
    begins_again: bool = False
    """A run that was to go on has no checkpoint yet: where the one in the folder is the same, its steps are repeated."""
    fork: Fork | None = None
    """Where this is a new run that begins at another's checkpoint; `state` is then what it begins with."""

    @property
    def is_first(self) -> bool:
        """This run has no steps of its own yet."""
        return self.state is None or self.fork is not None

    @property
    def fresh_models(self) -> frozenset[str]:
        """Models that are not taken from the checkpoint."""
        return self.fork.fresh_models if self.fork else frozenset()

    @property
    def holds_reference(self) -> bool:
        """The reference is taken from the checkpoint, where an earlier part of the training had moved it."""
        has = self.checkpoint is not None and (self.checkpoint / "reference").is_dir()
        return has and "reference" not in self.fresh_models

    @property
    def global_step(self) -> int:
        """The number of steps that are done."""
        return self.state.global_step if self.state else 0

    @property
    def data_position(self) -> int:
        return self.state.data_position if self.state else 0

    @property
    def totals(self) -> Totals:
        return self.state.totals if self.state else Totals()


FRESH = Start(checkpoint=None, state=None, own=True, complete=False, notes=())


def find_start(
    run: ResumeSettings, folder: RunFolder, checkpoints: CheckpointStore, *, data: DataFingerprint, total_steps: int
) -> Start:
    """Decides where the run starts. Changes nothing on disk but to bring a checkpoint there from a URL; needs no model.

    Raises:
        ConfigError: Settings changed that training depends on: all of them, with old and new values.
        CheckpointError: The stated checkpoint cannot be used, or the training prompts are not the same.
    """
    mode, resume_path = run.mode, run.path
    if mode == "none":
        return FRESH
    if mode != "latest" and not resume_path:
        raise ConfigError([_missing_resume_path(mode)])
    is_begun = mode == "fork" and is_fork_of(folder, resume_path)
    checkpoint = checkpoints.latest() if is_begun or mode == "latest" else None
    is_new_fork = mode == "fork" and checkpoint is None
    if checkpoint is None and mode != "latest":
        checkpoint = checkpoints.find(resume_path)
    if checkpoint is None:
        return replace(FRESH, begins_again=True)
    state = TrainerState.read(checkpoint)
    changes = changes_since(state.config, run.settings, run.schema)
    if is_new_fork:
        fork = fork_from(checkpoint, state, run, changes, folder=folder, data=data, total_steps=total_steps)
        lines = (*fork.notes, *_version_changes(state.versions, run.settings))
        return Start(
            checkpoint=checkpoint,
            state=fork.state,
            own=False,
            complete=False,
            notes=lines,
            fork=fork,
            begins_again=is_begun,
        )
    layout_changes = check_same_run(changes, checkpoint)
    if state.data != data:
        versions = "".join(f" ({line.partition(':')[0]})" for line in _version_changes(state.versions, {}))
        raise CheckpointError(
            f"the training prompts changed since {checkpoint}: {counted(state.data.num_prompts, 'prompt')} with fingerprint "
            f"{state.data.sha256[:12]} then, {data.num_prompts} with {data.sha256[:12]} now{versions}. "
            f"Restore the data, or {begin_another(checkpoint)}, or {START_ANEW}"
        )
    own = checkpoint.resolve().is_relative_to(folder.checkpoints.resolve())
    complete = own and _completed_steps(folder) >= max(total_steps, 1) and state.global_step >= total_steps
    notes = [f"resuming from {checkpoint}, after step {state.global_step} of {total_steps}"]
    notes += layout_changes + _version_changes(state.versions, run.settings)
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
        write_json(folder.fork_file, start.fork.record())
    elif start.checkpoint is not None and (start.is_fetched or not start.own or not folder.metrics_file.exists()):
        # Without metrics it may have come from a URL, for a run that was killed before it had its record.
        source = start.checkpoint / HISTORY if start.is_fetched or start.own else start.checkpoint.parent.parent
        for name, content in RunFolder(source).record(is_same_run=start.own).items():
            (folder.root / name).write_bytes(content)
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
    """Return whether the run in the folder had the same configuration and plan."""
    temporary = folder.root / f".{folder.config_file.name}.tmp"
    try:
        write_config(temporary)
        is_same = temporary.read_bytes() == folder.config_file.read_bytes()
        return is_same and read_json(folder.plan_file) == json.loads(json.dumps(plan))
    except (OSError, ValueError):
        return False
    finally:
        temporary.unlink(missing_ok=True)


def mark_complete(folder: RunFolder, global_step: int) -> None:
    """The last act of a run."""
    write_json(folder.complete_file, {"global_step": global_step})


def check_same_run(changes: Sequence[Change], checkpoint: Path) -> list[str]:
    """Lines about settings that changed and may; raises ConfigError about those that may not, all at once."""
    refused = [change for change in changes if change.resume in (Resume.FORKS, Resume.FIXED)]
    if refused:
        raise ConfigError([change.violation(checkpoint) for change in refused])
    layout = [change for change in changes if change.resume is Resume.LAYOUT]
    return [f"{change.line()}: the same training up to rounding" for change in layout]


def _missing_resume_path(mode: str) -> Violation:
    return Violation(
        field="trainer.resume_path",
        rule=f"must name a checkpoint or a run's output folder where trainer.resume_mode={mode}",
        value="''",
        remedy="try trainer.resume_path=OUTPUT_DIR/checkpoints/step_000010",
    )


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
