"""Sources to examples: tokenised once, cut to length, and every example that is left out is counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_train.config import SFTDataConfig
from skyrl_train.data.rows import find_sources
from skyrl_train.data.sft import examples as sft
from skyrl_train.data.sft.examples import Loaded, cache_key, load_examples
from skyrl_train.errors import DataError
from tests.support import sft_cases as cases

TOKENIZER = cases.byte_level(eos="</s>")


def load(*paths: Path | str, **changes: Any) -> Loaded:
    arguments = {name: changes.pop(name) for name in ("limit", "on_progress", "images") if name in changes}
    settings = SFTDataConfig(**{"max_length": 100, "cache": "cache_dir" in changes, **changes})
    return load_examples([str(path) for path in paths], TOKENIZER, settings, **arguments)


def texts(loaded: Loaded) -> list[str]:
    flat = loaded.examples.gather(np.arange(len(loaded.examples)))
    return [TOKENIZER.decode(ids) for ids in np.split(flat.input_ids, np.cumsum(flat.lengths)[:-1])]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Examples of 2, 3 and 4 tokens."""
    rows = [{"text": text} for text in ("one", "one two", "one two three")]
    return cases.write_jsonl(tmp_path / "words.jsonl", rows)


def test_sources_lie_one_after_the_other_under_their_names(tmp_path: Path, words: Path) -> None:
    other = cases.write_jsonl(tmp_path / "other.jsonl", [{"text": "four"}, cases.chat("hello", "bye")])
    loaded = load(words, other)
    assert len(loaded.examples) == 5
    assert loaded.examples.source_sizes == (3, 2)
    assert texts(loaded)[3] == "four</s>"
    assert [loaded.examples.name(index) for index in (0, 2, 3, 4)] == ["words-0", "words-2", "other-0", "other-1"]


def test_examples_are_gathered_in_any_order(words: Path) -> None:
    flat = load(words).examples.gather(np.array([2, 0, 2]))
    assert flat.lengths.tolist() == [4, 2, 4]
    assert TOKENIZER.decode(flat.input_ids) == "one two three</s>one</s>one two three</s>"
    assert flat.loss_mask.tolist() == [False, True, True, True, False, True, False, True, True, True]


def test_parquet_and_json_lines_give_the_same(tmp_path: Path, words: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in words.read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "words.parquet")
    assert texts(load(tmp_path / "words.parquet")) == texts(load(words))


def test_a_limit_counts_rows_over_all_sources(tmp_path: Path, words: Path) -> None:
    other = cases.write_jsonl(tmp_path / "other.jsonl", [{"text": "four"}, {"text": "five"}])
    assert texts(load(words, other, limit=4))[-1] == "four</s>"
    assert len(load(words, other, limit=2).examples) == 2


def test_over_long_examples_are_cut_and_counted(words: Path) -> None:
    loaded = load(words, max_length=3)
    assert texts(loaded) == ["one</s>", "one two</s>", "one two three"]
    assert (loaded.num_truncated, loaded.num_dropped, loaded.num_without_loss, loaded.longest) == (1, 0, 0, 4)


def test_over_long_examples_are_dropped_and_counted(words: Path) -> None:
    loaded = load(words, max_length=3, over_long="drop")
    assert texts(loaded) == ["one</s>", "one two</s>"]
    assert (loaded.num_truncated, loaded.num_dropped) == (0, 1)
    assert loaded.examples.name(1) == "words-1"


def test_over_long_examples_are_refused_with_the_figures(words: Path) -> None:
    with pytest.raises(
        DataError, match=r"words, row 1: 3 tokens, more than data.max_length=2 \(2 of 3 rows are; .* 4\)"
    ):
        load(words, max_length=2, over_long="error")


def test_an_example_whose_answer_is_cut_off_whole_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [cases.chat("hello there good bye", "one"), cases.chat("hello", "one")]
    path = cases.write_jsonl(tmp_path / "chat.jsonl", rows)
    length = load(path).examples.lengths[1]
    loaded = load(path, max_length=int(length))
    assert (len(loaded.examples), loaded.num_truncated, loaded.num_without_loss) == (1, 0, 1)


def test_nothing_left_is_an_error(words: Path) -> None:
    with pytest.raises(DataError, match=r"words: no example is left to train on \(3 are longer than data.max_length=1"):
        load(words, max_length=1, over_long="drop")


