from __future__ import annotations

from pathlib import Path

import pytest

from scripts.studies.fuzz_settings import answer, answers_of, cases, difference

HERE = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_loader_says_of_drawn_settings_what_it_said_before() -> None:
    drawn = cases(200, 50, seed=1)
    said = answers_of(HERE, drawn)
    assert said == [answer(case) for case in drawn]
    refused = [text for _, text in said if text]
    assert len(drawn) / 4 < len(refused) < len(drawn)
    assert not [line for text in refused for line in text if "Error: " in line], "the loader broke"


def test_kinds_of_differences() -> None:
    wrong = ("defaults", ["seed: must be an integer; got 'x'. Try seed=0"])
    assert difference(("a", []), ("a", [])) == ""
    assert difference(wrong, ("a", [])) == "accepted now"
    assert difference(("a", []), wrong) == "refused now"
    assert difference(wrong, ("defaults", ["seed: is no integer; got 'x'. Try seed=0"])) == "other words"
    assert difference(wrong, ("defaults", [])) == "accepted now"
    assert difference(wrong, ("defaults", [*wrong[1], "seeds: is not a setting"])) == "other or more problems"
    assert difference(("a", []), ("b", [])) == "other values"
