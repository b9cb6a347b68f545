"""Counts which of the recorded runs are named, and what gives a run away."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from scripts.studies.diseases import plants
from scripts.studies.diseases.archive import KEPT
from scripts.studies.diseases.plants import PLANTS, Plant
from scripts.studies.diseases.recording import numbers
from scripts.studies.diseases.settings import VARIED, Name
from skyrl_train.doctor import LIMITS, RULES, Finding, Tables, examine
from skyrl_train.telemetry.reading import Run, find_runs, settings_of

_FACTORS = {"half": 0.5, "3/4": 0.75, "itself": 1.0, "1.5": 1.5, "double": 2.0}
_OWN = {name for name, each in vars(plants).items() if getattr(each, "__module__", "") == plants.__name__}
_TELLING = re.compile("|".join(["plants[.]py", *(name for name in {*PLANTS, *_OWN} if "_" in name.strip("_"))]))
"""Words that no run writes unless it says what was planted: names of plants, and of their functions."""


@dataclass(frozen=True, kw_only=True)
class Count:
    """How many of a setting's runs are named as they should be."""

    diseases: int
    named: int
    """Diseases all of whose runs have the right first cause."""
    healthy: int
    called_ill: Sequence[str]
    """Healthy runs with a finding above a note."""
    missed: Sequence[str]
    """Plants that something else is said of first, that nothing is said of, or that were not recorded."""

    def __str__(self) -> str:
        return (
            f"{self.named} of {self.diseases} diseases named rightly; {len(self.called_ill)} of {self.healthy} healthy runs "
            "called ill"
        )


def named(plant: Plant, findings: Sequence[Finding], audit: Any) -> tuple[str, bool]:
    """Return what is told first of a run worse than a note, and whether it is right."""
    if plant.by_audit:
        differing = [line["what"] for line in audit or () if isinstance(line, dict) and not line["holds"]]
        return (f"audit: {differing[0]}" if differing else ""), bool(differing) and differing[0] in plant.named_by
    worse = [each.rule for each in findings if each.level != "note"]
    if plant.named_by:
        return (worse[0] if worse else ""), bool(worse) and worse[0] in plant.named_by
    differing = [line["what"] for line in audit or () if isinstance(line, dict) and not line["holds"]]
    return ", ".join(worse + [f"audit: {what}" for what in differing]), not worse and not differing


def recorded(folder: Path, setting: Name) -> dict[str, Run]:
    """Return the runs that are there, by what was planted."""
    key = {number: name for name, number in numbers(setting).items()}
    return {
        key[run.root.name]: run
        for run in find_runs(sorted(each for each in (folder / setting).iterdir() if each.is_dir()))
    }


