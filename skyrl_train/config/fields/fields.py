"""The schema as data: every field's dotted name, type and default, for loading, suggestions and the reference."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from skyrl_train.config.fields.facts import ReadWith, Resume, Usual
from skyrl_train.config.fields.peers import peer_setting
from skyrl_train.errors import Violation
from skyrl_train.registry import TARGET, Seam

T = TypeVar("T")
Rule = Callable[..., Iterable[Violation]]
"""A rule between fields, called with the sections that its parameters name: `(trainer, platform)`; `algorithm` is
`trainer.algorithm`. Parameters with a default are its own."""


@dataclass(frozen=True, kw_only=True)
class SchemaField:
    """One field of the schema."""

    path: str
    """Dotted name from the root, e.g. `trainer.policy.optimizer.lr`."""
    owner: type
    """The dataclass that declares it."""
    name: str
    """Its last part."""
    annotation: Any
    """Resolved type, with `Annotated`."""
    default: Any
    """The root's own default; a nested section's default may differ from its class's."""
    resume: Resume | None
    """Its class on resume: that of its type, else that of the innermost section around it which states one."""
    read_with: tuple[str, ...] = ()
    """Dotted names of settings without which nothing reads it, e.g. `critic.model.path`."""

    @property
    def section(self) -> bool:
        """True for a nested dataclass."""
        return section_of(self.annotation) is not None

    @property
    def open(self) -> bool:
        """True for a mapping, and for a part, which has arguments beside its `_target_`: both take any key."""
        return get_origin(strip(self.annotation)) is Mapping or fact(self.annotation, Seam) is not None


def strip(annotation: Any) -> Any:
    """The type without `Annotated` and without `| None`."""
    if get_origin(annotation) is Annotated:
        return strip(get_args(annotation)[0])
    if is_optional(annotation):
        inner = [part for part in get_args(annotation) if part is not type(None)]
        return strip(inner[0]) if len(inner) == 1 else annotation
    return annotation


def is_optional(annotation: Any) -> bool:
    """True for `X | None`."""
    return get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)


def fact(annotation: Any, kind: type[T]) -> T | None:
    """What an annotation carries of that kind, e.g. its `Range`."""
    facts = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((each for each in facts if isinstance(each, kind)), None)


def section_of(annotation: Any) -> type | None:
    """The dataclass that an annotation nests; None for a plain setting."""
    schema = strip(annotation)
    return schema if isinstance(schema, type) and dataclasses.is_dataclass(schema) else None


@cache
def hints(schema: type) -> Mapping[str, Any]:
    """Resolved annotations of a dataclass, in order of declaration."""
    return get_type_hints(schema, include_extras=True)


def walk(schema: type, default: Any = None, section: SchemaField | None = None) -> Iterator[SchemaField]:
    """Every field, sections before what is in them. `section`: the field that `schema` is the type of; None for a root."""
    default = schema() if default is None else default
    prefix, resume, read_with = (f"{section.path}.", section.resume, section.read_with) if section else ("", None, ())
    for field in dataclasses.fields(schema):
        annotation = hints(schema)[field.name]
        path = prefix + field.name
        condition = fact(annotation, ReadWith)
        entry = SchemaField(
            path=path,
            owner=schema,
            name=field.name,
            annotation=annotation,
            default=getattr(default, field.name),
            resume=fact(annotation, Resume) or resume,
            read_with=read_with if condition is None else (*read_with, f"{path}.{condition.setting}"),
        )
        yield entry
        nested = section_of(annotation)
        if nested is not None:
            yield from walk(nested, entry.default, entry)


def unusual_values(config: object) -> Iterator[tuple[str, float, Usual]]:
    """Every setting of a configuration that is larger than anybody is likely to mean: its name, its value, and why."""
    for entry in walk(type(config)):
        usual = fact(entry.annotation, Usual)
        if usual is not None and (value := attrgetter(entry.path)(config)) > usual.value:
            yield entry.path, value, usual


def recorded(section: T, record: Callable[[str], object], prefix: str = "") -> T:
    """A copy of a section that calls `record` with the dotted name of each setting that is read from it, or from a
    section in it, by methods and properties too."""
    names = {field.name for field in dataclasses.fields(section)}  # type: ignore[arg-type]
    kind = type(section)

    def read(copy: Any, name: str) -> Any:
        value = object.__getattribute__(copy, name)
        if name in names and not dataclasses.is_dataclass(value):
            record(prefix + name)
        return value

    copy: T = object.__new__(type(kind.__name__, (kind,), {"__getattribute__": read}))
    for name in names:
        value = getattr(section, name)
        if dataclasses.is_dataclass(value):
            value = recorded(value, record, f"{prefix}{name}.")
        object.__setattr__(copy, name, value)
    return copy


def is_refused(path: str, refused: Iterable[str]) -> bool:
    """Whether a setting, an entry of it (`a.b[0]`, `a.b.key`) or the section that it is in is among those refused."""
    return any(
        field == path or field.startswith((f"{path}.", f"{path}[")) or path.startswith(f"{field}.") for field in refused
    )


