"""A server whose samples vLLM draws: from each adapter what its own log-probabilities say, from all of them in one batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.support.serve_cases import BASE, HAS_SCHEMA, NEEDS_SCHEMA, Caller, datum, serving

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)]

MODELS = 18
"""More than the engine holds."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(tmp_path_factory.mktemp("server"), "generator=vllm") as http:
        yield http


def trained(caller: Caller, number: int) -> str:
    """A model that has learned to say one token after 1, 2, 3."""
    model = caller.model(seed=number)
    for step in range(6):
        caller.outcome(caller.train(model, 1 + 2 * step, [datum((1, 2, 3), (2, 3, 100 + number), weights=(0, 0, 1))]))
        caller.outcome(caller.step(model, 2 + 2 * step, learning_rate=0.05))
    return model


def test_each_adapter_answers_with_what_it_has_learned(server: Any) -> None:
    callers = [Caller(server) for _ in range(MODELS)]
    models = [trained(caller, number) for number, caller in enumerate(callers)]
    samplers = [caller.snapshot(model, 13, 0) for caller, model in zip(callers, models)]
    said: set[int] = set()
    for again in range(2):
        asked = [
            caller.sample(sampler, again, params={"max_tokens": 1, "temperature": 0.0}, prompt_logprobs=True)
            for caller, sampler in zip(callers, samplers)
        ]
        for number, promise in enumerate(asked):
            found = callers[number].outcome(promise)
            (drawn,) = found["sequences"]
            expected = callers[number].logprobs(models[number], 14 + again, (1, 2, 3, *drawn["tokens"]))[:3]
            assert [*found["prompt_logprobs"][1:], *drawn["logprobs"]] == pytest.approx(expected, abs=1e-3)
            said |= set(drawn["tokens"])
    assert len(said & set(range(100, 100 + MODELS))) > MODELS // 2, "most have learned their token"


def test_log_probabilities_are_those_of_the_learner(server: Any) -> None:
    caller = Caller(server)
    model = trained(caller, 40)
    sampler = caller.snapshot(model, 13, 0)
    drawn = caller.outcome(caller.sample(sampler, 0, num_samples=4, params={"max_tokens": 12}))["sequences"]
    assert len({tuple(each["tokens"]) for each in drawn}) > 1, "samples of a request differ"
    for number, each in enumerate(drawn):
        expected = caller.logprobs(model, 14 + number, (1, 2, 3, *each["tokens"]))[2:-1]
        assert each["logprobs"] == pytest.approx(expected, abs=1e-3)
    again = caller.outcome(caller.sample(sampler, 1, num_samples=4, params={"max_tokens": 12}))["sequences"]
    assert [each["tokens"] for each in again] == [each["tokens"] for each in drawn], "the seed decides"


def test_the_base_answers_beside_them_and_stops_where_it_is_told(server: Any) -> None:
    caller = Caller(server)
    content = {"session_id": caller.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = caller.send("create_sampling_session", content)["sampling_session_id"]
    first = caller.outcome(caller.sample(sampler, 0, params={"max_tokens": 8, "temperature": 0.0}))["sequences"][0]
    again = caller.outcome(
        caller.sample(sampler, 1, params={"max_tokens": 8, "temperature": 0.0, "stop": [first["tokens"][2]]})
    )["sequences"][0]
    assert (again["tokens"], again["stop_reason"]) == (first["tokens"][:3], "stop")


def test_a_rank_without_room_is_refused_with_what_makes_room(server: Any) -> None:
    caller = Caller(server)
    content = {"session_id": caller.session(), "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 128}}
    assert "model.lora.rank=128" in caller.send("create_model", content, status=400)["error"]
