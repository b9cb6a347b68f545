"""docs/migrating.md against the settings that exist."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.make_migration_page import PAGE, with_tables
from skyrl_train.config import Config, SFTConfig
from skyrl_train.config.fields import TRAINERS, peer_rows, remedy_for_unknown, walk
from skyrl_train.runs.cli.command_line import preflight

EXISTING = {field.path for schema in (Config, SFTConfig) for field in walk(schema)}
PEER_NAMES = {name: here for here in peer_rows() for names in here.names.values() for name in names}


@pytest.fixture
def refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, str]]:
    """What the command line prints of each setting that it refuses."""
    monkeypatch.chdir(tmp_path)

    def refused(*arguments: str) -> dict[str, str]:
        with pytest.raises(SystemExit):
            preflight([*arguments], config_name="config")
        lines = capsys.readouterr().err.splitlines()[1:]
        return {line.removeprefix("  - ").partition(":")[0]: line for line in lines}

    return refused


def ours() -> set[str]:
    """Settings in the first column of the table, and in the examples."""
    page = PAGE.read_text(encoding="utf-8").split("## Sizes")[1]
    named = set(re.findall(r"\b((?:trainer|generator)\.[\w.]+)=\d", page))
    for line in page.splitlines():
        if line.startswith("| `"):
            named |= set(re.findall(r"`(\w+(?:\.\w+)+)(?:=\w+)?`", line.split("|", 2)[1]))
    return named


@pytest.mark.parametrize("setting", sorted(ours()))
def test_a_setting_that_the_page_names_exists(setting: str) -> None:
    assert setting in EXISTING


def test_the_page_names_many() -> None:
    assert len(ours()) > 60


def test_the_table_is_that_of_the_names_that_are_understood() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == with_tables(written), "run: python scripts/make_migration_page.py"


def test_a_name_means_one_thing() -> None:
    named = [{name for names in row.names.values() for name in names} for row in peer_rows()]
    twice = {name: count for name, count in Counter(name for names in named for name in names).items() if count > 1}
    assert twice == {}
    assert len(PEER_NAMES) >= 400
    assert {trainer for row in peer_rows() for trainer in row.names} == {*TRAINERS}


@pytest.mark.parametrize("name", sorted(PEER_NAMES))
def test_a_name_is_answered_with_what_it_is_here(name: str) -> None:
    here, found = PEER_NAMES[name], set()
    for schema in (Config, SFTConfig):
        existing = {field.path for field in walk(schema)}
        assert name not in existing
        told = remedy_for_unknown(f"some.prefix.{name}", schema)
        known = [each for each in here.settings if each in existing or "=" in each]
        if known:
            assert told.startswith(f"write {known[0]}" if "=" in known[0] else f"did you mean {known[0]}?")
        if not here.settings or known[:1] == [here.settings[0]]:
            assert told.endswith(here.convert)
        found |= {*known}
    assert found == {*here.settings}, "what it is exists"
    assert here.settings or here.convert


SECTIONS = [field.path for field in walk(Config) if field.section and "." not in field.path]


@pytest.mark.slow
@pytest.mark.parametrize("plus", ["", "+"])
def test_at_the_command_line_each_is_answered(plus: str, refusal: Callable[..., dict[str, str]]) -> None:
    told = refusal("+experiment=gsm8k_multiturn", *(f"{plus}{name}=1" for name in PEER_NAMES))
    assert {*told} == {*PEER_NAMES}
    existing = {field.path for field in walk(Config)}
    for name, here in PEER_NAMES.items():
        known = [each for each in here.settings if each in existing or "=" in each]
        if known or not here.settings:  # else it is a setting of supervised training alone
            assert (known[0] if known else here.convert[1:]) in told[name]


@pytest.mark.parametrize("plus", ["", "+"])
def test_under_every_section_new_tokens_are_not_turns(plus: str, refusal: Callable[..., dict[str, str]]) -> None:
    names = [
        f"{section}.{name}" for section in SECTIONS for name in ("max_new_tokens", "max_tokens", "response_length")
    ]
    told = refusal("+experiment=gsm8k_multiturn", *(f"{plus}{name}=16" for name in names))
    assert {
        name: "Did you mean generator.sampling.max_generate_length?" in text for name, text in told.items()
    } == dict.fromkeys(names, True)
