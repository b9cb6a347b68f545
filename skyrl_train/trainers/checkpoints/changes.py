"""What changed in the configuration since a checkpoint, and what that means to a run that goes on from there.

Each setting states its class beside its declaration (`config/fields/fields.py: Resume`). Here two configurations are
compared, one setting at a time, and what depends on the rest of the run is decided: a setting that a schedule, the
closing of steps or the presence of a model makes more, or less, than its class says.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

from skyrl_train.config import RunConfig
from skyrl_train.config.door import as_typed, in_parts
from skyrl_train.config.fields import (
    ForksWhere,
    Interchangeable,
    Resume,
    SchemaField,
    fact,
    kinds_of,
    parts_of,
    seam_of,
    walk,
)
from skyrl_train.errors import Violation
from skyrl_train.registry import TARGET, split_spec
from skyrl_train.telemetry.logs import REDACTED, redact
from skyrl_train.trainers.checkpoints.state import plain

_ALGORITHM = "trainer.algorithm."
Flat = Mapping[str, Any]
"""Settings by their dotted names, as `flat_config` gives them."""
_ANY_TEXT = r'(?:[^"\\]|\\.)*'
ABSENT = object()
"""Stands for the value of an entry that a mapping of the user's does not have."""

START_ANEW = "start over with trainer.resume_mode=none (the old run is kept in previous-N/) or another output_dir=..."


def flat_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of `settings_of` by its dotted name (`trainer.train_batch_size`), as JSON values, secrets redacted."""
    flat: dict[str, Any] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value):
                walk(f"{name}.{key}" if name else str(key), value[key])
        else:
            flat[name] = value

    walk("", json.loads(json.dumps(redact(settings), default=plain)))
    return flat


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested plain values, as a run records it: parts with all of their arguments, so that a default
    that changes later does not change what the run was."""
    settings = dataclasses.asdict(config)
    for path, seam in parts_of(type(config)).items():
        if seam.declares_arguments:
            *sections, name = path.split(".")
            section = reduce(dict.__getitem__, sections, settings)
            section[name] = seam.complete(section[name])
    return settings


def begin_another(checkpoint: Path) -> str:
    """The advice where only a new run can begin at a checkpoint."""
    fork = f"trainer.resume_mode=fork trainer.resume_path={checkpoint}"
    return f"begin another run there with {fork} and another output_dir=..."


