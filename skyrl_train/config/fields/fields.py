"""The schema as data: every field's dotted name, type and default, and the facts that its type carries: its range, what a
change of it means to a run that goes on from a checkpoint, and the kinds of other settings that it is for.

    batch_size: Forks[PositiveInt] = 32

is a setting of at least 1 whose change makes another run. A section carries a class too, which holds for those of its
fields that state none: `eval_sampling: Free[SamplingConfig]`.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from skyrl_train.errors import Violation
from skyrl_train.registry import Reads, Seam

T = TypeVar("T")
Rule = Callable[..., Iterable[Violation]]
"""A rule between fields, called with the sections that its parameters name: `(trainer, platform)`; `algorithm` is
`trainer.algorithm`. Parameters with a default are its own."""


class Resume(Enum):
    """What a changed setting means to a run that goes on from a checkpoint; the value is its name in the reference."""

    FREE = "free"
    """Nothing that is learnt depends on it: what is shown, kept or evaluated, deadlines, addresses, checks."""
    LAYOUT = "layout"
    """It moves work between ranks, engines and micro-batches: rounding differs, and nothing else. The run says so."""
    FORKS = "forks"
    """It makes another run of it, which may begin at the checkpoint (`trainer.resume_mode=fork`)."""
    FIXED = "fixed"
    """Shapes of the saved tensors, or what token ids mean, follow from it: no run can begin there with another value."""


class ForksWhere(Enum):
    """Where a setting that may otherwise change makes another run of it."""

    SCHEDULE_ENDS = "a learning-rate schedule ends with the run"
    DOCUMENTS_CLOSE_STEPS = "`trainer.docs_per_step` closes the steps"


@dataclass(frozen=True)
class Interchangeable:
    """Values of a setting that forks between which a change is a matter of layout."""

    values: tuple[Any, ...]
    reason: str


@dataclass(frozen=True)
class ReadWith:
    """On a setting, or on a section for all that is in it: the kinds of another setting with which anything reads it.

    A run that goes on compares what is read, and the reference says what a setting is for.
    """

    setting: str
    """The other setting: its dotted name, or behind a dot its name from the section on that declares this one, `.rank`."""
    kinds: tuple[Any, ...] = ()
    """Values of it with which this one is read, as it is with any custom part. None named: all but 0, false and empty."""
    reads: str = ""
    """In place of kinds: a column or a fact of `declarations.Reads` that the chosen part declares, a custom one too."""
    write: str = ""
    """What to type for such a kind where that is not the setting's own name: a choice of a group, an example."""


@dataclass(frozen=True)
class Of(ReadWith):
    """As `ReadWith`, of what no preset states for a kind that another file may change: with other kinds it is refused
    unless it has its default."""

    values: tuple[Any, ...] = ()
    """Values of this setting that need the kind, where others are for any."""
    why: str = ""
    """What completes the message: why the other kinds do nothing with it."""


Free = Annotated[T, Resume.FREE]
LayoutOnly = Annotated[T, Resume.LAYOUT]
Forks = Annotated[T, Resume.FORKS]
Fixed = Annotated[T, Resume.FIXED]
EndsSchedule = Annotated[T, Resume.FREE, ForksWhere.SCHEDULE_ENDS]
"""Moves the end of the run, with which the learning rate may end."""
CutsRows = Annotated[T, Resume.LAYOUT, ForksWhere.DOCUMENTS_CLOSE_STEPS]
"""Decides which rows are computed together, and with that when a step has its documents."""


@dataclass(frozen=True)
class Range:
    """A closed interval; `exclusive_min` and `exclusive_max` leave its ends out. None is unbounded."""

    min: float | None = None
    max: float | None = None
    exclusive_min: bool = False
    exclusive_max: bool = False

    def holds(self, value: float) -> bool:
        """False for values outside and for NaN."""
        if self.min is not None and not (value > self.min if self.exclusive_min else value >= self.min):
            return False
        return self.max is None or (value < self.max if self.exclusive_max else value <= self.max)

    def __str__(self) -> str:
        low = "" if self.min is None else f"{'greater than' if self.exclusive_min else 'at least'} {self.min:g}"
        high = "" if self.max is None else f"{'below' if self.exclusive_max else 'at most'} {self.max:g}"
        return " and ".join(part for part in (low, high) if part)


@dataclass(frozen=True)
class Most:
    """The largest value with which anything could work: beyond it a slip of the hand is refused."""

    value: float
    why: str
    """Completes `must be at most ...: `."""

    def holds(self, value: float) -> bool:
        return value <= self.value

    def __str__(self) -> str:
        return f"at most {self.value:g}: {self.why}"


@dataclass(frozen=True)
class Usual:
    """The largest value that somebody is likely to mean: beyond it the run, and its plan, say so."""

    value: float
    why: str


