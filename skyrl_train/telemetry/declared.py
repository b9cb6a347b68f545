"""What each metric is: declared beside the code that measures it, and collected here.

A module declares its metrics in a table of text, a metric to each line that is not indented, whose cells are parted by bars:

    DECLARED_METRICS = '''
    reward/{mean,std} | reward | Total rewards of trajectories. | evaluations | TRL `reward`
    '''

The cells are name, unit, meaning, which records have it (empty: those of every training step), and what TRL, verl or SkyRL
call it: the same, or what stands nearest. A name stands for several where it has alternatives in braces, and for a family
where a word stands in angle brackets: `env/<name>`. Tables are read from the source, so that whoever shows them
(`docs/metrics.md`, a viewer) imports neither torch nor any other part of a run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_TABLE = "DECLARED_METRICS"
_UNITS = ("", "tokens", "tokens/s", "s", "nats", "GiB", "reward", "share", "count")
"""Empty: a number without one. `share`: 0 to 1."""
_ALTERNATIVES = re.compile(r"\{([^}]*)\}")
_FAMILY = re.compile(r"<[a-z_]+>")


@dataclass(frozen=True)
class Declared:
    """A metric, or several that are told of together: the cells of a line."""

    name: str
    unit: str
    meaning: str
    when: str = ""
    also: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that it stands for, families in angle brackets."""
        found = [self.name]
        while (choice := _ALTERNATIVES.search(found[0])) is not None:
            found = [name.replace(choice.group(), one, 1) for name in found for one in choice.group(1).split(",")]
        return tuple(found)

    @property
    def patterns(self) -> tuple[str, ...]:
        """A regular expression for each of the names."""
        return tuple(".+".join(map(re.escape, _FAMILY.split(name))) for name in self.names)


def read_table(table: str) -> tuple[Declared, ...]:
    """The metrics of a table. Raises ValueError where a line lacks name, unit or meaning."""
    lines = re.sub(r"\n\s+", " ", table.strip()).split("\n")
    found = tuple(Declared(*(cell.strip() for cell in re.split(r"(?:^| )\|(?= |$)", line))) for line in lines)
    for one in found:
        if not one.name or not one.meaning or one.unit not in _UNITS:
            raise ValueError(f"metric {one.name!r}: needs a meaning, and a unit of {_UNITS}, which {one.unit!r} is not")
    return found


@cache
def declarations() -> dict[str, tuple[Declared, ...]]:
    """By module (`trainers/step_metrics.py`), in the order of their names. Raises ValueError as `read_table` does."""
    found: dict[str, tuple[Declared, ...]] = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if f"\n{_TABLE} = " in source:
            for statement in ast.parse(source).body:
                if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == _TABLE:
                    found[path.relative_to(_PACKAGE).as_posix()] = read_table(ast.literal_eval(statement.value))
    return found


@cache
def _patterns() -> list[tuple[str, Declared]]:
    """Of all metrics; those of families behind others, short ones last."""
    every = [(pattern, one) for each in declarations().values() for one in each for pattern in one.patterns]
    return sorted(every, key=lambda pair: (".+" in pair[0], -len(pair[0])))


def declaration_of(metric: str) -> Declared | None:
    """What is declared of a record's `metric`; of families the one that says most of its name."""
    return next((one for pattern, one in _patterns() if re.fullmatch(pattern, metric)), None)


def undeclared(metrics: Iterable[str]) -> list[str]:
    """The names that nothing declares."""
    return sorted(name for name in set(metrics) if declaration_of(name) is None)
