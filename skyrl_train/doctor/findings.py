"""What a rule says of a run, and in which order it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from skyrl_train.doctor.tables import Tables
from skyrl_train.doctor.trajectories import Trajectory
from skyrl_train.registry import import_attr
from skyrl_train.telemetry.reading import first_line

Level = Literal["problem", "warning", "note"]
LEVELS: Mapping[Level, int] = {"problem": 0, "warning": 1, "note": 2}
"""The worst first."""
MAX_FINDINGS = 10
_QUOTE = 160


@dataclass(frozen=True, kw_only=True)
class Row:
    """A trajectory that shows it."""

    purpose: str
    step: int
    uid: str
    sample: int
    quote: str
    """What to look at in it."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, or looks so."""

    what: str
    """One sentence."""
    evidence: tuple[str, ...]
    """Values of metrics, counts."""
    remedy: str
    level: Level = "problem"
    since: int | None = None
    """The first step that shows it; None for what holds of the whole run."""
    certainty: float = 0.9
    """Between 0 and 1: how sure the rule is of the cause that it names."""
    rows: tuple[Row, ...] = ()
    rule: str = ""
    """The name of the rule, which `diagnose` fills in."""
    follows_from: str = ""
    """The rule whose finding explains this one, which stands before it."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain types."""
        return asdict(self)


Rule = Callable[[Tables], Iterator[Finding]]
"""Reads a run and yields what it finds; nothing where it cannot know. Its docstring names its source."""


def row_of(trajectory: Trajectory, quote: str | None = None) -> Row:
    """Return the name of a trajectory, with what is quoted: the end of its text, unless another is given."""
    text = trajectory.text if quote is None else quote
    shown = text if len(text) <= _QUOTE else f"...{text[-_QUOTE:]}"
    named = trajectory
    return Row(purpose=named.purpose, step=named.step, uid=named.uid, sample=named.sample, quote=shown)


def rows_of(trajectories: Sequence[Trajectory], most: int = 3) -> tuple[Row, ...]:
    """Return the first of some trajectories as rows."""
    return tuple(row_of(each) for each in trajectories[:most])


def custom_rule(target: str) -> Rule:
    """Return the rule at `package.module:function`. Raises ConfigError where it is none."""
    return cast(Rule, import_attr(target, field="--rule"))


def diagnose(tables: Tables, rules: Mapping[str, Rule], causes: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Return what the rules find, the worst first; what follows from another finding after it.

    Args:
        tables: The run. What could not be read, and a rule that fails, is told in `tables.problems`.
        rules: By their names.
        causes: By the name of a rule those rules whose findings explain its own, the likeliest first.
    """
    found: list[Finding] = []
    for name, rule in rules.items():
        try:
            found += [replace(finding, rule=name) for finding in rule(tables)]
        except Exception as error:  # a rule of the user's, or a file as no rule expects it: the others still speak
            tables.problems.append(f"rule {name} failed: {type(error).__name__}: {first_line(error)}")
    told = {finding.rule for finding in found if finding.level != "note"}
    explained = [
        replace(finding, follows_from=next((cause for cause in causes.get(finding.rule, ()) if cause in told), ""))
        for finding in found
    ]
    return sorted(explained, key=lambda each: (LEVELS[each.level], bool(each.follows_from), -each.certainty))
