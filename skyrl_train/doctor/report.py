"""What is told of a run: the findings as text for a terminal, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.doctor.all_rules import CAUSES, RULES
from skyrl_train.doctor.findings import MAX_FINDINGS, Finding, Rule, diagnose
from skyrl_train.doctor.tables import Tables
from skyrl_train.errors import counted
from skyrl_train.telemetry.reading import Run, find_runs

_WIDTH = 110


def examine(run: Run, own_rules: Mapping[str, Rule] | None = None) -> tuple[list[Finding], Tables]:
    """Return what the rules find in a run, the worst first, and the tables that they read (`tables.problems` says what could
    not be read)."""
    tables = Tables(run)
    return diagnose(tables, {**RULES, **(own_rules or {})}, CAUSES), tables


def problems_of(folder: Path) -> list[tuple[str, str]]:
    """Return what is wrong with the run of a folder, for alerts while it goes on: the rule, and what it finds with its
    remedy; without what follows from another finding."""
    found = [finding for run in find_runs([folder]) for finding in examine(run)[0]]
    return [
        (each.rule, f"{each.what}{'' if each.since is None else f', since step {each.since}'}. {each.remedy}")
        for each in found
        if each.level == "problem" and not each.follows_from
    ]


def as_text(findings: Sequence[Finding], tables: Tables, *, most: int = MAX_FINDINGS) -> str:
    """Return the findings for a person; notes only where nothing worse is found."""
    run = tables.run
    lines = [f"{run.root}: {run.kind} run, {run.state()}, {counted(tables.last_step, 'step')}"]
    worse = [each for each in findings if each.level != "note"]
    shown = (worse or list(findings))[:most]
    if not worse:
        lines.append("nothing is found to be wrong" + (", but" if shown else ""))
    for number, finding in enumerate(shown, start=1):
        lines += ["", *_finding(number, finding)]
    if left := len(worse) - len([each for each in shown if each.level != "note"]):
        lines += ["", f"and {counted(left, 'finding')} more: --all, or --json"]
    lines += [f"not read: {problem}" for problem in tables.problems[:5]]
    return "\n".join(lines)


def as_json(findings: Sequence[Finding], tables: Tables) -> dict[str, Any]:
    """Return the findings as plain types."""
    return {
        "run": str(tables.run.root),
        "kind": tables.run.kind,
        "last_step": tables.last_step,
        "findings": [each.as_json() for each in findings],
        "problems": tables.problems,
    }


def _finding(number: int, finding: Finding) -> list[str]:
    since = "" if finding.since is None else f", since step {finding.since}"
    cause = f"; follows from {finding.follows_from}" if finding.follows_from else ""
    lines = _wrapped(f"{number}. {finding.level}{since}: {finding.what}", "")
    lines += [f"   {finding.rule}, {finding.certainty:.0%} sure{cause}"]
    lines += [
        line for evidence in finding.evidence if _says_something(evidence) for line in _wrapped(evidence, "   - ")
    ]
    for row in finding.rows:
        quote = " ".join(row.quote.split())
        lines += _wrapped(f"{row.purpose} step {row.step} {row.uid}/{row.sample}: {quote!r}", "   > ")
    return lines + _wrapped(f"{finding.remedy}.", "   do: ")


def _says_something(evidence: str) -> bool:
    return not evidence.endswith(": ")


def _wrapped(text: str, first: str) -> list[str]:
    printable = "".join(each if each.isprintable() else "?" for each in text)
    return textwrap.wrap(printable, _WIDTH, initial_indent=first, subsequent_indent=" " * max(3, len(first)))
