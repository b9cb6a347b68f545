"""What is read as JSON of other programs."""

from __future__ import annotations

import json

import pytest

from skyrl_train.system.files import parse_strict_json


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a": ', "}"), ('[1, "b", ', "]"), ("[0.5, ", ", null]")])
def test_sixty_four_levels_are_read_and_no_more(begin: str, end: str) -> None:
    whole = f"{begin * 64}1{end * 64}"
    assert parse_strict_json(whole) == json.loads(whole)
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        parse_strict_json(f"{begin * 65}1{end * 65}")


@pytest.mark.parametrize("text", ["[NaN]", '{"a": -Infinity}', b"\xff", "[" * 100_000, "1" * 5000])
def test_what_json_does_not_have_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_strict_json(text)
