"""docs/migrating.md against the settings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
