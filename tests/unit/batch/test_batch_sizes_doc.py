"""docs/batch_sizes.md says what the code does: every row of its table is planned."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyrl_train.config import Config, SFTConfig
from skyrl_train.config.fields import walk
from skyrl_train.errors import ConfigError
from skyrl_train.plan import plan_batches
from tests.support.batch_builders import make_config

DOCUMENT = (Path(__file__).parents[3] / "docs" / "batch_sizes.md").read_text(encoding="utf-8")
TABLE = DOCUMENT.partition("<!-- table:")[2].partition("<!-- end of table -->")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if line.startswith("|")][
    2:
]


def changed(config: Any, path: list[str], value: object) -> Any:
    """The configuration with one setting changed, as on the command line."""
    name, *rest = path
    return replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


def config_of(prompts: str, mini_batch: str, samples: str, ranks: str, micro: str, also: str) -> Config:
    config = make_config(
        prompts=int(prompts),
        mini_batch=int(mini_batch),
        n_samples=int(samples),
        trainer={"micro_train_batch_size_per_gpu": int(micro), "critic_mini_batch_size": int(mini_batch)},
        placement={"policy_num_workers": int(ranks)},
    )
    for setting in re.findall(r"`([^`]+)`", also):
        path, _, value = setting.partition("=")
        config = changed(config, path.split("."), yaml.safe_load(value))
    return config


def result_of(config: Config) -> str:
    """The last column, as the code has it."""
    try:
        plan = plan_batches(config, num_train_prompts=10_000)
    except ConfigError as error:
        return "no: " + "; ".join(violation.rule for violation in error.violations)
    policy = plan.learners[0]
    text = f"{plan.optimizer_steps_per_batch} steps of {plan.num_samples_per_step} sequences"
    text = f"{text}, {policy.rows_per_rank} rows a rank"
    return text if policy.train_micro_batches is None else f"{text}, {policy.train_micro_batches} micro-batches"


@pytest.mark.parametrize("row", ROWS, ids=[" ".join(row[:6]).strip() for row in ROWS])
def test_each_combination_is_planned_or_refused_as_the_table_says(row: list[str]) -> None:
    *settings, expected = row
    found = result_of(config_of(*settings))
    if expected.startswith("no: "):
        assert found.startswith("no: ")
        assert expected.removeprefix("no: ") in found
    else:
        assert found == expected


def test_the_table_has_both_kinds() -> None:
    refused = [row for row in ROWS if row[-1].startswith("no: ")]
    assert len(ROWS) >= 12
    assert 4 <= len(refused) <= len(ROWS) - 4


def test_the_worked_example_in_the_text_is_the_first_row() -> None:
    assert "5,120 sequences, 4 optimizer steps, 1,280\nsequences each" in DOCUMENT
    assert ROWS[0][-1].startswith("4 steps of 1280 sequences")


def test_settings_named_in_the_document_exist() -> None:
    known = {field.path for schema in (Config, SFTConfig) for field in walk(schema)}
    named = re.findall(r"`((?:trainer|generator|placement|critic|model)\.[a-z_.]+)", DOCUMENT)
    assert {path.rstrip(".") for path in named} <= known
