"""Weights that follow what they weigh: of the KL in the reward and of the entropy bonus. Pure: state in, state out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from skyrl_train.algorithms.losses.kl import token_kl
from skyrl_train.batch import masked_mean, require_bool, require_float
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import CheckpointError, NonFiniteError

MAX_ERROR = 0.2
"""The proportional error of the KL is clipped to this on both sides."""


@dataclass(frozen=True, kw_only=True)
class KLControllerState:
    """All that a checkpoint has to keep."""

    coef: float

    def to_json(self) -> dict[str, float]:
        return {"coef": self.coef}

    @staticmethod
    def from_json(content: dict[str, float]) -> KLControllerState:
        """Read the exact inverse of `to_json`. Raises CheckpointError for anything else."""
        coef = content.get("coef")
        if not isinstance(coef, (int, float)) or not math.isfinite(coef) or coef < 0:
            raise CheckpointError(f"the KL controller's weight in the checkpoint is {coef!r}; it must be at least 0")
        return KLControllerState(coef=float(coef))


def initial_state(config: AlgorithmConfig) -> KLControllerState:
    """Return the state at the start: the configured `kl_reward_coef`."""
    return KLControllerState(coef=config.kl_reward_coef)


def next_state(
    state: KLControllerState, *, mean_kl: float, num_trajectories: int, config: AlgorithmConfig
) -> KLControllerState:
    """Return the state after a training batch of `num_trajectories` with a mean KL per trained token of `mean_kl`.

    fixed: unchanged. adaptive: `coef * (1 + clip(mean_kl / kl_target - 1, -0.2, 0.2) * num_trajectories / kl_horizon)`.
    Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593, section 2.2, which sums the KL over a response
    where this takes the mean over tokens, so that a target does not depend on length.
    Raises NonFiniteError where `mean_kl` is not finite: the weight would never recover.
    """
    if config.kl_controller == "fixed":
        return state
    if not math.isfinite(mean_kl):
        raise NonFiniteError(f"the mean KL of the batch is {mean_kl}; the KL controller cannot follow it")
    error = min(max(mean_kl / config.kl_target - 1, -MAX_ERROR), MAX_ERROR)
    return KLControllerState(coef=state.coef * max(1 + error * num_trajectories / config.kl_horizon, 0.0))


def mean_token_kl(old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, config: AlgorithmConfig) -> float:
    """Return the mean of the configured estimator over the masked tokens: what `next_state` takes. Raises BatchError."""
    require_bool("mask", mask, old_logprobs.shape)
    require_float("ref_logprobs", ref_logprobs, old_logprobs.shape)
    old, ref = old_logprobs[mask].double(), ref_logprobs[mask].double()
    everywhere = torch.ones_like(old, dtype=torch.bool)
    return float(masked_mean(token_kl(config.kl_estimator, old, ref, everywhere), everywhere))


@dataclass(frozen=True, kw_only=True)
class EntropyControllerState:
    """All that a checkpoint has to keep."""

    coef: float = 0.0
    is_low: bool = False
    """Whether the entropy of the last optimizer step was at or below the target; not known before the first."""

    @property
    def applied(self) -> float:
        """The weight of the next optimizer step: none while there is entropy enough."""
        return self.coef if self.is_low else 0.0

    def to_json(self) -> dict[str, float | bool]:
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, object]) -> EntropyControllerState:
        """Read the exact inverse of `to_json`. Raises CheckpointError for anything else."""
        coef, is_low = content.get("coef"), content.get("is_low")
        if not isinstance(coef, (int, float)) or not math.isfinite(coef) or not isinstance(is_low, bool):
            raise CheckpointError(
                f"the entropy controller in the checkpoint is {dict(content)}; it needs coef and is_low"
            )
        return EntropyControllerState(coef=float(coef), is_low=is_low)


def initial_entropy_state(config: AlgorithmConfig) -> EntropyControllerState:
    """Return the state at the start: the configured `entropy_coef`, which counts from the second optimizer step."""
    return EntropyControllerState(coef=config.entropy_coef)


def next_entropy_state(
    state: EntropyControllerState, *, entropy: float, config: AlgorithmConfig
) -> EntropyControllerState:
    """Return the state after an optimizer step whose mean entropy per trained token was `entropy` (nats).

    The weight grows by `entropy_coef_delta` where the entropy is at or below `entropy_target` and falls by as much where it
    is above, between 0 and `entropy_coef_max`. Skywork Open Reasoner 1, arXiv:2505.22312, section 4. Raises
    NonFiniteError where the entropy is not finite: the weight would move on nothing.
    """
    if not math.isfinite(entropy):
        raise NonFiniteError(f"the mean entropy of the step is {entropy}; the entropy controller cannot follow it")
    is_low = entropy <= config.entropy_target
    moved = state.coef + (config.entropy_coef_delta if is_low else -config.entropy_coef_delta)
    return EntropyControllerState(coef=min(max(moved, 0.0), config.entropy_coef_max), is_low=is_low)