def test_the_fingerprint_is_that_of_what_is_trained_on(words: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_text(words.read_text())
    assert load(words).sha256 == load(copy).sha256
    assert load(words).sha256 != load(words, max_length=3).sha256
    copy.write_text(words.read_text().replace("three", "four"))
    assert load(words).sha256 != load(copy).sha256


class CountingRows:
    """Stands in for `read_rows` and counts how often a source is read."""

    def __init__(self) -> None:
        self.reads = 0
        self._read = sft.read_rows

    def __call__(self, source: Any) -> Iterator[Any]:
        self.reads += 1
        return self._read(source)


def test_a_source_is_tokenised_once_for_all_runs(words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = CountingRows()
    monkeypatch.setattr(sft, "read_rows", rows)
    cache = tmp_path / "cache"
    first = load(words, cache_dir=str(cache))
    second = load(words, cache_dir=str(cache), max_length=3, over_long="drop")
    assert rows.reads == 1
    assert texts(first) == texts(load(words))
    assert texts(second) == ["one</s>", "one two</s>"]


def test_a_hub_data_set_is_tokenised_like_a_file_and_once_while_its_rows_stay_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    hub = {"owner/name": [{"text": "one"}, cases.chat("hello", "bye")]}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: hub[name])
    monkeypatch.setattr("skyrl_train.data.sources.hub.is_reachable", lambda: True)
    monkeypatch.setattr("skyrl_train.data.sources.hub.problem_of", lambda name, *, dataset: "")
    tokenised: list[str] = []
    settings: dict[str, Any] = {
        "cache_dir": str(tmp_path / "cache"),
        "on_progress": lambda name, rows: tokenised.append(f"{rows} of {name}"),
    }
    first, again = load("owner/name:train", **settings), load("owner/name:train", **settings)
    assert texts(first) == texts(again) == texts(load("owner/name:train"))
    hub["owner/name"].append({"text": "new"})
    assert texts(load("owner/name:train", **settings))[2] == "new</s>"
    assert tokenised == ["2 of owner/name:train", "3 of owner/name:train"]


def numbers(location: str, *, first: int = 0) -> Iterator[dict[str, str]]:
    """A reader of no file: as many rows as its location says."""
    for number in range(first, int(location)):
        if number == 7:
            raise LookupError("seven is not there")
        yield {"text": str(number)}


def test_a_custom_reader_gives_examples_and_its_tokens_are_kept_by_their_rows(tmp_path: Path) -> None:
    tokenised: list[int] = []
    settings: dict[str, Any] = {
        "cache_dir": str(tmp_path / "cache"),
        "on_progress": lambda name, rows: tokenised.append(rows),
    }
    reader = {"_target_": f"{__name__}:numbers", "first": 1}
    for _ in range(2):
        assert texts(load("3", "2", reader=reader, **settings)) == ["1</s>", "2</s>", "1</s>"]
    assert tokenised == [2, 1]
    assert texts(load("3", reader=f"{__name__}:numbers", **settings)) == ["0</s>", "1</s>", "2</s>"]
    assert texts(load("9", reader=reader, limit=2, **settings)) == ["1</s>", "2</s>"], (
        "and only what is asked for is read"
    )
    with pytest.raises(DataError, match=r"9, row 6: data.reader=.*numbers\(first=1\) failed \(LookupError: .*seven is"):
        load("9", reader=reader, **settings)


def test_the_key_changes_with_everything_that_tokens_depend_on(words: Path, tmp_path: Path) -> None:
    def key(path: Path = words, tokenizer: Any = TOKENIZER, form: SFTDataConfig | None = None, limit: int = 0) -> str:
        return cache_key(find_sources([str(path)])[0], tokenizer, form or SFTDataConfig(), limit)

    copy = tmp_path / "copy.jsonl"
    copy.write_text(words.read_text())
    other = cases.write_jsonl(tmp_path / "other.jsonl", [{"text": "four"}])
    assert key(copy) == key()
    different = [
        key(),
        key(other),
        key(tokenizer=cases.byte_level(cases.HEADERS, eos="</s>")),
        key(tokenizer=cases.byte_level()),
        key(tokenizer=cases.metaspace(cases.CHATML)),
        key(form=SFTDataConfig(loss_on="last")),
        key(form=SFTDataConfig(chat_template=False)),
        key(form=SFTDataConfig(template_kwargs={"enable_thinking": False})),
        key(limit=2),
    ]
    assert len(set(different)) == len(different)


def test_a_cache_that_cannot_be_written_says_what_to_change(words: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(DataError, match=r"its tokens cannot be kept in .*Set data\.cache_dir"):
        load(words, cache_dir=str(blocked))


def test_progress_is_told(words: Path) -> None:
    told: list[tuple[str, int]] = []
    load(words, on_progress=lambda name, rows: told.append((name, rows)))
    assert told == [("words", 3)]
