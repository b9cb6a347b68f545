"""Against the public functions of verl, TRL, OpenRLHF and SkyRL: a few draws here, 200 of them among the slow tests.

What agrees must agree, and what differs on purpose must still differ. Skipped where a trainer is not installed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.compare_trainers import key, rows_beside
from tests.other_trainers.comparisons import COMPARISONS, Comparison, largest_errors

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
EVERY = pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda c: f"{c.ours} | {c.theirs}")


def check(comparison: Comparison, num_draws: int) -> None:
    try:
        errors = largest_errors(comparison, num_draws)
    except ImportError as error:
        pytest.skip(str(error))
    if comparison.deviates:
        assert max(errors) > 100 * comparison.tolerance
    else:
        assert max(errors) <= comparison.tolerance


@pytest.mark.slow
@EVERY
def test_200_draws(comparison: Comparison) -> None:
    check(comparison, 200)


@pytest.mark.parametrize("comparison", [c for c in COMPARISONS if c.theirs.startswith("TRL")], ids=lambda c: c.ours)
def test_a_few_draws(comparison: Comparison) -> None:
    check(comparison, 5)


def test_the_document_has_every_comparison_and_its_numbers_say_what_it_claims() -> None:
    for comparison in COMPARISONS:
        row = re.search(
            rf"^{re.escape(key(comparison))} ([\d.e+-]+)(?:, ([\d.e+-]+))?(?:: (.+))? \|$",
            rows_beside(comparison.theirs.partition(": ")[0], DOCUMENT),
            flags=re.MULTILINE,
        )
        assert row, f"{comparison.ours} beside {comparison.theirs} is not in docs/algorithms.md"
        largest = max(float(number) for number in row.groups()[:2] if number)
        assert (largest > comparison.tolerance) == bool(comparison.deviates)
        assert (row.group(3) or "") == comparison.deviates
