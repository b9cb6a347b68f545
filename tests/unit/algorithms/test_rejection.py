"""Chains of rejection criteria, masked negatives, weights of mean 1, the tokens of highest entropy: plain loops."""

from __future__ import annotations

import math
import random
import re
import statistics
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms.losses.off_policy import off_policy_weights, rejected
from skyrl_train.algorithms.losses.policy import policy_loss
from skyrl_train.algorithms.losses.ratios import masked, rows_of, turns_of
from skyrl_train.algorithms.step_columns import high_entropy
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.algorithm import REJECTION_CRITERIA, AlgorithmConfig, OffPolicyConfig
from skyrl_train.config.rules import ALGORITHM_RULES, run_rules
from skyrl_train.errors import Violation
from tests.support.loss_oracles import LOSS_ORACLES, random_loss_inputs, rows_in, turns_in

BOUNDS = {"k1": [0.8, 1.3], "k2": 0.02, "k3": 0.02}
"""Near the middle of what `random_loss_inputs` draws, so that each criterion keeps and rejects."""
SCALE = {"token": 1.0, "sequence_mean": 1.0, "sequence_max": 3.0, "sequence_sum": 4.0}


def violations_of(algorithm: AlgorithmConfig) -> list[Violation]:
    return list(run_rules(Config(trainer=TrainerConfig(algorithm=algorithm)), ALGORITHM_RULES))


def bound_of(name: str) -> object:
    level, divergence = name.rsplit("_", 1)
    if divergence == "k1":
        return [0.92, 1.05] if level == "sequence_mean" else BOUNDS["k1"]
    return BOUNDS[divergence] * SCALE[level]  # type: ignore[operator]


