"""Wrong command lines print what the table says: `python -m tests.recorded.command_lines --write` renews it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorded.command_lines import STATUS, TABLE, Answer, as_table, changes, read_table, run_all

RECORDED = TABLE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    return run_all([command for command, _ in read_table(RECORDED)], tmp_path_factory.mktemp("commands"))


def test_there_are_two_hundred_of_which_one_in_ten_has_several_mistakes() -> None:
    table = read_table(RECORDED)
    several = [command for command, text in table if text.split(" ", 1)[0] in ("2", "3", "4")]
    assert len({command for command, _ in table}) == len(table) == 200
    assert len(several) >= 20
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
