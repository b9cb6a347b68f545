"""docs/migrating.md against the settings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyrl_train.config import Config, SFTConfig
from skyrl_train.config.fields import PEER_NAMES, peer_setting, walk

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXISTING = set(re.findall(r"^\| `([\w.]+)`", (DOCS / "configuration.md").read_text(encoding="utf-8"), flags=re.M))


def ours() -> set[str]:
    """Settings in the last column of the tables of settings, and in the examples."""
    page = (DOCS / "migrating.md").read_text(encoding="utf-8").split("## Sizes")[1]
    named = set(re.findall(r"\b((?:trainer|generator)\.[\w.]+)=\d", page))
    for line in page.splitlines():
        if line.startswith(("| `", "| that")):
            named |= set(re.findall(r"`(\w+(?:\.\w+)+)(?:=\w+)?`", line.rsplit("|", 2)[1]))
    return named


@pytest.mark.parametrize("setting", sorted(ours()))
def test_a_setting_that_the_page_names_exists(setting: str) -> None:
    assert setting in EXISTING


def test_the_page_names_many() -> None:
    assert len(ours()) > 60


def rows() -> list[tuple[str, str]]:
    """The left and the last column of the page's tables."""
    lines = (DOCS / "migrating.md").read_text(encoding="utf-8").splitlines()
    return [(line.split("|")[1], line.rsplit("|", 2)[1]) for line in lines if line.startswith("| `")]


@pytest.mark.parametrize("name", sorted(PEER_NAMES))
def test_a_name_that_is_understood_has_a_row_with_the_same_setting(name: str) -> None:
    setting = PEER_NAMES[name].settings.split(" ")[0]
    of_the_name = [ours for theirs, ours in rows() if re.search(rf"[`.]{re.escape(name)}[`=]", theirs)]
    assert any(f"`{setting}`" in ours for ours in of_the_name), f"no row of {name} names {setting}"


@pytest.mark.parametrize("name", sorted(PEER_NAMES))
def test_what_a_name_is_here_exists_in_a_configuration(name: str) -> None:
    meant = PEER_NAMES[name].settings.split(" ")
    found: set[str] = set()
    for schema in (Config, SFTConfig):
        existing = {field.path for field in walk(schema)}
        known = [each for each in meant if each in existing or "=" in each]
        assert peer_setting(f"some.prefix.{name}", existing)[0] == (known[0] if known else "")
        found |= {*known}
    assert found == {*meant}
