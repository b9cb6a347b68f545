"""Recorded experts on their way from an engine to a turn, to disk and back."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.errors import DataError, EngineError
from skyrl_train.rollout.checked_engine import check_answer
from skyrl_train.rollout.generator import RolloutGenerator
from skyrl_train.rollout.journal import Journal
from skyrl_train.telemetry.records import decode_trajectory, encode_trajectory, read_json_lines
from skyrl_train.types import (
    GenerationOutput,
    GenerationRequest,
    Prompt,
    SamplingParams,
    StopReason,
    Turn,
    decode_routing,
    encode_routing,
    routing_column,
)
from tests.support.fake_environments import FAKE_ENVIRONMENT, FakeEnvironment, done_with, go_on_with
from tests.support.fakes import FakeEngine, make_output, make_prompts, make_tokenizer
from tests.support.fakes_trainer import make_trajectory, make_turn

TOKENIZER = make_tokenizer()
ANSWER = [*TOKENIZER.encode("#### 4"), 3]
REQUEST = GenerationRequest(
    request_id="stream-5-000000-0000-000", prompt_token_ids=(1, 2), sampling=SamplingParams(), seed=1
)
ROUTED = np.arange(3 * 2 * 2).reshape(3, 2, 2)


def numbered(request: GenerationRequest, *, layers: int = 2) -> GenerationOutput:
    """Of each token of prompt and response but the last, its place."""
    count = len(request.prompt_token_ids) + len(ANSWER) - 1
    routed = np.broadcast_to(np.arange(count, dtype=np.uint16)[:, None, None], (count, layers, 2))
    return make_output(ANSWER, routed_experts=routed)


def turns_of(engine: FakeEngine) -> tuple[Turn, ...]:
    FakeEnvironment.reset()
    environment = EnvironmentConfig(env_class=FAKE_ENVIRONMENT, step_timeout_s=5.0, isolation="thread")
    generator = RolloutGenerator(engine, TOKENIZER, GeneratorConfig(max_turns=2), environment, 0)
    prompts = make_prompts(1, steps=[go_on_with("Try again"), done_with(1.0)])
    try:
        found = generator.generate(
            prompts, n_samples_per_prompt=1, sampling=SamplingParams(), global_step=1, purpose="train"
        )
    finally:
        generator.close()
    return found.trajectories[0].turns


def test_a_turn_keeps_what_is_new_in_it() -> None:
    engine = FakeEngine(numbered)
    first, second = turns_of(engine)
    start = len(first.added_token_ids) + len(ANSWER) - 1
    assert first.routed_experts[:, 0, 0].tolist() == list(range(start))
    whole = len(engine.requests[1].prompt_token_ids) + len(ANSWER) - 1
    assert second.routed_experts[:, 1, 1].tolist() == list(range(start, whole)), "from the last token of turn 0 on"
    assert first.routed_experts.dtype == np.int16
    assert not first.routed_experts.flags.writeable
    assert not len(turns_of(FakeEngine(lambda _: make_output(ANSWER)))[0].routed_experts)


@pytest.mark.parametrize(
    ("routed", "says"),
    [
        (np.zeros((5, 2, 2), int), "experts of 5 tokens, and computed 4"),
        (np.zeros((4, 2), int), "experts must be whole numbers"),
        (np.zeros((4, 2, 2)), "experts must be whole numbers"),
        (np.full((4, 2, 2), -1), "must lie between 0"),
        ("abc", "experts must be whole numbers"),
        (None, "experts must be whole numbers"),
        ([[1], [2, 3]], "routed_experts that are none"),
    ],
)
def test_an_engine_that_answers_with_something_else_is_refused(routed: Any, says: str) -> None:
    given = make_output((8, 2, 5), routed_experts=routed)
    with pytest.raises(EngineError, match=says):
        check_answer(given, REQUEST, vocabulary_size=50, versions=(7, 7))


def test_a_good_answer_passes_as_it_is() -> None:
    given = make_output((8, 2, 5), routed_experts=routing_column(ROUTED))
    assert check_answer(given, REQUEST, vocabulary_size=50, versions=(7, 7)).routed_experts is given.routed_experts
    plain = make_output((8, 2, 5))
    assert check_answer(plain, REQUEST, vocabulary_size=50, versions=(7, 7)) is plain


@pytest.mark.parametrize("largest", [11, 255, 256, 2**15 - 1])
def test_a_rollout_is_read_back_with_its_experts(largest: int) -> None:
    routed = ROUTED + largest - 11
    trajectory = make_trajectory(make_turn((1, 2), (3, 4), routed_experts=routed))
    line = json.loads(json.dumps(encode_trajectory(Prompt(uid="p0", messages=()), trajectory)))
    assert decode_trajectory(line)[1] == trajectory
    assert np.array_equal(decode_trajectory(line)[1].turns[0].routed_experts, routed)
    bare = encode_trajectory(Prompt(uid="p0", messages=()), make_trajectory(make_turn()))
    assert "routed_experts" not in bare["turns"][0]


@pytest.mark.parametrize(
    "wrong",
    ["abc", [3, 2, 2], [3, 2, 2, "AAAA"], [3, 2, -2, ""], [3, 2, 2.0, ""], [True, 1, 1, "AA=="], [1, 1, 1, "?"]],
)
def test_a_line_with_other_experts_is_refused_with_its_number(tmp_path: Path, wrong: Any) -> None:
    trajectory = make_trajectory(make_turn((1, 2), (3, 4), routed_experts=ROUTED))
    line = encode_trajectory(Prompt(uid="p0", messages=()), trajectory)
    line["turns"][0]["routed_experts"] = wrong
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(line))
    with pytest.raises(DataError, match=r"rollouts.jsonl, line 1: .*turn 0"):
        read_json_lines(path)


def test_a_journal_answers_with_the_experts_that_the_engine_had_recorded(tmp_path: Path) -> None:
    answer = make_output((8, 2), stop_reason=StopReason.STOP, routed_experts=routing_column(ROUTED))
    journal = Journal(tmp_path / "journal.jsonl", prompts="p")
    other = replace(REQUEST, request_id="stream-5-000000-0001-000")
    asyncio.run(journal.keep_turn(REQUEST, answer))
    asyncio.run(journal.keep_turn(other, make_output((8, 2))))
    journal.close()
    again = Journal(tmp_path / "journal.jsonl", prompts="p")
    found, plain = again.turn(REQUEST), again.turn(other)
    again.close()
    assert found is not None
    assert plain is not None
    assert np.array_equal(found.routed_experts, ROUTED)
    assert not len(plain.routed_experts)


def test_experts_below_256_take_a_byte_each() -> None:
    assert encode_routing(routing_column(ROUTED))[:3] == [3, 2, 2]
    assert len(encode_routing(routing_column(ROUTED))[3]) == 16
    assert np.array_equal(decode_routing(encode_routing(routing_column(ROUTED + 999))), ROUTED + 999)
