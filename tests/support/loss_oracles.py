"""Policy losses and their derivatives straight from their formulas: plain loops over floats. And random inputs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skyrl_train.algorithms.losses import PolicyLossInputs, PolicyLossOutput
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.parts import POLICY_LOSSES
from skyrl_train.registry import TARGET


@dataclass(frozen=True)
class Token:
    """One trained token."""

    new: float
    old: float
    rollout: float
    advantage: float


Turn = list[Token]


def random_loss_inputs(
    seed: int, *, num_rows: int = 5, width: int = 9, spread: float = 0.5, holes: bool = True
) -> PolicyLossInputs:
    """Float64; one row without any trained token, NaN and infinity where the mask is False.

    The mask has holes, which divide a row into turns, or (`holes=False`) is one run from each row's first token.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(num_rows, width, generator=generator, dtype=torch.float64)

    mask = torch.rand(num_rows, width, generator=generator) > 0.3
    if not holes:
        mask = torch.arange(width) < mask.sum(1, keepdim=True).clamp(min=1)
    mask[0, 0], mask[-1] = True, False
    old = -normal().abs() - 0.05
    new = (old + spread * normal()).clamp(max=-1e-4)
    rollout = (old + 0.3 * spread * normal()).clamp(max=-1e-4)
    advantages = normal()
    junk = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64).repeat(num_rows, width)[:, :width]
    columns = [torch.where(mask, column, junk) for column in (new, old, rollout, advantages)]
    return PolicyLossInputs(
        logprobs=columns[0].requires_grad_(),
        old_logprobs=columns[1],
        rollout_logprobs=columns[2],
        advantages=columns[3],
        loss_mask=mask,
    )


def columns_of(inputs: PolicyLossInputs) -> dict[str, Tensor]:
    """Its tensors by name."""
    return {name: column for name, column in vars(inputs).items() if isinstance(column, Tensor)}


def turns_in(inputs: PolicyLossInputs) -> list[tuple[int, list[int], Turn]]:
    """Row, positions and tokens of each turn: a run of trained tokens that none can be added to."""
    columns = (inputs.logprobs, inputs.old_logprobs, inputs.rollout_logprobs, inputs.advantages)
    found: list[tuple[int, list[int], Turn]] = []
    for row, mask in enumerate(inputs.loss_mask.tolist()):
        for position, trained in enumerate(mask):
            if not trained:
                continue
            if not position or not mask[position - 1]:
                found.append((row, [], []))
            found[-1][1].append(position)
            found[-1][2].append(Token(*(float(column[row, position].detach()) for column in columns)))
    return found


def rows_in(inputs: PolicyLossInputs) -> list[tuple[int, list[int], Turn]]:
    """The same with all turns of a row as one sequence: a trajectory of one row."""
    joined: dict[int, tuple[int, list[int], Turn]] = {}
    for row, positions, turn in turns_in(inputs):
        _, so_far, tokens = joined.setdefault(row, (row, [], []))
        so_far += positions
        tokens += turn
    return list(joined.values())


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


LossOracle = Callable[..., tuple[float, float]]
"""`(row, index, config)`, and the loss's own arguments, to the token's loss and its derivative by the token's own
log-probability."""


def _ppo(ratio: float, advantage: float, config: AlgorithmConfig) -> tuple[float, float]:
    clipped = _clip(ratio, 1 - config.eps_clip_low, 1 + config.eps_clip_high)
    objective = min(ratio * advantage, clipped * advantage)
    free = ratio * advantage <= clipped * advantage
    return -objective, -ratio * advantage if free else 0.0


def regular_oracle(turn: Turn, index: int, config: AlgorithmConfig) -> tuple[float, float]:
    token = turn[index]
    return _ppo(math.exp(token.new - token.old), token.advantage, config)


def dual_clip_oracle(
    turn: Turn, index: int, config: AlgorithmConfig, *, clip_ratio_c: float = 3.0
) -> tuple[float, float]:
    token = turn[index]
    loss, slope = regular_oracle(turn, index, config)
    ceiling = -clip_ratio_c * token.advantage
    return (ceiling, 0.0) if token.advantage < 0 and loss > ceiling else (loss, slope)