def divergence(name: str, log_ratio: float) -> float:
    return {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": math.exp(log_ratio) - 1 - log_ratio}[name]


def keeps(criterion: str, bound: object, own: float, sequence: list[float]) -> bool:
    """Whether one criterion keeps a token of log-ratio `own` in a sequence of log-ratios."""
    level, name = criterion.rsplit("_", 1)
    values = [divergence(name, value) for value in sequence]
    aggregate = {"sequence_sum": math.fsum, "sequence_mean": statistics.fmean, "sequence_max": max}
    value = divergence(name, own) if level == "token" else aggregate[level](values)
    if name == "k1":
        low, high = bound  # type: ignore[misc]
        return math.log(low) <= value <= math.log(high)
    return value <= bound  # type: ignore[operator]


@pytest.mark.parametrize("unit", ["turn", "trajectory"])
@pytest.mark.parametrize("criteria", [*[(name,) for name in REJECTION_CRITERIA], ("token_k1", "sequence_mean_k3")])
def test_a_token_is_left_out_where_any_criterion_says_so(criteria: tuple[str, ...], unit: str) -> None:
    outcomes = set()
    for seed in range(20):
        inputs = random_loss_inputs(seed)
        assert inputs.rollout_logprobs is not None
        log_ratio = masked(inputs.old_logprobs - inputs.rollout_logprobs, inputs.loss_mask)
        sequences = turns_of(inputs.loss_mask) if unit == "turn" else rows_of(inputs.loss_mask)
        found = rejected(log_ratio, sequences, {name: bound_of(name) for name in criteria})
        for row, positions, turn in turns_in(inputs) if unit == "turn" else rows_in(inputs):
            ratios = [token.old - token.rollout for token in turn]
            for position, own in zip(positions, ratios):
                kept = all(keeps(name, bound_of(name), own, ratios) for name in criteria)
                outcomes.add(kept)
                assert bool(found[row, position]) is not kept
        assert not found[~inputs.loss_mask].any()
    assert outcomes == {True, False}


@pytest.mark.parametrize("with_rollout", [True, False])
def test_negatives_that_the_policy_has_left_behind_lose_loss_and_gradient(with_rollout: bool) -> None:
    config = AlgorithmConfig(off_policy=OffPolicyConfig(negative_kl_max=0.05))
    dropped = 0
    for seed in range(20):
        inputs = random_loss_inputs(seed)
        inputs = inputs if with_rollout else replace(inputs, rollout_logprobs=None)
        output = policy_loss(inputs, config)
        (gradient,) = torch.autograd.grad(output.token_losses.sum(), inputs.logprobs)
        for row, positions, turn in turns_in(random_loss_inputs(seed)):
            moved = statistics.fmean((t.rollout if with_rollout else t.old) - t.new for t in turn)
            for index, position in enumerate(positions):
                loss, slope = LOSS_ORACLES["regular"](turn, index, config)
                out = turn[index].advantage < 0 and moved > 0.05
                dropped += out
                expected = (0.0, 0.0) if out else (loss, slope)
                found = float(output.token_losses[row, position].detach()), float(gradient[row, position])
                assert found == pytest.approx(expected, abs=1e-13)
    assert dropped > 10


@pytest.mark.parametrize(("weight", "unit"), [("token", "turn"), ("sequence", "turn"), ("sequence", "trajectory")])
def test_normalised_weights_have_mean_1_over_tokens_or_sequences(weight: str, unit: str) -> None:
    for seed in range(20):
        inputs = random_loss_inputs(seed)
        assert inputs.rollout_logprobs is not None
        sequences = turns_of(inputs.loss_mask) if unit == "turn" else rows_of(inputs.loss_mask)
        config = OffPolicyConfig(weight=weight, weight_high=1.2, batch_normalize=True)  # type: ignore[arg-type]
        columns = (inputs.old_logprobs, inputs.rollout_logprobs, inputs.loss_mask)
        found = off_policy_weights(*columns, config, sequences=sequences).weights
        raw: list[tuple[int, int, float]] = []
        one_each = []
        for row, positions, turn in turns_in(inputs) if unit == "turn" else rows_in(inputs):
            ratios = [math.exp(token.old - token.rollout) for token in turn]
            weights = ratios if weight == "token" else [math.prod(ratios)] * len(ratios)
            weights = [min(value, 1.2) for value in weights]
            raw += [(row, position, value) for position, value in zip(positions, weights)]
            one_each += weights if weight == "token" else weights[:1]
        mean = statistics.fmean(one_each)
        for row, position, value in raw:
            assert float(found[row, position]) == pytest.approx(value / mean, abs=1e-12)


@pytest.mark.parametrize("quantile", [0.0, 0.25, 0.8, 1.0])
def test_the_tokens_of_highest_entropy_are_those_at_or_above_the_quantile(quantile: float) -> None:
    draw = random.Random(3)
    for _ in range(20):
        values = [draw.expovariate(1) for _ in range(draw.randint(1, 30))]
        mask = [draw.random() < 0.7 for _ in values]
        entropy, trained = torch.tensor(values, dtype=torch.float64), torch.tensor(mask)
        kept, metrics = high_entropy(entropy, trained, quantile)
        if not any(mask):
            assert not kept.any()
            continue
        threshold = float(torch.quantile(entropy[trained], quantile))
        assert kept.tolist() == [m and v >= threshold - 1e-15 for m, v in zip(mask, values)]
        assert metrics["policy/entropy_threshold"].value == pytest.approx(threshold)
        assert metrics["policy/high_entropy_fraction"].value == pytest.approx(int(kept.sum()) / sum(mask))


def test_weights_over_the_step_stand_for_those_of_the_rows_at_hand() -> None:
    inputs = random_loss_inputs(1)
    given: Tensor = torch.rand(inputs.loss_mask.shape, dtype=torch.float64)
    config = AlgorithmConfig(off_policy=OffPolicyConfig(weight="token"))
    weighted = policy_loss(replace(inputs, policy_weights=given), config).token_losses
    assert torch.equal(weighted, given * policy_loss(inputs, AlgorithmConfig()).token_losses)


@pytest.mark.parametrize(
    ("reject", "rule"),
    [
        ({"sequence_max_k1": 1}, "is no criterion"),
        ({"token_k1": 2}, r"must be \[low, high\]"),
        ({"token_k1": [2, 1]}, r"must be \[low, high\]"),
        ({"token_k3": 0}, "above 0"),
        ({"token_k3": [0.1, 2]}, "above 0"),
    ],
)
def test_a_criterion_that_says_nothing_is_refused(reject: dict[str, object], rule: str) -> None:
    (violation,) = run_rules(
        Config(trainer=TrainerConfig(algorithm=AlgorithmConfig(off_policy=OffPolicyConfig(reject=reject)))),
        ALGORITHM_RULES,
    )
    assert violation.field == f"trainer.algorithm.off_policy.reject.{next(iter(reject))}"
    assert re.search(rule, violation.rule)
