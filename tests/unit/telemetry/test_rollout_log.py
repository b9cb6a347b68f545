"""Trajectories as JSON lines: what a journal keeps, and files made elsewhere or by versions before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from skyrl_train.errors import DataError
from skyrl_train.images import Image, ImageSpan
from skyrl_train.telemetry.records.log import decode_trajectory, encode_trajectory, read_json_lines
from skyrl_train.types import Failure, FailureKind, Outcome, Prompt, RolloutBatch, StopReason, Trajectory, Turn

PROMPT = Prompt(
    uid="train-17",
    messages=({"role": "user", "content": "2+2? ✓"},),
    env_class="gsm8k",
    extras={"reward_spec": {"ground_truth": "4"}, "extra_info": {"index": 17, "tags": ["a"]}},
)


def make_turn(**changes: Any) -> Turn:
    fields: dict[str, Any] = {
        "added_token_ids": (5, 9),
        "response_token_ids": (7, 2),
        "response_logprobs": (-0.1, -1 / 3),
        "response_text": "4",
        "reward": 0.1,
        "stop_reason": StopReason.LENGTH,
        "weight_versions": ((0, 3),),
    }
    return Turn(**{**fields, **changes})


def make_trajectory(sample: int = 0, **changes: Any) -> Trajectory:
    second = make_turn(parent=0, added_token_ids=(4,), response_token_ids=(8,), response_logprobs=(-1e-17,))
    second = replace(second, images=(ImageSpan(0, Image(key="ab" * 32, num_tokens=1)),))
    fields: dict[str, Any] = {
        "prompt_uid": "train-17",
        "sample_index": sample,
        "turns": (make_turn(), second),
        "outcome": Outcome.MAX_TURNS,
        "metrics": {"solved": 0.1},
    }
    return Trajectory(**{**fields, **changes})


FAILED = make_trajectory(
    1,
    turns=(make_turn(),),
    outcome=Outcome.FAILED,
    failure=Failure(kind=FailureKind.INVALID_REWARD, message="the reward nan", turn_index=1),
    metrics={},
)
BATCH = RolloutBatch(prompts=(PROMPT,), trajectories=(make_trajectory(), FAILED), n_samples_per_prompt=2)


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_what_is_written_is_read_back_exactly(tmp_path: Path) -> None:
    records = [{"global_step": 12, **encode_trajectory(PROMPT, each)} for each in BATCH.trajectories]
    assert read_json_lines(write_lines(tmp_path / "train_step_000012.jsonl", *records)) == {12: BATCH}


finite = st.floats(allow_nan=False, allow_infinity=False)
finite_float32 = st.floats(allow_nan=False, allow_infinity=False, width=32)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(logprobs=st.lists(finite_float32, min_size=1, max_size=5), reward=finite, text=st.text())
def test_every_finite_float_and_every_text_survives(logprobs: list[float], reward: float, text: str) -> None:
    turn = make_turn(
        response_token_ids=tuple(range(len(logprobs))),
        response_logprobs=tuple(logprobs),
        response_text=text,
        reward=reward,
    )
    trajectory = make_trajectory(turns=(turn,))
    line = json.dumps(encode_trajectory(PROMPT, trajectory), allow_nan=False)
    assert decode_trajectory(json.loads(line)) == (PROMPT, trajectory)


def test_a_line_holds_what_a_reader_looks_for() -> None:
    first, second = (encode_trajectory(PROMPT, each) for each in BATCH.trajectories)
    assert (first["uid"], first["sample"]) == ("train-17", 0)
    assert (first["outcome"], first["reward"], first["env_class"]) == ("max_turns", 0.2, "gsm8k")
    assert first["extras"]["reward_spec"] == {"ground_truth": "4"}
    assert second["failure"] == {"kind": "invalid_reward", "message": "the reward nan", "turn_index": 1}
    assert "reward" not in second


# Hand-written files

MINIMAL_TURN = {"prompt_token_ids": [1, 2], "response_token_ids": [3], "reward": 1}
MINIMAL = {"uid": "q", "turns": [MINIMAL_TURN]}


def test_group_tokens_and_rewards_are_enough(tmp_path: Path) -> None:
    other = {**MINIMAL, "uid": "r"}
    batch = read_json_lines(write_lines(tmp_path / "mine.jsonl", MINIMAL, other, MINIMAL, other))[0]
    assert [prompt.uid for prompt in batch.prompts] == ["q", "r"]
    assert [(t.prompt_uid, t.sample_index) for t in batch.trajectories] == [("q", 0), ("q", 1), ("r", 0), ("r", 1)]
    (turn,) = batch.trajectories[0].turns
    assert (turn.added_token_ids.tolist(), turn.response_token_ids.tolist(), turn.reward) == ([1, 2], [3], 1.0)
    assert (turn.response_logprobs.tolist(), turn.stop_reason) == ([], StopReason.STOP)


def test_whether_a_turn_continues_the_one_before_is_read_from_the_tokens(tmp_path: Path) -> None:
    def record(*second_prompt: int) -> dict[str, Any]:
        turns = [*MINIMAL["turns"], {"prompt_token_ids": second_prompt, "response_token_ids": [9], "reward": 0}]
        return {**MINIMAL, "turns": turns}

    for second_prompt, parent in (((1, 2, 3, 4), 0), ((1, 2, 4, 4), None)):
        _, trajectory = decode_trajectory(json.loads(json.dumps(record(*second_prompt))))
        assert [turn.parent for turn in trajectory.turns] == [None, parent]
        assert trajectory.prompt_token_ids(1).tolist() == list(second_prompt)


def test_what_earlier_versions_wrote_is_read(tmp_path: Path) -> None:
    """Whole prompts, one version of the weights a turn, log-probabilities with the digits of a double."""
    turn = {
        "reward": 0.0,
        "text": "4",
        "stop_reason": "length",
        "weight_version": 3,
        "extends_previous": True,
        "prompt_token_ids": [5, 9],
        "response_token_ids": [7, 2],
        "logprobs": [-0.10000000149011612, -1 / 3],
    }
    second = {**turn, "prompt_token_ids": [5, 9, 7, 2, 4], "reward": 1.0}
    batch = read_json_lines(write_lines(tmp_path / "old.jsonl", {**MINIMAL, "turns": [turn, second]}))[0]
    (found,) = batch.trajectories
    assert [each.added_token_ids.tolist() for each in found.turns] == [[5, 9], [4]]
    assert found.turns[1].response_logprobs.tolist() == [-0.10000000149011612, -0.3333333432674408]
    assert found.turns[1].weight_versions == ((0, 3),)


def test_trees_masks_and_runs_of_versions_are_kept() -> None:
    root = make_turn(weight_versions=((0, 3), (1, 4)), loss_mask=(True, False))
    turns = (root, make_turn(parent=0), make_turn(parent=None, added_token_ids=(6,)), make_turn(parent=0))
    trajectory = make_trajectory(turns=turns)
    record = json.loads(json.dumps(encode_trajectory(PROMPT, trajectory)))
    assert decode_trajectory(record) == (PROMPT, trajectory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uid": None}, "uid must be a text; got None"),
        ({"turns": None}, "not a recorded trajectory"),
        ({"turns": []}, "it has no turn and did not fail"),
        ({"turns": [{"prompt_token_ids": [1], "reward": 1}]}, "no 'response_token_ids'"),
        ({"turns": [{"prompt_token_ids": [1], "response_token_ids": [2]}]}, "no 'reward'"),
        ({"turns": [{"prompt_token_ids": [1], "response_token_ids": [], "reward": 1}]}, "empty prompt or response"),
        (
            {"turns": [MINIMAL_TURN, {"prompt_token_ids": [1], "response_token_ids": [2, True], "reward": 1}]},
            "turn 1: response_token_ids[1] must be a whole number from 0 to 2147483647; got True",
        ),
        (
            {"turns": [{"prompt_token_ids": [-1], "response_token_ids": [2], "reward": 1}]},
            "turn 0: prompt_token_ids[0] must be greater than or equal to 0; got -1",
        ),
        ({"turns": [{"response_token_ids": [2], "reward": 1}]}, "no 'added_token_ids' or 'prompt_token_ids'"),
        ({"turns": [{"prompt_token_ids": [1], "response_token_ids": [2], "reward": "1"}]}, "must be a finite number"),
        (
            {"turns": [{"prompt_token_ids": [1], "response_token_ids": [2], "reward": 1, "logprobs": [0.0, 0.0]}]},
            "turn 0: 2 log-probabilities for 1 response tokens",
        ),
        (
            {"turns": [{"prompt_token_ids": [1], "response_token_ids": [2], "reward": 1, "logprobs": [None]}]},
            "turn 0: logprobs[0] must be a finite number; got None",
        ),
        ({"turns": [{**MINIMAL_TURN, "logprobs": [-1e39]}]}, "a log-probability must be finite in float32"),
        ({"turns": [{**MINIMAL_TURN, "loss_mask": [1]}]}, "turn 0: loss_mask[0] must be true or false; got 1"),
        (
            {"turns": [{**MINIMAL_TURN, "weight_versions": [[0, 2**31]]}]},
            "turn 0: weight_versions[0][1] must be less than or equal to 2147483647; got 2147483648",
        ),
        ({"turns": [{**MINIMAL_TURN, "text": "a\ud800"}]}, "turn 0: 'text' has half of a character"),
        ({"prompt": [{"role": "user", "content": ["\udfff"]}]}, "'prompt[0].content[0]' has half of a character"),
        ({"metrics": {"solved": "1"}}, "metrics.solved must be a finite number; got '1'"),
        ({"failure": {"kind": "engine_error", "turn_index": 0}}, "no 'failure.message'"),
        (
            {"outcome": "great"},
            "outcome must be 'done', 'truncated', 'max_turns', 'context_full' or 'failed'; got 'great'",
        ),
        ({"outcome": "failed"}, "outcome and failure disagree"),
    ],
)
def test_a_line_that_is_no_trajectory_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_lines(tmp_path / "mine.jsonl", MINIMAL, {**MINIMAL, **change})
    with pytest.raises(DataError) as caught:
        read_json_lines(path)
    assert f"{path}, line 2: not a recorded trajectory" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no trajectories in it"),
        ('{"uid": \n', "line 1: not valid JSON"),
        ("[1]\n", "line 1: must be an object; got list"),
        ('{"uid": "q", "turns": [{"prompt_token_ids": [1], "response_token_ids": [2], "reward": NaN}]}\n', "finite"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message) as caught:
        read_json_lines(path)
    assert str(path) in str(caught.value)


def test_groups_must_be_equal_and_samples_numbered_once(tmp_path: Path) -> None:
    uneven = write_lines(tmp_path / "uneven.jsonl", MINIMAL, MINIMAL, {**MINIMAL, "uid": "r"})
    with pytest.raises(DataError, match="prompt r has 1 sample, others 2"):
        read_json_lines(uneven)
    doubled = write_lines(tmp_path / "doubled.jsonl", {**MINIMAL, "sample": 0}, {**MINIMAL, "sample": 0})
    with pytest.raises(DataError, match="samples of prompt q must be numbered 0 to 1, each once"):
        read_json_lines(doubled)