def gspo_oracle(turn: Turn, index: int, config: AlgorithmConfig) -> tuple[float, float]:
    return _ppo(math.exp(statistics.fmean(t.new - t.old for t in turn)), turn[index].advantage, config)


def gmpo_oracle(turn: Turn, index: int, config: AlgorithmConfig) -> tuple[float, float]:
    def clipped(token: Token) -> tuple[float, float]:
        difference = token.new - token.old
        sign = (token.advantage > 0) - (token.advantage < 0)
        bounded = _clip(difference, -config.eps_clip_low, config.eps_clip_high)
        return (bounded, 0.0) if sign * bounded < sign * difference else (difference, 1.0)

    ratio = math.exp(statistics.fmean(clipped(token)[0] for token in turn))
    loss = -turn[index].advantage * ratio
    return loss, loss * clipped(turn[index])[1]


def vespo_oracle(
    turn: Turn,
    index: int,
    config: AlgorithmConfig,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> tuple[float, float]:
    token = turn[index]
    rises = token.advantage >= 0
    k = k_pos if rises else k_neg
    rate = lambda_pos if rises else lambda_neg
    weight = math.prod(math.exp(other.new - other.old) for other in turn)
    phi = weight**k * math.exp(rate * (1 - weight))
    return -phi * token.advantage * token.new, -phi * token.advantage


def cispo_oracle(turn: Turn, index: int, config: AlgorithmConfig) -> tuple[float, float]:
    token = turn[index]
    weight = _clip(math.exp(token.new - token.old), 1 - config.eps_clip_low, 1 + config.eps_clip_high)
    return -weight * token.advantage * token.new, -weight * token.advantage


def sapo_oracle(
    turn: Turn, index: int, config: AlgorithmConfig, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> tuple[float, float]:
    token = turn[index]
    tau = tau_pos if token.advantage > 0 else tau_neg
    ratio = math.exp(token.new - token.old)
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -token.advantage * 4 / tau * gate, -token.advantage * 4 * gate * (1 - gate) * ratio


def _covariances(turn: Turn) -> list[float]:
    mean = statistics.fmean(token.new for token in turn)
    return [token.advantage * (token.new - mean) for token in turn]


def _highest(turn: Turn, candidates: list[int], share: float) -> list[int]:
    quota = max(int(len(turn) * share), 1) if share > 0 else 0
    return sorted(candidates, key=lambda index: -_covariances(turn)[index])[:quota]


def clip_cov_oracle(
    turn: Turn, index: int, config: AlgorithmConfig, *, share: float = 0.0002, low: float = 1.0, high: float = 5.0
) -> tuple[float, float]:
    covariances = _covariances(turn)
    candidates = []
    for number, token in enumerate(turn):
        ratio = math.exp(token.new - token.old)
        clipped = _clip(ratio, 1 - config.eps_clip_low, 1 + config.eps_clip_high)
        free = -clipped * token.advantage <= -ratio * token.advantage
        if free and low < covariances[number] < high:
            candidates.append(number)
    if index in _highest(turn, candidates, share):
        return 0.0, 0.0
    return regular_oracle(turn, index, config)


def kl_cov_oracle(
    turn: Turn, index: int, config: AlgorithmConfig, *, share: float = 0.002, coef: float = 1.0
) -> tuple[float, float]:
    token = turn[index]
    ratio = math.exp(token.new - token.old)
    loss, slope = -ratio * token.advantage, -ratio * token.advantage
    if index in _highest(turn, list(range(len(turn))), share):
        loss += coef * abs(token.new - token.old)
        slope += coef * math.copysign(1.0, token.new - token.old)
    return loss, slope


def rollout_is_oracle(turn: Turn, index: int, config: AlgorithmConfig) -> tuple[float, float]:
    token = turn[index]
    ratio = math.exp(token.new - token.rollout)
    weight = ratio if 1 - config.eps_clip_low < ratio < 1 + config.eps_clip_high else 0.0
    return -weight * token.advantage * token.new, -weight * token.advantage


def dppo_oracle(
    turn: Turn, index: int, config: AlgorithmConfig, *, divergence: str = "tv", max_ratio: float = 20.0
) -> tuple[float, float]:
    token = turn[index]
    p, q = math.exp(token.rollout), math.exp(token.new)
    kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    distance = abs(p - q) if divergence == "tv" else kl
    left = (token.advantage > 0 and q > p and distance > config.eps_clip_high) or (
        token.advantage < 0 and q < p and distance > config.eps_clip_low
    )
    weight = 0.0 if left else min(q / p, max_ratio)
    return -weight * token.advantage * token.new, -weight * token.advantage


def importance_sampling_oracle(turn: Turn, index: int, config: AlgorithmConfig) -> tuple[float, float]:
    token = turn[index]
    ratio = math.exp(token.new - token.old)
    return -ratio * token.advantage, -ratio * token.advantage


def reinforce_oracle(turn: Turn, index: int, config: AlgorithmConfig) -> tuple[float, float]:
    return -turn[index].advantage * turn[index].new, -turn[index].advantage


def cross_entropy_oracle(turn: Turn, index: int, config: AlgorithmConfig) -> tuple[float, float]:
    return -turn[index].new, -1.0


def dro_oracle(turn: Turn, index: int, config: AlgorithmConfig, *, beta: float = 0.05) -> tuple[float, float]:
    token = turn[index]
    difference = token.new - token.old
    return -(token.advantage * token.new - beta / 2 * difference**2), -token.advantage + beta * difference


LOSS_ORACLES: dict[str, LossOracle] = {
    "regular": regular_oracle,
    "dual_clip": dual_clip_oracle,
    "gspo": gspo_oracle,
    "gmpo": gmpo_oracle,
    "vespo": vespo_oracle,
    "cispo": cispo_oracle,
    "sapo": sapo_oracle,
    "clip_cov": clip_cov_oracle,
    "kl_cov": kl_cov_oracle,
    "rollout_is": rollout_is_oracle,
    "dppo": dppo_oracle,
    "importance_sampling": importance_sampling_oracle,
    "reinforce": reinforce_oracle,
    "cross_entropy": cross_entropy_oracle,
    "dro": dro_oracle,
}


LossCase = tuple[AlgorithmConfig, Mapping[str, Mapping[str, Any]]]
"""A configuration, and by its name what arguments a loss is given beside it."""
LOSS_CASES: list[LossCase] = [
    (AlgorithmConfig(), {}),
    (
        AlgorithmConfig(eps_clip_low=0.1, eps_clip_high=0.6),
        {"dual_clip": {"clip_ratio_c": 1.3}, "sapo": {"tau_neg": 2.0}, "dppo": {"max_ratio": 1.2}},
    ),
    (AlgorithmConfig(), {"clip_cov": {"low": 0.1, "share": 0.3}, "kl_cov": {"share": 0.3, "coef": 0.5}}),
    (AlgorithmConfig(eps_clip_low=0.02, eps_clip_high=0.03), {"dppo": {"divergence": "kl", "max_ratio": 1.5}}),
    (AlgorithmConfig(sequence_unit="trajectory"), {"vespo": {"k_pos": 1.0, "lambda_neg": 0.5}}),
]


def loss_with(name: str, arguments: Mapping[str, Mapping[str, Any]]) -> Callable[..., PolicyLossOutput]:
    """The loss of that name with its arguments among these."""
    loss: Callable[..., PolicyLossOutput] = POLICY_LOSSES.resolve({TARGET: name, **arguments.get(name, {})})
    return loss


def loss_error(name: str, seed: int, case: LossCase) -> float:
    """Largest difference between loss, or gradient, and the oracle over one random input."""
    config, arguments = case
    inputs = random_loss_inputs(seed)
    whole = config.sequence_unit == "trajectory" and name in ("gspo", "gmpo", "vespo")
    turns = rows_in(inputs) if whole else turns_in(inputs)
    losses = loss_with(name, arguments)(inputs, config).token_losses
    (gradient,) = torch.autograd.grad(losses.sum(), inputs.logprobs)
    expected, slopes = torch.zeros_like(losses), torch.zeros_like(losses)
    for row, positions, turn in turns:
        for index, position in enumerate(positions):
            loss, slope = LOSS_ORACLES[name](turn, index, config, **arguments.get(name, {}))
            expected[row, position], slopes[row, position] = loss, slope
    return max(float((losses - expected).detach().abs().max()), float((gradient - slopes).abs().max()))