def seam_of(annotation: Any) -> Seam | None:
    """Return the seam of a field that chooses a part, or a list of them; None for another field."""
    seam = fact(annotation, Seam)
    inner = strip(annotation)
    if seam is None and get_origin(inner) is tuple:
        return fact(get_args(inner)[0], Seam)
    return seam


def parts_of(schema: type) -> dict[str, Seam]:
    """Dotted names of all fields that choose a part, or a list of them, and the parts that there are."""
    return {field.path: seam for field in walk(schema) if (seam := seam_of(field.annotation)) is not None}


def defaults(schema: type) -> dict[str, Any]:
    """The schema's defaults as nested plain containers, tuples as lists: what a YAML file would hold."""
    return {key: _plain(value) for key, value in dataclasses.asdict(schema()).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def remedy_for_unknown(path: str, schema: type) -> str:
    """What to write instead of an unknown `path`; empty where nothing is near."""
    for old, now in MOVED.items():
        if path == old or path.startswith(f"{old}."):
            return now.format(key=path.removeprefix(f"{old}.") if path != old else "KEY")
    near, convert = meant_by(path, schema)
    if "=" in near:
        return f"write {near}. {convert}".rstrip(". ")
    return f"did you mean {near}? {convert}".rstrip() if near else convert


def meant_by(path: str, schema: type) -> tuple[str, str]:
    """Return the setting that was most likely meant by an unknown `path`, as other trainers call it or misspelt, and how to
    convert its value; no setting but a sentence where there is nothing to set; both empty where nothing is near."""
    name, convert = peer_setting(path, (field.path for field in walk(schema)))
    if name or convert:
        return name, convert
    return _argument(path, schema) or suggest(path, schema) or "", ""


def _argument(path: str, schema: type) -> str:
    """How the argument of a part is written that an unknown setting beside it names, or nearly; empty where another setting
    beside it is nearer."""
    section, _, name = path.rpartition(".")
    written = {}
    for setting, seam in parts_of(schema).items():
        for part in seam if setting.rpartition(".")[0] == section else ():
            for argument in seam.arguments(part):
                written[f"{part}_{argument}"] = written[argument] = f"{setting}={{{TARGET}:{part},{argument}:VALUE}}"
    settings = [field.name for field in walk(schema) if field.path == f"{section}.{field.name}"]
    near = difflib.get_close_matches(name, [*settings, *written], n=1, cutoff=0.75)
    return written.get(near[0], "") if near else ""


MOVED = {
    "environment.kwargs": "settings of an environment stand beside it: write "
    "environment.env_class={{_target_: NAME, {key}: ...}}",
    "environment.max_workers": "write environment.num_workers",
    "trainer.algorithm.use_rollout_logprobs": "write trainer.algorithm.proximal=behaviour for true, recompute for false",
}
"""Settings that there were, and what to write now."""


_SHORTEST_BEGINNING = 4
"""Letters of a name that may be the beginning of another's."""


def suggest(path: str, schema: type) -> str | None:
    """The dotted name that was most likely meant by an unknown `path`, or None.

    Siblings first (a misspelt key), then the same last part anywhere (a key at the wrong level), siblings that begin like
    it (a key cut short, and misspelt), and a similar last part anywhere; anywhere, the one that shares most parts with
    `path`, then the first in the schema.
    """
    paths = [field.path for field in walk(schema)]
    parent, _, name = path.rpartition(".")
    siblings = {field.rpartition(".")[2]: field for field in paths if field.rpartition(".")[0] == parent}
    for near in difflib.get_close_matches(name, list(siblings), n=1, cutoff=0.75):
        return siblings[near]
    by_name: dict[str, list[str]] = {}
    for candidate in paths:
        by_name.setdefault(candidate.rpartition(".")[2], []).append(candidate)
    if name not in by_name and len(name) >= _SHORTEST_BEGINNING:
        longer = sorted((sibling for sibling in siblings if len(sibling) > len(name)), key=len, reverse=True)
        beginnings = {sibling[: len(name)]: sibling for sibling in longer}  # of several the shortest
        for near in difflib.get_close_matches(name, list(beginnings), n=1, cutoff=0.85):
            return siblings[beginnings[near]]
    near_names = [name] if name in by_name else difflib.get_close_matches(name, list(by_name), n=1, cutoff=0.75)
    if near_names:
        given = set(path.split("."))
        return max(by_name[near_names[0]], key=lambda candidate: len(given & set(candidate.split("."))))
    above = [path.rsplit(".", count)[0] for count in range(1, path.count(".") + 1)]
    whole = difflib.get_close_matches(path, [field for field in paths if field not in above], n=1, cutoff=0.75)
    return whole[0] if whole else None


def nearest(name: str, options: Sequence[str]) -> str | None:
    """The option most like `name`, or one that it is a part of."""
    near = difflib.get_close_matches(name, options, n=1) or [option for option in options if name and name in option]
    return near[0] if near else None
