"""Every metric is declared beside the code that measures it; real runs are held to that in tests/trainers."""

from __future__ import annotations

import ast
import mimetypes
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.make_metrics_reference import ROOT, reference
from skyrl_train.telemetry.declared import Declared, declaration_of, declarations, read_table, undeclared

_METRIC = re.compile(r"[a-z_]+(/[a-zA-Z0-9_@<>]+)+")


def test_a_line_has_five_cells_and_goes_on_where_it_is_indented() -> None:
    table = """
a/{mean,max} | s | KL(p || q) of
    it. | | TRL `a`
b | | Told.
"""
    assert read_table(table) == (
        Declared("a/{mean,max}", "s", "KL(p || q) of it.", "", "TRL `a`"),
        Declared("b", "", "Told."),
    )


@pytest.mark.parametrize("line", ["a | parsecs | Far.", "a | s | ", " | s | Nameless."])
def test_a_line_without_name_meaning_or_known_unit_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="needs a meaning, and a unit"):
        read_table(line)


def test_a_name_stands_for_its_alternatives_and_families() -> None:
    one = Declared("{policy,critic}/x{,_max}/<name>", "", "")
    assert one.names == ("policy/x/<name>", "policy/x_max/<name>", "critic/x/<name>", "critic/x_max/<name>")


def test_a_name_of_its_own_goes_before_a_family_and_a_narrow_family_before_a_wide_one() -> None:
    found = [
        declaration_of(name) for name in ("failures/fraction", "failures/reward_error", "env/agent/repeated", "env/x")
    ]
    assert [one.name for one in found if one] == [
        "failures/fraction",
        "failures/<kind>",
        "env/agent/<name>",
        "env/<name>",
    ]
    assert undeclared(["reward/mean", "reward/median", "eval/data_source=a/b/accuracy"]) == ["reward/median"]


def test_no_name_is_declared_twice() -> None:
    names = [name for each in declarations().values() for one in each for name in one.names]
    assert sorted(set(names)) == sorted(names)


def test_the_document_in_the_repository_is_up_to_date_and_has_each_line_once() -> None:
    written = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written == reference(), "run: python scripts/make_metrics_reference.py"
    every = [one.name for each in declarations().values() for one in each]
    assert [written.count(f"| `{name}` |") for name in every] == [1] * len(every)


def test_declarations_are_read_without_the_modules_that_measure() -> None:
    reading = "from skyrl_train.telemetry.declared import declarations; declarations()"
    code = f"import sys; {reading}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _keys(source: str) -> Iterator[str]:
    """Names of metrics that a module writes down as keys, with `<x>` for what is filled in."""
    for node in ast.walk(ast.parse(source)):
        keys = node.keys if isinstance(node, ast.Dict) else [node.slice] if isinstance(node, ast.Subscript) else []
        for key in keys:
            parts = key.values if isinstance(key, ast.JoinedStr) else [key]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "<x>" for part in parts if part)
            if _METRIC.fullmatch(text) and not text.startswith("<x>"):
                yield text


@pytest.mark.slow
def test_whatever_a_module_writes_down_as_the_name_of_a_metric_is_declared() -> None:
    """Also of code that no run in the tests reaches."""
    folders = ("algorithms", "cluster", "data", "inference", "learner", "memory", "rollout", "telemetry", "trainers")
    package = ROOT / "skyrl_train"
    files = [path for folder in folders for path in (package / folder).rglob("*.py")]
    found = {name: path.name for path in files for name in _keys(Path(path).read_text(encoding="utf-8"))}
    assert len(found) > 60
    declared = [name for each in declarations().values() for one in each for name in one.names]

    def is_declared(name: str) -> bool:
        filled_in = ".+".join(map(re.escape, name.split("<x>")))
        return not undeclared([name]) or any(re.fullmatch(filled_in, each) for each in declared)

    no_metrics = {name for name in found if mimetypes.guess_extension(name)}  # such as text/html
    assert {name: where for name, where in found.items() if not is_declared(name) and name not in no_metrics} == {}
