"""What docs/data.md shows works as it is shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.door import load_config
from skyrl_train.config.rules import validate_config
from skyrl_train.data.prompts import load_prompts
from skyrl_train.errors import DataError
from skyrl_train.rollout import check_all_rows
from skyrl_train.types import Prompt

TEXT = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")


def snippet(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    assert found, f"no {language} in docs/data.md"
    return found[1]


def test_the_row_of_questions_and_answers_needs_no_settings(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(snippet("json"))
    (prompt,) = load_prompts([str(tmp_path / "own.jsonl")])
    assert prompt.messages[0]["content"] == json.loads(snippet("json"))["question"]
    check_all_rows([prompt], EnvironmentConfig(env_class="word_problems"))


def test_the_mix_is_a_valid_configuration() -> None:
    assert validate_config(load_config(yaml.safe_load(snippet("yaml")))) == []


def test_the_check_of_rows_refuses_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shown_environment.py").write_text(snippet("python"))
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = EnvironmentConfig(env_class="shown_environment:MyEnvironment", isolation="thread")
    with pytest.raises(DataError, match=r"prompt a: limit: must be an integer; got None\."):
        check_all_rows([Prompt(uid="a", messages=())], environment)
