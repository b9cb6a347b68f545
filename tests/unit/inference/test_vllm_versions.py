from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np

from skyrl_train.inference.vllm.core import Running, _answer
from skyrl_train.types import GenerationRequest, SamplingParams, VersionRun

REQUEST = GenerationRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), seed=1)


def completion(*token_ids: int) -> SimpleNamespace:
    """What vLLM gives of one request after a step."""
    return SimpleNamespace(
        token_ids=list(token_ids),
        logprobs=[{each: SimpleNamespace(logprob=-0.5)} for each in token_ids],
        routed_experts=None,
    )


def test_a_request_that_runs_on_with_new_weights_says_which_sampled_which_token() -> None:
    running = Running(REQUEST, Future())
    running.take(completion(), 3)
    for token, version in ((11, 4), (12, 4), (13, 5), (14, 5), (15, 7)):
        running.take(completion(token), version)
    output = _answer(running, "stop")
    assert output.token_ids == (11, 12, 13, 14, 15)
    assert output.weight_versions == (VersionRun(0, 4), VersionRun(2, 5), VersionRun(4, 7))


def test_one_version_is_one_run() -> None:
    running = Running(REQUEST, Future())
    running.take(completion(11, 12), 4)
    assert _answer(running, "length").weight_versions == ((0, 4),)


def test_experts_come_with_the_last_token() -> None:
    running = Running(REQUEST, Future())
    running.take(completion(11), 4)
    assert not len(_answer(running, "length").routed_experts)
    last = completion(12)
    last.routed_experts = np.full((5, 2, 2), 255, np.uint8)
    running.take(last, 4)
    found = _answer(running, "length").routed_experts
    assert (found.shape, found.dtype, int(found.min())) == ((5, 2, 2), np.dtype(np.int16), 255)