def measured(folder: Path, setting: Name) -> str:
    """Return, as Markdown, what runs were like at first and at last, by metrics that the study's author looks at and not by
    rules: whether a healthy run of a setting is one."""
    names = ("reward/mean", "policy/entropy", "stop/length", "group/zero_variance", "critic/explained_variance")
    lines = [f"| run | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for name, run in sorted(recorded(folder, setting).items()):
        series = map(Tables(run).series, names)
        cells = (f"{each.first(3):.3g} to {each.last():.3g}" if len(each) else "-" for each in series)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def giveaways(runs: Mapping[str, Run]) -> dict[str, list[str]]:
    """Return what might tell a run's plant: values of an ill one's configuration that no healthy run of its setting has,
    files that say more than the doctor reads, and words in any file."""
    lines = {
        name: {
            f"{setting}={value}"
            for setting, value in settings_of(run, []).items()
            if not setting.startswith(tuple(VARIED)) and not _is_kept_tokenizer(value)
        }
        for name, run in runs.items()
    }
    healthy = set().union(*(own for name, own in lines.items() if not PLANTS[name].disease), set())
    found = {name: sorted(own - healthy) for name, own in lines.items() if PLANTS[name].disease}
    for name, run in runs.items():
        told = [each.name for each in run.root.iterdir() if each.name not in KEPT]
        for file in run.root.rglob("*"):
            if file.is_file():
                told += _TELLING.findall(file.read_bytes().decode(errors="ignore").replace(str(run.root), ""))
        found[name] = [*found.get(name, ()), *sorted(set(told))]
    return {name: told for name, told in found.items() if told}


def _is_kept_tokenizer(value: object) -> bool:
    """Of a tokenizer that a plant exchanges the configuration has a path with a sum for a name, as for any object."""
    return value is None or "/tokenizers/" in str(value)


def roc(folder: Path) -> str:
    """Return, as Markdown, for each rule and some values of its limit in how many of the runs that it is to name, and of the
    healthy ones, it speaks above a note: runs of all settings. Rules that say the same at all values follow the table."""
    tables = {
        (setting, name): Tables(run) for setting in _there(folder) for name, run in recorded(folder, setting).items()
    }
    healthy = [key for key in tables if not PLANTS[key[1]].disease]
    lines = [f"| rule | limit | {' | '.join(_FACTORS)} |", f"|---|---|{'---|' * len(_FACTORS)}"]
    alike: dict[str, list[str]] = {}
    for rule, limit in sorted(LIMITS.items()):
        own = [key for key in tables if rule in PLANTS[key[1]].named_by]
        cells = []
        for factor in _FACTORS.values():
            LIMITS[rule] = limit * factor
            spoken = {key for key in (*own, *healthy) if _speaks(rule, tables[key])}
            cells.append(f"{len(spoken & set(own))}/{len(own)}, {len(spoken & set(healthy))}/{len(healthy)}")
        LIMITS[rule] = limit
        if len(set(cells)) == 1:
            alike.setdefault(cells[0], []).append(f"`{rule}` ({limit:g})")
        else:
            lines.append(f"| `{rule}` | {limit:g} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {cell}: {', '.join(rules)}" for cell, rules in alike.items())])


def _there(folder: Path) -> list[Name]:
    return [name for name in get_args(Name) if (folder / name).is_dir()]


def _speaks(rule: str, tables: Tables) -> bool:
    return any(finding.level != "note" for finding in RULES[rule](tables))


def table(folder: Path) -> str:
    """Return what was named first in each setting, as Markdown: what is wrong in bold."""
    settings = _there(folder)
    found = {setting: results(folder, setting) for setting in settings}
    lines = [f"| disease | run | {' | '.join(settings)} |", f"|---|---|{'---|' * len(settings)}"]
    for name, plant in sorted(PLANTS.items(), key=lambda each: (each[1].disease == "", each[1].disease, each[0])):
        cells = []
        for setting in settings:
            told, is_right = found[setting].get(name, ("not recorded", False))
            cells.append((told or "-") if is_right else f"**{told or 'nothing'}**")
        shown = f"{plant.disease or 'healthy'}{' (audit)' if plant.by_audit else ''}"
        lines.append(f"| {shown} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def results(folder: Path, setting: Name, *, say: bool = False) -> dict[str, tuple[str, bool]]:
    """Return for each run that is there what was named, and whether rightly; `say` prints all that is found."""
    found, runs = {}, recorded(folder, setting)
    for name, run in runs.items():
        audit = folder / f"{setting}_audits" / f"{run.root.name}.json"
        findings, tables = examine(run)
        told = json.loads(audit.read_text()) if audit.is_file() else None
        found[name] = named(PLANTS[name], findings, told)
        if say:
            rest = ", ".join(f"{each.rule}({each.level[0]}{each.certainty:.2f})" for each in findings[:6])
            state = "ok  " if found[name][1] else "MISS"
            print(f"{state} {run.root.name} {name:22} {found[name][0]:28} {rest}", *tables.problems[:1], flush=True)
    for name, told_by in giveaways(runs).items() if say else ():
        print(f"GIVEN AWAY {name}: {told_by[:5]}")
    return found


def count(found: Mapping[str, tuple[str, bool]]) -> Count:
    """Count a setting's results."""
    wrong = [name for name in PLANTS if not found.get(name, ("", False))[1]]
    diseases = {plant.disease for plant in PLANTS.values()} - {""}
    return Count(
        diseases=len(diseases),
        named=len(diseases - {PLANTS[name].disease for name in wrong}),
        healthy=sum(not plant.disease for plant in PLANTS.values()),
        called_ill=[name for name in wrong if not PLANTS[name].disease],
        missed=[name for name in wrong if PLANTS[name].disease],
    )
