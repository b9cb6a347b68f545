"""What in a row is the prompt, and what the answer."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.data import DataConfig
from skyrl_train.data.prompts import load_prompts
from skyrl_train.errors import DataError
from skyrl_train.types import Prompt

GSM8K = os.environ.get("SKYRL_TRAIN_GSM8K_DIR")
QUESTION: dict[str, Any] = {"role": "user", "content": "2+2?"}
TRUTH = {"reward_spec": {"method": "rule", "ground_truth": "4"}, "reward_model": {"style": "rule", "ground_truth": "4"}}


def prompt_of(folder: Path, row: Mapping[str, Any], **settings: Any) -> Prompt:
    path = folder / "train.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    (prompt,) = load_prompts([str(path)], DataConfig(**settings))
    return prompt


@pytest.mark.parametrize(
    ("row", "extras"),
    [
        ({"question": "2+2?", "answer": "4"}, {"question": "2+2?", "answer": "4", **TRUTH}),
        ({"problem": "2+2?", "solution": 4}, {"problem": "2+2?", "solution": 4, "answer": 4, **TRUTH}),
        ({"prompt": "2+2?", "completion": "4"}, {"answer": "4", **TRUTH}),
        ({"prompt": [QUESTION], "completion": [{"role": "assistant", "content": "4"}]}, {"answer": "4", **TRUTH}),
        (
            {"prompt": [QUESTION], "data_source": "x", "reward_model": {"style": "rule", "ground_truth": "4"}},
            {"data_source": "x", "answer": "4", **TRUTH},
        ),
        (
            {"question": "2+2?", "answer": "2+2=4\n#### 4"},
            {"question": "2+2?", "answer": "2+2=4\n#### 4", **TRUTH},
        ),
        ({"prompt": "2+2?", "reward_spec": {"ground_truth": "4"}}, {"reward_spec": {"ground_truth": "4"}}),
        ({"prompt": "2+2?"}, {}),
    ],
)
def test_rows_of_the_usual_formats_are_recognised(
    tmp_path: Path, row: dict[str, Any], extras: Mapping[str, Any]
) -> None:
    prompt = prompt_of(tmp_path, row)
    assert prompt.messages == (QUESTION,)
    assert prompt.extras == extras
    assert prompt.place == f"{tmp_path / 'train.jsonl'}, line 1"


def test_columns_are_named_by_settings_with_dots_into_nested_ones(tmp_path: Path) -> None:
    row = {"prompt": "not this", "answer": "nor this", "info": {"asked": "2+2?", "right": 4.0}}
    prompt = prompt_of(tmp_path, row, prompt_column="info.asked", answer_column="info.right")
    assert prompt.messages == (QUESTION,)
    assert prompt.extras == {"info": {"asked": "2+2?", "right": 4.0}, "answer": 4.0, **TRUTH}


def test_a_stated_answer_becomes_the_ground_truth_of_a_row_that_has_one(tmp_path: Path) -> None:
    row = {"prompt": "2+2?", "reward_spec": {"method": "model", "ground_truth": 4}}
    prompt = prompt_of(tmp_path, row, answer_column="reward_spec.ground_truth")
    assert prompt.extras["reward_spec"] == {"method": "model", "ground_truth": "4"}


def test_a_system_prompt_is_put_before_prompts_that_have_none(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    own = {"role": "system", "content": "Be long."}
    assert prompt_of(tmp_path, {"prompt": "2+2?"}, system_prompt="Be brief.").messages == (system, QUESTION)
    assert prompt_of(tmp_path, {"prompt": [own, QUESTION]}, system_prompt="Be brief.").messages == (own, QUESTION)


def test_worked_examples_are_turns_between_the_system_prompt_and_the_question(tmp_path: Path) -> None:
    own = {"role": "system", "content": "Be long."}
    shown = ({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"})
    examples = (("1+1?", "2"),)
    assert prompt_of(tmp_path, {"prompt": "2+2?"}, examples=examples).messages == (*shown, QUESTION)
    assert prompt_of(tmp_path, {"prompt": [own, QUESTION]}, examples=examples).messages == (own, *shown, QUESTION)
    before = prompt_of(tmp_path, {"prompt": "2+2?"}, examples=examples, system_prompt="Be brief.").messages
    assert before == ({"role": "system", "content": "Be brief."}, *shown, QUESTION)


def test_parts_of_text_are_one_text_and_others_are_refused(tmp_path: Path) -> None:
    parts: list[Any] = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    assert prompt_of(tmp_path, {"prompt": [{"role": "user", "content": parts}]}).messages == (QUESTION,)
    sound = [*parts, {"type": "audio", "url": "x.wav"}]
    with pytest.raises(
        DataError, match=r"line 1: part 2 of the content of message 0 of 'prompt' is no text; got .*audio"
    ):
        prompt_of(tmp_path, {"prompt": [{"role": "user", "content": sound}]})


def test_tools_are_a_field_of_the_prompt_given_as_a_list_or_as_json(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    for given in (tools, json.dumps(tools)):
        prompt = prompt_of(tmp_path, {"prompt": "2+2?", "tools": given})
        assert (list(prompt.tools), prompt.extras) == (tools, {})


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        (
            {"text": "2+2?", "n": 3},
            {},
            "line 1: has no 'prompt'; it has n, text. .* or name its column: data.prompt_column=text.",
        ),
        ({"prompt": "2+2?"}, {"prompt_column": "asked"}, "line 1: has no 'asked'; it has prompt."),
        ({"prompt": "2+2?"}, {"answer_column": "a.b"}, "line 1: has no 'a.b', which data.answer_column names"),
        (
            {"prompt": "2+2?", "extra_info": {"answer": "4"}},
            {"answer_column": "extra_info.anser"},
            r"it has extra_info, prompt. Did you mean 'extra_info.answer'\? Name a column",
        ),
        ({"prompt": "2+2?", "answer": "4"}, {"answer_column": "anser"}, r"Did you mean 'answer'\?"),
        (
            {"question": "2+2?"},
            {"prompt_column": "qestion"},
            r"it has question. Did you mean 'question'\? Give each row",
        ),
        ({"prompt": "2+2?", "a": ""}, {"answer_column": "a"}, "line 1: has no 'a', which data.answer_column names"),
    ],
)
def test_a_column_that_is_missing_is_named_with_the_row(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        prompt_of(tmp_path, row, **settings)


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _write_arrow(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    ipc = pytest.importorskip("pyarrow.ipc")
    table = pyarrow.Table.from_pylist(rows)
    new = ipc.new_file if path.suffix == ".feather" else ipc.new_stream
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=1)


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("train.csv", _write_csv),
        ("train.arrow", _write_arrow),
        ("train.feather", _write_arrow),
        ("train.parquet", _write_parquet),
        ("train.json", lambda path, rows: path.write_text(json.dumps(rows))),
    ],
)
def test_every_kind_of_file_gives_the_same_prompts(
    tmp_path: Path, name: str, write: Callable[[Path, list[dict[str, Any]]], None]
) -> None:
    rows = [
        {"question": 'What is "2+2", please?\nBriefly.', "answer": "4"},
        {"question": "2+3?", "answer": "2+3=5\n#### 5"},
    ]
    write(tmp_path / name, rows)
    lines = tmp_path / "lines" / "train.jsonl"
    lines.parent.mkdir()
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = DataConfig(prompt_column="question", answer_column="answer")
    assert load_prompts([str(tmp_path / name)], settings) == load_prompts([str(lines)], settings)


def test_a_data_set_that_was_saved_to_disk_is_read_as_a_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"question": "2+2?", "answer": "4"}]).save_to_disk(str(tmp_path / "saved"))
    (prompt,) = load_prompts([str(tmp_path / "saved")])
    assert (prompt.messages, prompt.extras["answer"]) == ((QUESTION,), "4")


@pytest.mark.skipif(not GSM8K, reason="set SKYRL_TRAIN_GSM8K_DIR to the folder of GSM8K's train.jsonl and test.jsonl")
def test_every_row_of_gsm8k_is_recognised_without_settings() -> None:
    prompts = load_prompts([str(Path(str(GSM8K)) / f"{split}.jsonl") for split in ("train", "test")])
    assert len(prompts) == 7473 + 1319
    assert all(
        prompt.extras["reward_spec"]["ground_truth"].replace(".", "").lstrip("-").isdigit() for prompt in prompts
    )
