from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.errors import byte_size, counted, every, three_digits


@pytest.mark.parametrize(
    ("count", "name", "shown"),
    [(1, "step", "1 step"), (0, "step", "0 steps"), (2, "batch", "2 batches"), (3, "trajectory", "3 trajectories")],
)
def test_one_thing_has_another_form_than_several(count: int, name: str, shown: str) -> None:
    assert counted(count, name) == shown
    assert (every(1, "step"), every(4, "step")) == ("every step", "every 4 steps")


def test_no_size_is_written_with_a_power_of_ten() -> None:
    sizes = (512, 999, 1000, 999_499, 999_500, 999_999, 1_000_000, 3_930_000, 5 * 10**15)
    shown = ["512 B", "999 B", "1 kB", "999 kB", "1 MB", "1 MB", "1 MB", "3.93 MB", "5,000 TB"]
    assert [byte_size(size) for size in sizes] == shown
    assert [three_digits(value) for value in (0.0123, 999.4, 999.5, 1024.4)] == ["0.0123", "999", "1,000", "1,024"]


PACKAGE = Path(__file__).parents[2] / "skyrl_train"
THINGS = re.compile(
    r" (steps|rows|trajectories|samples|prompts|turns|batches|examples|evaluations|groups|entries|lines)\b"
)
NOT_COUNTED = re.compile(r"(=|\b(of|for|the|its|these|all|than|most|least|by|to) )$")
"""`{n} of {total} rows`, `max_turns={n} turns`, `the 4 turns`: what is right of one thing as well, or of a setting."""


def unchecked_plurals(source: str) -> Iterator[str]:
    """The f-strings of a module in which a number stands before a plural whatever it is."""
    for string in ast.walk(ast.parse(source)):
        values = string.values if isinstance(string, ast.JoinedStr) else []
        for before, value, after in zip([ast.Constant("of "), *values], values, values[1:]):
            counts = (
                isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant) and THINGS.match(after.value)
            )
            led = isinstance(before, ast.Constant) and NOT_COUNTED.search(str(before.value))
            is_fixed = isinstance(value, ast.FormattedValue) and ast.unparse(value.value).rpartition(".")[2].isupper()
            if counts and not led and not is_fixed:
                yield ast.unparse(string)


def test_a_plural_behind_a_number_without_the_helper_is_found() -> None:
    assert list(unchecked_plurals('f"made {count} steps"')) == ["f'made {count} steps'"]
    right = "f\"{counted(count, 'step')} of {total} rows, data.max_turns={turns} turns, at most {_MOST} steps\""
    assert list(unchecked_plurals(right)) == []


@pytest.mark.parametrize("package", ["runs", "data", "rollout", "trainers", "telemetry", "capsules", "batch", "view"])
def test_no_message_says_one_steps(package: str) -> None:
    found = {str(path): list(unchecked_plurals(path.read_text())) for path in sorted((PACKAGE / package).rglob("*.py"))}
    assert {path: strings for path, strings in found.items() if strings} == {}
