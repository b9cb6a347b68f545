"""The bundled sums: every pair of numbers up to 20 once, some of them held out."""

from __future__ import annotations

import re

from skyrl_train.config.data import DataConfig
from skyrl_train.data.rows import find_sources, read_rows

NUMBERS = range(21)


def pairs(split: str) -> list[tuple[int, int]]:
    found = []
    (source,) = find_sources([f"builtin:sums/{split}"])
    for row in (each.values for each in read_rows(source)):
        asked = re.fullmatch(r"What is (\d+) \+ (\d+)\?", row["prompt"])
        assert asked is not None
        found.append((int(asked[1]), int(asked[2])))
        assert row["answer"] == str(sum(found[-1]))
    return found


def test_each_pair_is_asked_once_and_200_are_held_out() -> None:
    train, held_out = pairs("train"), pairs("validation")
    assert sorted(train + held_out) == [(a, b) for a in NUMBERS for b in NUMBERS]
    assert len(held_out) == 200
    assert DataConfig(train=("builtin:sums/train",)).held_out == ("builtin:sums/validation",)
