"""Trajectories to Parquet and back, exactly; files that are damaged or made elsewhere."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st
from pyarrow.parquet import ParquetFile, read_table, write_table

from skyrl_train.errors import DataError
from skyrl_train.images import Image, ImageSpan
from skyrl_train.telemetry.records import store as rollout_store
from skyrl_train.telemetry.records.store import (
    read_facts,
    read_failed_rollouts,
    read_rollouts,
    write_failed_rollouts,
    write_rollouts,
)
from skyrl_train.types import Failure, FailureKind, Outcome, Prompt, RolloutBatch, StopReason, Trajectory, Turn

PROMPT = Prompt(
    uid="train-17",
    messages=({"role": "user", "content": "2+2? ✓"},),
    env_class="gsm8k",
    extras={"reward_spec": {"ground_truth": "4"}, "extra_info": {"index": 17, "tags": ["a"]}},
    tools=({"type": "function", "function": {"name": "add"}},),
    dataset="sums",
)
ROUTED = np.arange(2 * 3 * 2).reshape(2, 3, 2)


def make_turn(**changes: Any) -> Turn:
    fields: dict[str, Any] = {
        "added_token_ids": (5, 9),
        "response_token_ids": (7, 2),
        "response_logprobs": (-0.1, -1 / 3),
        "response_text": "4",
        "reward": 0.1,
        "stop_reason": StopReason.LENGTH,
        "weight_versions": ((0, 3), (1, 4)),
    }
    return Turn(**{**fields, **changes})


def make_trajectory(sample: int = 0, **changes: Any) -> Trajectory:
    said = ({"role": "tool", "content": "no", "name": "add"},)
    call = {"id": "000010000", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "\u2713"}}}
    images = (ImageSpan(1, Image(key="ab" * 32, num_tokens=2)), ImageSpan(3, Image(key="0c" * 32, num_tokens=1)))
    second = make_turn(parent=0, added_token_ids=(4, 9, 9, 9), loss_mask=(True, False), observations=said)
    second = replace(second, tool_calls=(call,), images=images)
    third = make_turn(parent=None, response_logprobs=(), routed_experts=ROUTED, weight_versions=((0, 5),))
    fields: dict[str, Any] = {
        "prompt_uid": "train-17",
        "sample_index": sample,
        "turns": (make_turn(), second, third, make_turn(parent=0)),
        "outcome": Outcome.MAX_TURNS,
        "metrics": {"solved": 0.1},
        "rewards": {"environment": 0.1, "length": -1 / 3},
        "first_messages": ({"role": "system", "content": "Add."},),
        "teacher_prompt_token_ids": (1, 2, 3),
        "greedy_reward": 1 / 7,
    }
    return Trajectory(**{**fields, **changes})


def failed(sample: int, *turns: Turn) -> Trajectory:
    failure = Failure(kind=FailureKind.INVALID_REWARD, message="the reward nan", turn_index=len(turns))
    return Trajectory(prompt_uid="train-17", sample_index=sample, turns=turns, outcome=Outcome.FAILED, failure=failure)


BATCH = RolloutBatch(
    prompts=(PROMPT,), trajectories=(make_trajectory(), failed(1), failed(2, make_turn())), n_samples_per_prompt=3
)


def write(folder: Path, batch: RolloutBatch = BATCH, **changes: Any) -> Path:
    return write_rollouts(folder, batch, **{"purpose": "train", "global_step": 12, **changes})


def one(trajectory: Trajectory, prompt: Prompt = PROMPT) -> RolloutBatch:
    return RolloutBatch(prompts=(prompt,), trajectories=(trajectory,), n_samples_per_prompt=1)


def test_what_is_written_is_read_back_exactly(tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts")
    assert path == tmp_path / "rollouts" / "train_step_000012.parquet"
    assert read_rollouts(path) == {12: BATCH}
    assert write(tmp_path / "again").read_bytes() == path.read_bytes()


def test_writing_imports_no_pandas(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from skyrl_train.telemetry.records.store import write_rollouts\n"
        "from skyrl_train.types import Outcome, Prompt, RolloutBatch, StopReason, Trajectory, Turn\n"
        "turn = Turn(added_token_ids=(5,), response_token_ids=(7,), response_logprobs=(-0.1,), response_text='4',\n"
        "            reward=0.1, stop_reason=StopReason.STOP, weight_versions=((0, 3),))\n"
        "one = Trajectory(prompt_uid='a', sample_index=0, turns=(turn,), outcome=Outcome.DONE)\n"
        "prompt = Prompt(uid='a', messages=({'role': 'user', 'content': '2+2?'},))\n"
        "batch = RolloutBatch(prompts=(prompt,), trajectories=(one,), n_samples_per_prompt=1)\n"
        f"write_rollouts(Path({str(tmp_path)!r}), batch, purpose='train', global_step=1)\n"
        "print('pandas' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


def test_a_batch_of_several_row_groups_is_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_store, "_ROW_GROUP_ITEMS", 3)
    path = write(tmp_path)
    assert ParquetFile(path).num_row_groups == 3
    assert read_rollouts(path) == {12: BATCH}


finite_float32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
any_turn = st.tuples(
    st.lists(finite_float32, min_size=1, max_size=5),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4),
    st.text(),
)


@settings(max_examples=5, deadline=None)
@given(given_turns=st.lists(any_turn, min_size=10, max_size=30))
def test_every_finite_float_every_token_and_every_text_survives(
    given_turns: list[tuple[list[float], float, list[int], str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    trajectories = [
        make_trajectory(
            sample,
            turns=(
                make_turn(
                    added_token_ids=ids,
                    response_token_ids=range(len(logprobs)),
                    response_logprobs=logprobs,
                    weight_versions=((0, 2**31 - 1),),
                    response_text=text,
                    reward=reward,
                ),
            ),
            metrics={text: reward},
        )
        for sample, (logprobs, reward, ids, text) in enumerate(given_turns)
    ]
    prompt = replace(PROMPT, dataset=given_turns[0][-1])
    batch = RolloutBatch(prompts=(prompt,), trajectories=tuple(trajectories), n_samples_per_prompt=len(trajectories))
    read = read_rollouts(write(tmp_path_factory.getbasetemp(), batch))
    assert read == {12: batch}
    for one_read, (_, reward, _, _) in zip(read[12].trajectories, given_turns):
        assert math.copysign(1, one_read.turns[0].reward) == math.copysign(1, reward)


def test_a_file_holds_what_a_reader_looks_for(tmp_path: Path) -> None:
    columns = {"advantages": [[np.float32((0.5, 0.25 + turn)) for turn in range(4)], None, None]}
    table = read_table(write(tmp_path, columns=columns))
    first, second, *_, nothing, last = table.to_pylist()
    assert (first["uid"], first["sample"], first["turn"], first["num_turns"]) == ("train-17", 0, 0, 4)
    assert (first["global_step"], first["purpose"], first["outcome"]) == (12, "train", "max_turns")
    assert json.loads(first["extras"])["reward_spec"] == {"ground_truth": "4"}
    assert json.loads(second["observations"]) == [{"role": "tool", "content": "no", "name": "add"}]
    assert (second["prompt"], second["parent"], second["loss_mask"]) == (None, 0, [True, False])
    assert second["versions"] == [{"start": 0, "version": 3}, {"start": 1, "version": 4}]
    assert (first["advantages"], second["advantages"]) == ([0.5, 0.25], [0.5, 1.25])
    assert first["trajectory_reward"] == make_trajectory().reward
    assert (nothing["turn"], nothing["failure_kind"], nothing["reward"]) == (None, "invalid_reward", None)
    assert (last["turn"], last["failure_message"], last["failure_turn"]) == (0, "the reward nan", 1)
    metadata = json.loads(table.schema.metadata[b"skyrl_train"])
    assert metadata == {"format": 1, "float_columns": {"advantages": "float32"}, "sample_fraction": 1.0}


def test_other_programs_open_it_in_a_line(tmp_path: Path) -> None:
    """As `docs/rollouts.md` says."""
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    (path, *_), pattern = [write(tmp_path, global_step=step) for step in (1, 2)], str(tmp_path / "train_*.parquet")
    frame = pandas.read_parquet(path)
    assert frame[frame["turn"] == 0]["trajectory_reward"].mean() == make_trajectory().reward
    rows = datasets.load_dataset("parquet", data_files=pattern, split="train", cache_dir=str(tmp_path / "cache"))
    assert len(rows) == 12
    assert rows[0]["response_token_ids"] == [7, 2]
    assert rows[1]["versions"] == [{"start": 0, "version": 3}, {"start": 1, "version": 4}]


def test_columns_may_be_rounded_to_bfloat16_and_the_file_says_so(tmp_path: Path) -> None:
    values = np.float32([1.00390625, 1.01171875, math.nan, -math.inf, -1 / 3, 0.0, -1e-30, 3e38])
    turn = make_turn(response_token_ids=range(8), response_logprobs=(), weight_versions=((0, 1),))
    batch = one(make_trajectory(turns=(turn,)))
    path = write(tmp_path, batch, columns={"entropies": [[values]]}, to_bfloat16=True)
    (found,) = read_table(path)["entropies"].to_pylist()
    assert found[:2] == [1.0, 1.015625]
    assert math.isnan(found[2])
    assert found[3] == -math.inf
    kept = np.float32(found)
    assert not (kept.view(np.uint32)[[0, 1, 4, 5, 6, 7]] & 0xFFFF).any()
    assert np.allclose(kept[4:7], values[4:7], rtol=2**-8)
    assert read_facts(path).float_columns == {"entropies": "bfloat16"}
    assert read_rollouts(path) == {12: batch}


def test_a_write_that_fails_leaves_the_earlier_file_as_it_was(tmp_path: Path) -> None:
    path = write(tmp_path)
    columns = {"advantages": [None, None, [np.float32([0.5])]]}
    with pytest.raises(ValueError, match="advantages of train-17/2 do not match"):
        write(tmp_path, columns=columns)
    assert read_rollouts(path) == {12: BATCH}
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / ".train_step_000012.parquet.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []


class Untold:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_whatever_an_environment_said_can_be_written(tmp_path: Path) -> None:
    strange = {"nan": math.nan, "half": "a\ud800", "untold": Untold(), "huge": 10**5000, 3: {(1, 2): [math.inf]}}
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    prompt = replace(PROMPT, uid="\udc00", extras={**strange, "deep": deep})
    turn = make_turn(response_text="b\udfff\0", observations=({"role": "user", "content": "\ud812"},))
    path = write(tmp_path, one(make_trajectory(turns=(turn,), metrics={"x": math.nan}), prompt))
    (row,) = read_table(path).to_pylist()
    assert json.loads(row["metrics"]) == {"x": "nan"}
    assert row["text"] == "b\\udfff\0"
    assert json.loads(row["observations"])[0]["content"] == "\\ud812"
    extras = json.loads(row["extras"])
    assert (extras["nan"], extras["half"], extras["untold"]) == ("nan", "a\\ud800", "<Untold>")
    assert (extras["3"], extras["huge"]) == ({"(1, 2)": ["inf"]}, hex(10**5000))
    with pytest.raises(DataError, match=r"train_step_000012.parquet, row 1: .*nested deeper than 64"):
        read_rollouts(path)


def test_a_failed_step_keeps_numbers_that_are_not_finite(tmp_path: Path) -> None:
    turn = make_turn(reward=math.nan, response_logprobs=(-math.inf, math.nan))
    rollouts = [(PROMPT, make_trajectory(3, turns=(turn,), metrics={"x": -math.inf})), (PROMPT, failed(1))]
    write(tmp_path, global_step=3)
    path = write_failed_rollouts(tmp_path, rollouts, global_step=3, error="NonFiniteError: \ud800")
    assert [each.name for each in tmp_path.iterdir()] == ["failed_step_000003.parquet"]
    (_, first), (prompt, second) = read_failed_rollouts(path)
    assert math.isnan(first.turns[0].reward)
    assert first.turns[0].response_logprobs.tolist()[0] == -math.inf
    assert (first.sample_index, first.metrics) == (3, {"x": -math.inf})
    assert (prompt, second) == rollouts[1]
    assert {row["error"] for row in read_table(path).to_pylist()} == {"NonFiniteError: \\ud800"}
    with pytest.raises(DataError, match="row 1"):
        read_rollouts(path)


def test_texts_of_megabytes_and_a_batch_of_nothing(tmp_path: Path) -> None:
    long = one(make_trajectory(turns=(make_turn(response_text="word " * 500_000),)))
    assert read_rollouts(write(tmp_path, long)) == {12: long}
    empty = write(tmp_path, RolloutBatch(prompts=(), trajectories=(), n_samples_per_prompt=1), global_step=1)
    assert read_table(empty).num_rows == 0
    with pytest.raises(DataError, match=r"train_step_000001\.parquet: no trajectories in it"):
        read_rollouts(empty)


# Files made elsewhere


def changed(path: Path, **columns: Any) -> Path:
    """The file with other columns."""
    table = read_table(path)
    for name, values in columns.items():
        index = table.schema.get_field_index(name)
        if values is None:
            table = table.remove_column(index)
        else:
            array = values if isinstance(values, pa.Array) else pa.array(values, table.schema.field(name).type)
            table = table.set_column(index, name, array)
    write_table(table.replace_schema_metadata(None), path)
    return path


def test_what_pandas_wrote_again_is_read(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    batch = one(make_trajectory(turns=(make_turn(), make_turn(parent=0))))
    frame = pandas.read_parquet(write(tmp_path, batch))
    frame["response_token_ids"] = [[7, 2], [8, 1]]
    frame["uid"] = frame["uid"].astype("category")
    frame.to_parquet(tmp_path / "mine.parquet")
    (read,) = read_rollouts(tmp_path / "mine.parquet")[12].trajectories
    assert [turn.response_token_ids.tolist() for turn in read.turns] == [[7, 2], [8, 1]]
    assert read.rewards == batch.trajectories[0].rewards


def test_tokens_and_rewards_are_enough(tmp_path: Path) -> None:
    rows = [{"uid": "q", "turn": 0, "added_token_ids": [1, 2], "response_token_ids": [3], "reward": 1.0}] * 2
    write_table(pa.Table.from_pylist(rows), tmp_path / "mine.parquet")
    batch = read_rollouts(tmp_path / "mine.parquet")[0]
    assert [(each.prompt_uid, each.sample_index) for each in batch.trajectories] == [("q", 0), ("q", 1)]
    assert batch.trajectories[0].turns[0].stop_reason is StopReason.STOP


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"uid": None}, "it has no column uid"),
        ({"reward": None, "turn": None}, "it has no column turn, reward"),
        ({"uid": [None, None]}, "rows 1 to 2: not a recorded trajectory (no 'uid'"),
        ({"uid": ["a", "b"]}, "turn 1 of b/0 stands where its turn 1 belongs"),
        ({"turn": [0, 2]}, "turn 2 of train-17/0 stands where its turn 1 belongs"),
        ({"turn": [0, 0]}, "row 1: not a recorded trajectory (1 of its 2 turns are there"),
        ({"turn": [None, None]}, "row 1: not a recorded trajectory (0 of its 2 turns are there"),
        ({"num_turns": [3, 3]}, "2 of its 3 turns are there"),
        ({"outcome": ["great", "great"]}, "outcome must be 'done', 'truncated', "),
        ({"outcome": ["failed", "failed"]}, "outcome and failure disagree"),
        ({"parent": [None, 1]}, "parent must be the number of an earlier turn or null; got 1"),
        ({"reward": [1.0, math.nan]}, "turn 1: reward must be a finite number; got nan"),
        ({"reward": [None, 1.0]}, "turn 0: no 'reward'"),
        ({"logprobs": [[0.0], None]}, "1 log-probabilities for 2 response tokens"),
        ({"logprobs": [[0.0, math.inf], None]}, "turn 0: a log-probability must be finite in float32"),
        ({"logprobs": [[0.0, None], None]}, "logprobs has an element that is null"),
        ({"loss_mask": [[True], None]}, "1 flags of the loss mask for 2 response tokens"),
        ({"response_token_ids": [[], [1]]}, "a turn has an empty prompt or response"),
        ({"added_token_ids": [None, [1]]}, "turn 0: no 'added_token_ids' or 'prompt_token_ids'"),
        ({"added_token_ids": [[], [1]]}, "turn 0: a turn has an empty prompt or response"),
        ({"response_token_ids": [[-1, 1], [1, 1]]}, "token ids must lie between 0"),
        ({"response_token_ids": pa.array([[2**40], [1]])}, "not in range"),
        ({"response_token_ids": pa.array(["a", "b"])}, "it is damaged"),
        ({"versions": [[{"start": 1, "version": 0}], None]}, "weight_versions must be runs"),
        ({"routed_experts": [[1, 2], None]}, "routed_experts_shape must be [tokens, layers, k]; got []"),
        ({"prompt": ["[1]", None]}, "prompt[0] must be an object; got 1"),
        ({"prompt": ["{", None]}, "not valid JSON"),
        ({"observations": ['["x"]', "[]"]}, "turn 0: observations[0] must be an object; got 'x'"),
        ({"failure_kind": ["x", "x"]}, "failure.kind must be 'environment_error', "),
    ],
)
def test_a_row_that_is_no_turn_is_named(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    batch = one(make_trajectory(turns=(make_turn(), make_turn(parent=0))))
    path = changed(write(tmp_path, batch), **columns)
    with pytest.raises(DataError) as caught:
        read_rollouts(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("{", "its metadata skyrl_train cannot be read"),
        ('{"format": 2}', "its format is 2, and 1 is what this version reads"),
        ('{"format": 1, "float_columns": {}, "sample_fraction": 0}', "sample_fraction must be above 0"),
    ],
)
def test_a_file_of_another_format_is_named(tmp_path: Path, metadata: str, message: str) -> None:
    path = write(tmp_path)
    write_table(read_table(path).replace_schema_metadata({"skyrl_train": metadata}), path)
    for read in (read_facts, read_rollouts):
        with pytest.raises(DataError, match=message):
            read(path)


def test_a_file_that_says_it_is_huge_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = one(make_trajectory(turns=(make_turn(response_text="a" * 1_000_000),)))
    path = write(tmp_path, long)
    monkeypatch.setattr("skyrl_train.telemetry.records.store._SMALL", 0)
    monkeypatch.setattr("skyrl_train.telemetry.records.store._LARGEST_EXPANSION", 20)
    with pytest.raises(DataError, match=r"it says that it holds 1\d{6} bytes"):
        read_rollouts(path)


def test_damaged_files_are_refused_by_name_or_hold_the_same(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole, numbers, told = path.read_bytes(), random.Random(0), list[str]()
    damaged = [b"", whole[:100], whole[:-1], b"PAR1" + whole, b"{}\n"]
    for _ in range(60):
        place = numbers.randrange(len(whole))
        damaged.append(whole[:place] + bytes([whole[place] ^ (1 << numbers.randrange(8))]) + whole[place + 1 :])
    for content in damaged:
        path.write_bytes(content)
        try:
            found = read_rollouts(path)
        except DataError as error:
            told.append(str(error))
            continue
        assert all(batch.trajectories for batch in found.values())
    assert len(told) > 25
    assert all(str(path) in each for each in told)
