"""Wrong command lines print what the table says: `python -m tests.recorded.command_lines --write` renews it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from skyrl_train.config import SFT_RULES
from skyrl_train.config.fields import Rule
from skyrl_train.config.rules import RULES
from skyrl_train.errors import Violation
from skyrl_train.runs.cli import RL_MACHINE_RULES
from tests.recorded.command_lines import STATUS, TABLE, Answer, as_table, changes, read_table, run_all

pytestmark = pytest.mark.slow
RECORDED = TABLE.read_text(encoding="utf-8")


COMPLAINED: set[CodeType] = set()
"""Functions that said of a command line of the table that something is wrong, and those that called them."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    made = Violation.__init__

    def traced(self: Violation, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        frame = sys._getframe(1)
        while frame.f_back is not None:
            COMPLAINED.add(frame.f_code)
            frame = frame.f_back

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Violation, "__init__", traced)
        return run_all([command for command, _ in read_table(RECORDED)], tmp_path_factory.mktemp("commands"))


@pytest.mark.usefixtures("answers")
def test_every_rule_is_broken_by_one_of_them() -> None:
    rules: list[Rule] = [*RULES, *SFT_RULES, *RL_MACHINE_RULES]
    code = {(each.func if isinstance(each, partial) else each).__code__ for each in rules}  # type: ignore[attr-defined]
    unbroken = {f"{Path(each.co_filename).stem}.{each.co_name}" for each in code - COMPLAINED}
    assert unbroken == {"machine._engine"}, "add a command line; vLLM, of which that one tells, is always there"


def test_one_in_ten_of_them_has_several_mistakes() -> None:
    table = read_table(RECORDED)
    several = [command for command, text in table if text.split(" ", 1)[0] in ("2", "3", "4")]
    assert len({command for command, _ in table}) == len(table) >= 258
    assert len(several) >= len(table) / 10
    assert all(text for _, text in table)


def test_each_is_refused_and_begins_no_run(answers: dict[str, Answer]) -> None:
    assert {command: each.status for command, each in answers.items() if each.status != STATUS} == {}


def test_each_prints_what_is_recorded(answers: dict[str, Answer]) -> None:
    differing = changes(RECORDED, as_table(RECORDED, answers))
    assert not differing, "\n".join(["what is printed is otherwise than recorded (- recorded, + now):", *differing])


def test_what_is_kept_of_one_command_line_changes_no_other(tmp_path: Path) -> None:
    others = ("algorithm=distillation", "generator=agent", "--config-dir own +experiment=based")
    table = {command: text for command, text in read_table(RECORDED) if command.endswith(others)}
    assert len(table) == len(others)
    assert {command: each.text for command, each in run_all([*table], tmp_path, keeps_presets=False).items()} == table
