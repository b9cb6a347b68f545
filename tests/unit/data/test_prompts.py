"""Data rows to prompts, and prompts to batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import SFT_RULES, Config, SFTConfig
from skyrl_train.config.data import DataConfig
from skyrl_train.config.door import load_root
from skyrl_train.config.rules import rule_violations, validate_config
from skyrl_train.data.prompts import PromptSource, filter_by_length, load_prompts
from skyrl_train.data.sources import hub
from skyrl_train.errors import ConfigError, DataError, Violation
from skyrl_train.types import Prompt

QUESTION = [{"role": "user", "content": "2+2?"}]
ROW: dict[str, Any] = {
    "prompt": QUESTION,
    "env_class": "gsm8k",
    "reward_spec": {"method": "rule", "ground_truth": "4"},
    "extra_info": {"index": 17},
    "data_source": "by hand",
}


def write_jsonl(path: Path, rows: Sequence[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return str(path)


def test_a_row_becomes_a_prompt_with_its_other_columns_as_extras(tmp_path: Path) -> None:
    assert load_prompts([write_jsonl(tmp_path / "train.jsonl", [ROW])]) == [
        Prompt(
            uid="train-0",
            messages=({"role": "user", "content": "2+2?"},),
            env_class="gsm8k",
            extras={
                "reward_spec": {"method": "rule", "ground_truth": "4"},
                "extra_info": {"index": 17},
                "data_source": "by hand",
            },
        )
    ]


def test_parquet_json_and_json_lines_give_the_same(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "env_class": None}]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    expected = load_prompts([write_jsonl(tmp_path / "b" / "train.jsonl", rows)])
    assert load_prompts([str(tmp_path / "a" / "train.json")]) == expected
    assert load_prompts([write_parquet(tmp_path / "train.parquet", rows)]) == expected
    assert expected[1].env_class is None


def test_keys_that_only_some_messages_have_do_not_reach_the_others(tmp_path: Path) -> None:
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?", "name": "Ada"}]
    (prompt,) = load_prompts([write_parquet(tmp_path / "train.parquet", [{"prompt": conversation}])])
    assert prompt.messages == tuple(conversation)


def test_a_plain_text_is_one_user_message(tmp_path: Path) -> None:
    (prompt,) = load_prompts([write_jsonl(tmp_path / "train.jsonl", [{"prompt": "2+2?"}])])
    assert (prompt.messages, prompt.env_class, prompt.extras) == (tuple(QUESTION), None, {})


def test_a_folder_is_read_file_by_file_in_order_of_names(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data" / "b.jsonl", [ROW])
    write_jsonl(tmp_path / "data" / "a.jsonl", [ROW, ROW])
    write_jsonl(tmp_path / "data" / "more" / "c.jsonl", [ROW])
    (tmp_path / "data" / "README.md").write_text("not data", encoding="utf-8")
    assert [prompt.uid for prompt in load_prompts([str(tmp_path / "data")])] == ["a-0", "a-1", "b-0", "more/c-0"]


def test_files_of_the_same_name_are_told_apart_by_their_path(tmp_path: Path) -> None:
    paths = [write_jsonl(tmp_path / name / "train.jsonl", [ROW]) for name in ("a", "b")]
    assert [prompt.uid for prompt in load_prompts(paths)] == [f"{path}-0" for path in paths]


def test_the_bundled_problems_are_there() -> None:
    prompts = load_prompts(["builtin:word_problems/train"], limit=3)
    assert [prompt.uid for prompt in prompts] == [f"word_problems/train-{index}" for index in range(3)]
    assert prompts[0].env_class == "word_problems"


def test_a_limit_stops_reading(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(ROW) + "\nnot json\n", encoding="utf-8")
    assert len(load_prompts([str(path)], limit=1)) == 1


def test_empty_lines_are_not_rows(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(f"\n{json.dumps(ROW)}\n\n{json.dumps(ROW)}", encoding="utf-8")
    assert [prompt.uid for prompt in load_prompts([str(path)])] == ["train-0", "train-1"]


def test_a_row_may_bring_its_uid(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", [{**ROW, "uid": 5}, ROW])
    prompts = load_prompts([path])
    assert [prompt.uid for prompt in prompts] == ["5", "train-1"]
    assert "uid" not in prompts[0].extras


# What a person sees


def error_of(*sources: str) -> str:
    with pytest.raises(DataError) as caught:
        load_prompts(list(sources))
    return str(caught.value)


def test_two_rows_with_one_uid_are_both_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", [{**ROW, "uid": "a"}, {**ROW, "uid": "a"}])
    assert f"{path}, line 2: uid 'a' is also that of {path}, line 1" in error_of(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"q": "2+2?", "answer": "4"}, "line 2: has no 'prompt'; it has answer, q."),
        ({"prompt": []}, "line 2: 'prompt' must be a list of chat messages or a text; got []."),
        ({"prompt": 4}, "line 2: 'prompt' must be a list of chat messages or a text; got 4."),
        ({"prompt": ["2+2?"]}, "line 2: message 0 of 'prompt' must be an object; got '2+2?'."),
        (
            {"prompt": [*QUESTION, {"role": "user", "text": "2+2?"}]},
            "line 2: message 1 of 'prompt' has no text under 'content'; it is {'role': 'user', 'text': '2+2?'}.",
        ),
        ({"prompt": [{"content": "2+2?"}]}, "line 2: message 0 of 'prompt' has no text under 'role'"),
        ({"prompt": "2+2?", "env_class": 3}, "line 2: 'env_class' must be a name; got 3."),
        ([1, 2], "line 2: must be an object of columns and values; got list."),
    ],
)
def test_a_row_that_is_not_a_prompt_is_named_with_what_it_has(tmp_path: Path, row: Any, message: str) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", [ROW, row])
    assert f"{path}, {message}" in error_of(path)


def test_a_parquet_row_is_named_by_its_number(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "train.parquet", [{"text": "2+2?"}])
    assert f"{path}, row 0: has no 'prompt'; it has text." in error_of(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2: not valid JSON (Expecting value at column 11)"),
        ("train.json", '[{"prompt": "a"},\n oops]', "not valid JSON (Expecting value at line 2, column 2)"),
        ("train.json", '{"prompt": "a"}', "must be a list of rows; got dict"),
        ("train.parquet", "PAR?", "not a readable parquet file"),
        ("train.jsonl", "", "no rows"),
        ("train.tsv", "prompt\n2+2?", "must end in .jsonl, .json, .csv, .parquet, .arrow, .feather"),
        ("train.csv", "prompt,answer\n2+2?,4\n3+3?", "line 3: must have a value for each of 2 columns"),
        ("train.csv", 'prompt\n"2+2?', "line 2: not CSV in UTF-8 (unexpected end of data)"),
        ("train.arrow", "ARRO?", "not a readable Arrow file"),
    ],
)
def test_a_damaged_file_is_named_with_the_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    error = error_of(str(path))
    assert str(path) in error
    assert message in error


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}')
    assert "not UTF-8 text" in error_of(str(path))


def test_a_missing_file_comes_with_what_is_there(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data" / "train.jsonl", [ROW])
    assert f"no such file or folder. Nearest in {tmp_path / 'data'}: train.jsonl." in error_of(
        str(tmp_path / "data" / "trian.jsonl")
    )
    assert f"Nearest in {tmp_path}: data." in error_of(str(tmp_path / "dta" / "train.jsonl"))


def test_an_empty_folder_and_an_unknown_builtin_are_named(tmp_path: Path) -> None:
    assert "the folder holds no .jsonl, .json, .csv, .parquet, .arrow, .feather file" in error_of(str(tmp_path))
    known = "It has builtin:sums/train, builtin:sums/validation, builtin:word_problems/train"
    assert known in error_of("builtin:word_problem/train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"prompt": "\xe9"}]', "not UTF-8 text"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "\xe9"}\n', "not UTF-8 text"),
        ("a.jsonl", b'{"prompt": "a"}\n' + b"[" * 100_000, "line 2: JSON that is nested too deeply"),
        ("a.json", b"[" * 100_000, "JSON that is nested too deeply"),
        (
            "a.jsonl",
            b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
            "line 1: JSON with an integer of more than 4300 digits",
        ),
        (
            "a.jsonl",
            b'{"prompt": "a", "x": {"y": [1, NaN]}}',
            "line 1: column 'x.y[1]' is nan, and JSON has no such number",
        ),
        ("a.jsonl", b'{"prompt": "a", "x": -Infinity}', "line 1: column 'x' is -inf"),
        ("a.jsonl", b'{"prompt": "a", "x": "\\ud800"}', "line 1: column 'x' has half of a character"),
        ("a.jsonl", b'{"prompt": "a", "x": ' + b"[" * 80 + b"]" * 80 + b"}", "is nested deeper than 64 levels"),
        ("a.jsonl", b'{"prompt": "a", "uid": [1]}', "line 1: 'uid' must be a text or a number; got [1]"),
        ("a.parquet", b"PAR1" + bytes(200) + b"PAR1", "not a readable parquet file"),
    ],
)
def test_what_no_run_could_use_is_refused_when_it_is_read(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    error = error_of(str(path))
    assert error.startswith(str(path))
    assert message in error


def test_a_date_that_python_has_none_of_is_named_with_its_row_and_column(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    born = pyarrow.array([0, 2**30], type=pyarrow.date32())
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "born": born}), path)
    assert "row 1, column 'born' cannot be read" in error_of(str(path))


def test_a_hub_name_without_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def refuse(name: str, config: str, split: str) -> None:
        raise ConnectionError(f"cannot reach the hub for {name} {config} {split}")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr(hub, "is_reachable", lambda: True)
    monkeypatch.setattr(hub, "problem_of", lambda name, dataset: "")
    error = error_of("openai/gsm8k/main:train[:10]")
    assert error.startswith("openai/gsm8k/main:train[:10]: the hub data set cannot be loaded (ConnectionError: ")
    assert "download it and give its folder" in error


def test_a_hub_data_set_is_read_like_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[tuple[tuple[str, ...], str]] = []

    def load(*names: str, split: str) -> list[dict[str, Any]]:
        asked.append((names, split))
        return [ROW]

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub, "is_reachable", lambda: True)
    monkeypatch.setattr(hub, "problem_of", lambda name, dataset: "")
    assert [prompt.uid for prompt in load_prompts(["owner/name:train"])] == ["owner/name:train-0"]
    load_prompts(["owner/name/main:train[:10]"])
    assert asked == [(("owner/name",), "train"), (("owner/name", "main"), "train[:10]")]


# Lengths


def prompts_of_lengths(*lengths: int) -> list[Prompt]:
    return [Prompt(uid=f"p{n}", messages=({"role": "user", "content": "x" * n},)) for n in lengths]


def count_characters(prompt: Prompt) -> int:
    return len(prompt.messages[0]["content"])


def questions(location: str, *, count: int, broken: object = None) -> list[object]:
    """A reader: `count` rows about its location, and perhaps one that is none."""
    rows: list[object] = [{"prompt": f"{location} {number}?"} for number in range(count)]
    return rows if broken is None else [*rows, broken]


def test_a_custom_reader_is_given_each_entry_as_it_is_and_its_rows_are_told_by_number() -> None:
    reader = {"_target_": f"{__name__}:questions", "count": 2}
    prompts = load_prompts(["s3://one/a.csv", "two"], DataConfig(reader=reader))
    assert [prompt.messages[0]["content"] for prompt in prompts][1:3] == ["s3://one/a.csv 1?", "two 0?"]
    assert [prompt.uid for prompt in prompts] == ["a-0", "a-1", "two-0", "two-1"]
    for broken, message in (
        ("text", "two, row 2: must be an object of columns and values; got str"),
        ({"word": "cat"}, "two, row 2: has no 'prompt'; it has word"),
    ):
        with pytest.raises(DataError, match=message):
            load_prompts(["two"], DataConfig(reader={**reader, "broken": broken}))
    with pytest.raises(DataError, match=r"two, row 0: data.reader=.*:questions failed \(TypeError: .*'count'"):
        load_prompts(["two"], DataConfig(reader=f"{__name__}:questions"))


def test_a_built_in_reader_reads_a_file_whatever_it_is_called(tmp_path: Path) -> None:
    file = tmp_path / "rows.txt"
    file.write_text('{"prompt": "2+2?"}\n\n[1]\n')
    with pytest.raises(DataError, match=r"must end in .jsonl, .json, .csv.* data.reader=jsonl"):
        load_prompts([str(file)])
    assert load_prompts([str(file)], DataConfig(reader="jsonl"), limit=1)[0].uid == "rows-0"
    with pytest.raises(DataError, match=r"rows.txt, line 3: must be an object"):
        load_prompts([str(file)], DataConfig(reader={"_target_": "jsonl"}))


def test_a_custom_reader_may_leave_what_it_does_not_know_to_the_built_in_one(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('\n{"prompt": "2+2?"}\n{"prompt": 4}\n')
    with pytest.raises(DataError, match=r"rows.jsonl, line 3: 'prompt' must be"):
        load_prompts([str(file)], DataConfig(reader="skyrl_train.data.rows:by_name"), limit=2)


def test_a_reader_is_checked_at_the_door_for_prompts_and_for_examples() -> None:
    reader = {"_target_": f"{__name__}:questions", "cuont": 2}

    def rl(reader: object) -> list[Violation]:
        return validate_config(load_root({"data": {"reader": reader}}, Config))

    def sft(reader: object) -> list[Violation]:
        return rule_violations(load_root({"data": {"reader": reader}}, SFTConfig), SFT_RULES)

    for violations in (rl, sft):
        found = violations(reader)
        assert [(each.field, each.remedy.split("?")[0]) for each in found] == [
            ("data.reader.cuont", "did you mean 'count'"),
            ("data.reader.count", f"write data.reader={{_target_: {__name__}:questions, count: ...}}"),
        ]
        (unknown,) = violations("jsnol")
        assert "did you mean 'json" in unknown.remedy


def test_over_long_prompts_are_dropped_and_counted() -> None:
    result = filter_by_length(prompts_of_lengths(3, 9, 5), count_characters, max_prompt_length=5, over_long="drop")
    assert ([prompt.uid for prompt in result.prompts], result.num_dropped, result.longest) == (["p3", "p5"], 1, 9)


def test_over_long_prompts_may_be_an_error() -> None:
    with pytest.raises(DataError, match=r"prompt p9 has 9 tokens.*max_prompt_length=5 \(2 of 3 do\).*longest has 12"):
        filter_by_length(prompts_of_lengths(3, 9, 12), count_characters, max_prompt_length=5, over_long="error")


def test_dropping_every_prompt_is_an_error() -> None:
    with pytest.raises(DataError, match=r"all 2 prompts have more than .*=2 tokens.*shortest has 3"):
        filter_by_length(prompts_of_lengths(3, 9), count_characters, max_prompt_length=2, over_long="drop")


def test_what_stands_in_every_prompt_is_told_with_its_length() -> None:
    of_each = " (2 of them tell the model of its 1 tools)"
    with pytest.raises(
        DataError, match=r"all 2 prompts have more than .*=2 tokens \(2 of them tell .* 1 tools\)\. Raise"
    ):
        filter_by_length(
            prompts_of_lengths(3, 9), count_characters, max_prompt_length=2, over_long="drop", of_each=of_each
        )
    with pytest.raises(
        DataError, match=r"prompt p9 has 9 tokens \(2 of them tell the model of its 1 tools\), more than"
    ):
        filter_by_length(
            prompts_of_lengths(3, 9), count_characters, max_prompt_length=5, over_long="error", of_each=of_each
        )


# Batches


def uids(source: PromptSource, *positions: int) -> list[list[str]]:
    return [[prompt.uid for prompt in source.batch(position)] for position in positions]


PROMPTS = prompts_of_lengths(*range(10))


def test_batches_go_on_epoch_after_epoch_without_the_incomplete_last_one() -> None:
    source = PromptSource(PROMPTS, batch_size=4, shuffle=False, seed=0)
    assert source.num_batches_per_epoch == 2
    assert uids(source, 0, 1, 2) == [["p0", "p1", "p2", "p3"], ["p4", "p5", "p6", "p7"], ["p0", "p1", "p2", "p3"]]


def test_each_epoch_has_another_order_of_all_prompts() -> None:
    source = PromptSource(PROMPTS, batch_size=5, shuffle=True, seed=0)
    first, second = (list(chain.from_iterable(uids(source, *batches))) for batches in ((0, 1), (2, 3)))
    assert sorted(first) == sorted(second) == sorted(prompt.uid for prompt in PROMPTS)
    assert first != second


def test_the_order_is_a_function_of_seed_and_position_alone() -> None:
    source = PromptSource(PROMPTS, batch_size=5, shuffle=True, seed=3)
    expected = uids(source, 0, 1, 2, 3)
    assert expected[0] == ["p1", "p0", "p8", "p2", "p6"]
    assert uids(PromptSource(PROMPTS, batch_size=5, shuffle=True, seed=3), 3, 0, 2, 1) == [
        expected[3], expected[0], expected[2], expected[1],
    ]  # fmt: skip
    assert uids(PromptSource(PROMPTS, batch_size=5, shuffle=True, seed=4), 0) != expected[:1]


def test_fewer_prompts_than_a_batch_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"trainer.train_batch_size: must be at most the number of prompts, 10; got 11"
    ):
        PromptSource(PROMPTS, batch_size=11, shuffle=True, seed=0)
