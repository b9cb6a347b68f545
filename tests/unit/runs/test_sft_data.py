"""From `data` of a supervised run to examples: weights of folders, names of held-out sets, what was cut or left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import SFTConfig
from skyrl_train.errors import ConfigError
from skyrl_train.runs.sft import SFTData, build_stream, load_sft_data, plan_sft
from tests.support.sft_cases import chat, write_jsonl


def load(tmp_path: Path, **data: Any) -> tuple[SFTConfig, SFTData]:
    """With steps of two examples; short conversations have less than 40 tokens of the bundled tokenizer."""
    config = SFTConfig(output_dir=str(tmp_path / "run"))
    settings = {"cache": False, "validation": (), "shuffle": False, **data}
    trainer = replace(config.trainer, batch_size=2)
    config = replace(config, data=replace(config.data, **settings), trainer=trainer)
    return config, load_sft_data(config.data, config.model, on_progress=lambda name, rows: None)


def rows(count: int, word: str = "yes") -> list[dict[str, Any]]:
    return [chat(f"{word} {index}?", word) for index in range(count)]


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, str]:
    """A folder of two files, of 4 and 2 rows, and a file of 3."""
    folder = tmp_path / "folder"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", rows(4, "a"))
    write_jsonl(folder / "b.jsonl", rows(2, "b"))
    return str(folder), str(write_jsonl(tmp_path / "c.jsonl", rows(3, "c")))


def test_the_weight_of_a_folder_is_that_of_each_of_its_files(tmp_path: Path, sources: tuple[str, str]) -> None:
    config, data = load(tmp_path, train=sources, weights=(0.5, 2.0))
    assert data.train.source_sizes == (4, 2, 3)
    assert data.weights == (0.5, 0.5, 2.0)
    assert plan_sft(config, data).num_examples_per_epoch == 2 + 1 + 6
    used = build_stream(config, data).take(0).indices.tolist()
    assert [data.train.name(index) for index in used] == ["a-0", "a-1"]


def test_a_limit_that_ends_before_a_source_leaves_its_weight_out(tmp_path: Path, sources: tuple[str, str]) -> None:
    _, data = load(tmp_path, train=sources, weights=(0.5, 2.0), max_train_rows=5)
    assert data.train.source_sizes == (4, 1)
    assert data.weights == (0.5, 0.5)


def test_weights_that_leave_nothing_are_refused(tmp_path: Path, sources: tuple[str, str]) -> None:
    config, data = load(tmp_path, train=sources, weights=(0.0, 0.0))
    with pytest.raises(ConfigError, match=r"data\.weights"):
        plan_sft(config, data)


def test_steps_follow_from_epochs_and_weights(tmp_path: Path, sources: tuple[str, str]) -> None:
    config, data = load(tmp_path, train=sources, weights=(1.0, 2.0))
    three = replace(config, trainer=replace(config.trainer, num_epochs=3))
    assert (plan_sft(config, data).total_steps, plan_sft(three, data).total_steps) == (
        6,
        18,
    )
    five = replace(config, trainer=replace(config.trainer, num_steps=5))
    assert plan_sft(five, data).total_steps == 5


def test_each_entry_of_validation_is_a_set_with_a_name_of_its_own(tmp_path: Path, sources: tuple[str, str]) -> None:
    folder, single = sources
    other = tmp_path / "other"
    other.mkdir()
    twin = str(write_jsonl(other / "c.jsonl", rows(1)))
    _, data = load(tmp_path, train=(single,), validation=(folder, single, twin))
    assert {name: len(examples) for name, examples in data.validation.items()} == {"folder": 6, single: 3, twin: 1}


@pytest.mark.parametrize(
    ("over_long", "note", "left"),
    [
        ("truncate", "cut to data.max_length=60 tokens: 1 training example ", 3),
        ("drop", "left out: 1 training example of more than data.max_length=60 tokens", 2),
    ],
)
def test_what_is_cut_or_left_out_is_told_with_its_number(tmp_path: Path, over_long: str, note: str, left: int) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", [*rows(2), chat("why?", "because " * 100)])
    _, data = load(tmp_path, train=(str(path),), max_length=60, over_long=over_long)
    assert len(data.train) == left
    (line,) = data.notes
    assert line.startswith(note)