ANY_RUN = Most(10**9, "no run gets through more")
ANY_CLUSTER = Most(100_000, "no cluster has room for more")
ANY_BATCH = Most(10**7, "no step holds more")
PositiveInt = Annotated[int, Range(1), ANY_RUN]
NonNegativeInt = Annotated[int, Range(0), ANY_RUN]
PositiveCount = Annotated[int, Range(1), ANY_CLUSTER]
"""Of processes, devices or nodes."""
NonNegativeCount = Annotated[int, Range(0), ANY_CLUSTER]
BatchSize = Annotated[int, Range(1), ANY_BATCH]
"""Of prompts, samples or rows."""
NonNegativeFloat = Annotated[float, Range(0.0)]
PositiveFloat = Annotated[float, Range(0.0, exclusive_min=True)]
Fraction = Annotated[float, Range(0.0, 1.0)]
Seconds = Annotated[float, Range(0.0, exclusive_min=True), Most(10**9, "nobody waits for 30 years")]
LayoutName = Literal["padded", "packed", "prefix_shared"]
LayoutChoice = Literal["padded", "packed", "prefix_shared", "auto"]


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
    read_with: tuple[tuple[str, ReadWith], ...] = ()
    """The settings whose kind decides whether anything reads it, by dotted name, those of its sections first."""

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
    return next(iter(facts(annotation, kind)), None)


def facts(annotation: Any, kind: type[T]) -> tuple[T, ...]:
    """All that an annotation carries of that kind."""
    carried = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return tuple(each for each in carried if isinstance(each, kind))


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
        own = (
            (prefix + each.setting[1:] if each.setting.startswith(".") else each.setting, each)
            for each in facts(annotation, ReadWith)
        )
        entry = SchemaField(
            path=path,
            owner=schema,
            name=field.name,
            annotation=annotation,
            default=getattr(default, field.name),
            resume=fact(annotation, Resume) or resume,
            read_with=tuple((setting, each) for setting, each in (*read_with, *own) if setting != path),
        )
        yield entry
        nested = section_of(annotation)
        if nested is not None:
            yield from walk(nested, entry.default, entry)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What must be chosen for a setting to be read by anything."""

    setting: str
    """Where it is chosen: a dotted name."""
    of: ReadWith
    seam: Seam | None
    """The parts that are chosen from, if it is one."""

    @property
    def is_of_values(self) -> bool:
        """Whether some values of the setting alone need it."""
        return isinstance(self.of, Of) and bool(self.of.values)

    @property
    def names(self) -> tuple[Any, ...]:
        """The built-in kinds; none where all but 0, false and empty ones are meant."""
        if not self.of.reads or self.seam is None:
            return self.of.kinds
        return tuple(name for name, each in self.seam.builtins.items() if _declares(each.reads, self.of.reads))

    def is_chosen(self, chosen: Any) -> bool:
        """Whether something reads the setting where the other one has this value."""
        if self.seam is None:
            return chosen in self.names if self.names else bool(chosen)
        if self.of.reads:
            return _declares(self.seam.reads(chosen), self.of.reads)
        name = self.seam.name_of(chosen)
        return name in self.names or name not in self.seam.builtins

    def with_value(self, value: object) -> str:
        """`strategy=fsdp2`: the other setting, or the group that chooses it, with a value."""
        return f"{_GROUPS.get(self.setting, self.setting)}={value}"

    @property
    def written(self) -> tuple[str, ...]:
        """`strategy=fsdp2`, `strategy=ddp`, or `trainer.docs_per_step`: what to choose, each as it is typed."""
        if self.names:
            return tuple(self.with_value(each if isinstance(each, str) else str(each).lower()) for each in self.names)
        return (self.of.write if "=" in self.of.write and "." not in self.of.write else self.setting,)


_GROUPS = {"generator.backend": "generator", "placement.backend": "placement", "strategy.name": "strategy"}
"""Settings that a group of nearly their name chooses."""


def _declares(reads: Reads, name: str) -> bool:
    return name in reads.columns or getattr(reads, name, False) is True


@cache
def kinds_of(schema: type) -> Mapping[str, tuple[SchemaField, tuple[Kind, ...]]]:
    """By dotted name, each setting that belongs to a kind of another, and what must be chosen for it."""
    seams = parts_of(schema)
    return {
        field.path: (field, tuple(Kind(setting=name, of=of, seam=seams.get(name)) for name, of in field.read_with))
        for field in walk(schema)
        if field.read_with and not field.section
    }


def kind_sentences(field: SchemaField, schema: type) -> Iterator[str]:
    """What must be chosen for a setting by its own declaration, beside what its section says: `For `strategy=ddp|fsdp2`.`"""
    _, kinds = kinds_of(schema).get(field.path, (field, ()))
    for kind in (each for each in kinds if each.of in facts(field.annotation, ReadWith)):
        first, _, _ = kind.written[0].partition("=")
        written = f"`{'|'.join([kind.written[0], *(each.removeprefix(f'{first}=') for each in kind.written[1:])])}`"
        values = [str(each).lower() for each in kind.of.values] if isinstance(kind.of, Of) else []
        yield f"{' or '.join(values)} for {written} alone." if values else f"For {written}."


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


def parts_of(schema: type) -> Mapping[str, Seam]:
    """Dotted names of all fields that choose a part, or a list of them, and the parts that there are."""
    return _parts_of(schema)


@lru_cache(maxsize=64)  # a copy that records what is read of it has a class of its own
def _parts_of(schema: type) -> Mapping[str, Seam]:
    """Find them once: each run asks for them five times, and to walk through all fields takes a hundredth of a second."""
    found = {field.path: seam for field in walk(schema) if (seam := seam_of(field.annotation)) is not None}
    return types.MappingProxyType(found)


def defaults(schema: type) -> dict[str, Any]:
    """The schema's defaults as nested plain containers, tuples as lists: what a YAML file would hold."""
    return {key: _plain(value) for key, value in dataclasses.asdict(schema()).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value
