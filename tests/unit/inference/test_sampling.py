"""One token per row, decided by one uniform number."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from skyrl_train.inference.sampling import SamplingTable, sample_tokens
from skyrl_train.types import SamplingParams

PROBABILITIES = (0.1, 0.4, 0.2, 0.3)


def sample(uniform: float, **params: Any) -> tuple[int, float]:
    """Token and log-probability of one row with `PROBABILITIES`."""
    logits = torch.tensor([PROBABILITIES]).log() + 5.0
    table = SamplingTable.of([SamplingParams(**params)], vocab_size=4, device=torch.device("cpu"))
    tokens, logprobs = sample_tokens(logits, torch.tensor([uniform], dtype=torch.float64), table)
    return int(tokens), float(logprobs)


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.099, 0), (0.101, 1), (0.499, 1), (0.501, 2), (0.701, 3), (1 - 2**-53, 3)]
)
def test_the_uniform_number_falls_into_a_tokens_share(uniform: float, token: int) -> None:
    assert sample(uniform)[0] == token


def test_the_logprob_is_that_of_the_distribution_after_temperature() -> None:
    weights = [p**2 for p in PROBABILITIES]
    assert sample(0.05)[1] == pytest.approx(math.log(0.1), abs=1e-6)
    assert sample(0.0, temperature=0.5)[1] == pytest.approx(math.log(weights[0] / sum(weights)), abs=1e-6)


def test_temperature_zero_is_greedy_with_logprobs_at_temperature_one() -> None:
    token, logprob = sample(0.999, temperature=0.0)
    assert (token, logprob) == (1, pytest.approx(math.log(0.4), abs=1e-6))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.95}, {0, 1, 2, 3}),
        ({"min_p": 0.4}, {1, 2, 3}),
        ({"min_p": 0.6}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 2, "top_p": 0.5}, {1}),
        ({"top_k": 3, "min_p": 0.6}, {1, 3}),
    ],
)
def test_truncation_keeps_the_likeliest_tokens_and_never_gives_another(params: dict[str, Any], kept: set[int]) -> None:
    drawn = {sample(index / 200, **params)[0] for index in range(200)} | {sample(1 - 2**-53, **params)[0]}
    assert drawn == kept


def test_truncation_leaves_the_logprob_as_it_was_before() -> None:
    assert sample(0.0, top_k=1, top_p=0.3, min_p=0.9)[1] == pytest.approx(math.log(0.4), abs=1e-6)


def test_rows_with_different_parameters_do_not_affect_each_other() -> None:
    params = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams(min_p=0.6)]
    logits = torch.tensor([PROBABILITIES] * 4).log()
    table = SamplingTable.of(params, vocab_size=4, device=torch.device("cpu"))
    uniforms = torch.tensor([0.05, 0.05, 0.05, 0.99], dtype=torch.float64)
    assert sample_tokens(logits, uniforms, table)[0].tolist() == [0, 1, 1, 3]
    rows = torch.tensor([3, 0])
    assert sample_tokens(logits[rows], uniforms[rows], table.take(rows))[0].tolist() == [3, 0]


def test_a_token_that_cannot_be_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]])
    table = SamplingTable.of([SamplingParams()], vocab_size=3, device=torch.device("cpu"))
    for uniform in (0.0, 0.5, 1 - 2**-53):
        assert int(sample_tokens(logits, torch.tensor([uniform], dtype=torch.float64), table)[0]) == 1