@dataclass(frozen=True, kw_only=True)
class Change:
    """One setting whose value is another than in the checkpoint."""

    setting: str
    """Dotted name; for a mapping of the user's, that of the entry."""
    was: Any
    now: Any
    resume: Resume
    is_gone: bool = False
    """Whether the setting is no longer in the schema, so that nobody can give it its old value again."""

    def line(self) -> str:
        """`trainer.policy.optimizer.lr was 1e-06 and is 2e-06`."""
        return f"{self.setting} was {_shown(self.was)} and is {_shown(self.now)}"

    def violation(self, checkpoint: Path) -> Violation:
        """Why the run cannot go on from the checkpoint, and what can be done."""
        was = _shown(self.was)
        if self.is_gone:
            return Violation(
                field=self.setting,
                rule=f"is a setting no more; it was {was} when {checkpoint} was written",
                value=_shown(self.now),
                remedy=f"Resume with the version of skyrl_train that wrote the checkpoint, or {begin_another(checkpoint)}, "
                f"or {START_ANEW}",
            )
        rule = f"must be as it was when {checkpoint} was written, which is {was}"
        ways = [f"Drop {self.setting}" if self.was is ABSENT else f"Set {self.setting}={was}"]
        if self.resume is Resume.FIXED:
            rule += ": shapes of its tensors, or the meaning of its token ids, follow from this"
        else:
            ways.append(begin_another(checkpoint))
        return Violation(
            field=self.setting, rule=rule, value=_shown(self.now), remedy=f"{', or '.join(ways)}, or {START_ANEW}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the change for the run's record, with null for an entry that is not there."""
        return {
            "setting": self.setting,
            "was": None if self.was is ABSENT else self.was,
            "is": None if self.now is ABSENT else self.now,
        }


def changes_since(recorded: Flat, settings: Flat, root: type) -> list[Change]:
    """The `settings` of a run that differ from those in a checkpoint, by name, each with what that means here. `root` is
    the schema of both.

    A setting that the checkpoint does not name is younger than it and had its default then. One that is no longer in the
    schema cannot be given again, and forks.
    """
    old, new = (_whole(_redacted(flat), root) for flat in (_complete(recorded, root), settings))
    return [
        Change(
            setting=name,
            was=old.get(name, ABSENT),
            now=new.get(name, ABSENT),
            resume=_meaning(name, old, new, root),
            is_gone=_field_of(name, root) is None,
        )
        for name in sorted({*old, *new})
        if not _is_same(old.get(name, ABSENT), new.get(name, ABSENT))
    ]


def _is_same(was: Any, now: Any) -> bool:
    """Whether two values are one, as far as is known: what was a secret to one process need not be to another."""
    if was == now or ABSENT in (was, now):
        return bool(was == now)
    texts = [json.dumps(each, sort_keys=True) for each in (was, now)]
    patterns = [_ANY_TEXT.join(map(re.escape, text.split(REDACTED))) for text in texts]
    return any(re.fullmatch(pattern, other) for pattern, other in zip(patterns, reversed(texts)))


def _redacted(flat: Flat) -> dict[str, Any]:
    """Without secrets on both sides: what an older version recorded of one must not differ from what this one does."""
    return {name: redact(value, name.rpartition(".")[2]) for name, value in flat.items()}


def _meaning(name: str, old: Flat, new: Flat, root: type) -> Resume:
    """The class of a changed setting in this run."""
    field = _field_of(name, root)
    if field is None or field.resume is None:
        return Resume.FORKS
    was_read, is_read = (_is_read(field, flat, root) for flat in (old, new))
    if not was_read and not is_read:
        return Resume.FREE
    if field.resume is Resume.FIXED and not was_read:
        return Resume.FORKS  # the checkpoint holds nothing that could fail to fit
    if (of_arguments := _meaning_of_arguments(field, old.get(name), new.get(name))) is not None:
        return of_arguments
    alike = fact(field.annotation, Interchangeable)
    if alike is not None and old.get(name) in alike.values and new.get(name) in alike.values:
        return Resume.LAYOUT
    where = fact(field.annotation, ForksWhere)
    if where is ForksWhere.SCHEDULE_ENDS and _schedule_ends(new, root):
        return Resume.FORKS
    if where is ForksWhere.DOCUMENTS_CLOSE_STEPS and new["trainer.docs_per_step"]:
        return Resume.FORKS
    return field.resume


def _meaning_of_arguments(field: SchemaField, was: Any, now: Any) -> Resume | None:
    """The strongest class of the arguments that changed of one part; None where another part was chosen."""
    seam = seam_of(field.annotation)
    if seam is None or not seam.declares_arguments or seam.name_of(was) != seam.name_of(now):
        return None
    declared = seam.arguments(was)
    (_, old), (_, new) = (split_spec(seam.complete(spec)) for spec in (was, now))
    changed = [fact(declared[key].annotation, Resume) or Resume.FORKS for key in declared if old[key] != new[key]]
    return max(changed, key=[*Resume].index, default=None)


def _is_read(field: SchemaField, flat: Flat, root: type) -> bool:
    """Return whether anything in a run with these settings reads the field."""
    _, kinds = kinds_of(root).get(field.path, (field, ()))
    return all(kind.is_chosen(flat.get(kind.setting)) for kind in kinds if not kind.is_of_values)


def _schedule_ends(flat: Flat, root: type) -> bool:
    """Return whether the learning rate of any optimizer that is used depends on the number of steps."""
    schedules = (field for path, field in _fields(root).items() if path.endswith("optimizer.schedule"))
    return any(flat.get(each.path, "constant") != "constant" and _is_read(each, flat, root) for each in schedules)


def _complete(recorded: Flat, root: type) -> dict[str, Any]:
    """With today's default for every field of which the checkpoint has nothing."""
    stated = {_path_of(name, root) for name in recorded}
    defaults = {name: value for name, value in _defaults(root).items() if _path_of(name, root) not in stated}
    return {**defaults, **recorded}


@cache
def _defaults(root: type) -> Flat:
    return flat_config(settings_of(root()))


def _whole(flat: Flat, root: type) -> dict[str, Any]:
    """A part with its arguments (`{_target_: ..., tau: 0.3}`) as one value; mappings of the user's entry by entry. Settings
    that became arguments since are in their parts."""
    whole: dict[str, Any] = {}
    for name, value in flat.items():
        field = _field_of(name, root)
        if field is None or name == field.path or seam_of(field.annotation) is None:
            whole[name] = value
        else:
            whole.setdefault(field.path, {})[name.removeprefix(f"{field.path}.")] = value
    algorithm = {name.removeprefix(_ALGORITHM): whole.pop(name) for name in [*whole] if name.startswith(_ALGORITHM)}
    whole |= {f"{_ALGORITHM}{name}": value for name, value in in_parts(algorithm).tree.items()}
    return {name: _without_free(value, _field_of(name, root)) for name, value in whole.items()}


def _without_free(value: Any, field: SchemaField | None) -> Any:
    """Return a part, or a list of them, without the arguments on which nothing that is learnt depends, or that are at their
    defaults."""
    seam = None if field is None else seam_of(field.annotation)
    if seam is None:
        return value
    if seam.declares_arguments:
        return seam.normal(value)
    if isinstance(value, list):
        return [_without_free(each, field) for each in value]
    builtin = seam.builtins.get(str(value.get(TARGET))) if isinstance(value, Mapping) else None
    free = builtin.free if builtin is not None else frozenset()
    return {key: each for key, each in value.items() if key.partition(".")[0] not in free} if free else value


def _path_of(name: str, root: type) -> str:
    field = _field_of(name, root)
    return name if field is None else field.path


def _field_of(name: str, root: type) -> SchemaField | None:
    """The field that a flat name belongs to: itself, or the mapping whose entry it is; None for a name that is unknown."""
    fields = _fields(root)
    parts: Sequence[str] = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((fields[prefix] for prefix in prefixes if prefix in fields), None)


@cache
def _fields(root: type) -> dict[str, SchemaField]:
    return {field.path: field for field in walk(root) if not field.section}


def _shown(value: Any) -> str:
    """Return the value as it is typed on the command line."""
    return "not set" if value is ABSENT else as_typed(value)
