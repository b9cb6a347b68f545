"""The weight of the KL in the reward: fixed, or moved so that the KL stays near a target. Pure: state in, state out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.algorithms.kl import token_kl
from skyrl_train.batch.reduce import masked_mean, require_bool, require_float
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import CheckpointError, NonFiniteError

MAX_ERROR = 0.2
"""The proportional error is clipped to this on both sides."""


@dataclass(frozen=True, kw_only=True)
class KLControllerState:
    """All that a checkpoint has to keep."""

    coef: float

    def to_json(self) -> dict[str, float]:
        return {"coef": self.coef}

    @staticmethod
    def from_json(content: dict[str, float]) -> KLControllerState:
        """Exact inverse of `to_json`. Raises CheckpointError for anything else."""
        coef = content.get("coef")
        if not isinstance(coef, (int, float)) or not math.isfinite(coef) or coef < 0:
            raise CheckpointError(f"the KL controller's weight in the checkpoint is {coef!r}; it must be at least 0")
        return KLControllerState(coef=float(coef))


def initial_state(config: AlgorithmConfig) -> KLControllerState:
    """The configured `kl_reward_coef`."""
    return KLControllerState(coef=config.kl_reward_coef)


def next_state(
    state: KLControllerState, *, mean_kl: float, num_trajectories: int, config: AlgorithmConfig
) -> KLControllerState:
    """The state after a training batch of `num_trajectories` with a mean KL per trained token of `mean_kl`.

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
    """Mean of the configured estimator over the masked tokens: what `next_state` takes. Raises BatchError."""
    require_bool("mask", mask, old_logprobs.shape)
    require_float("ref_logprobs", ref_logprobs, old_logprobs.shape)
    old, ref = old_logprobs[mask].double(), ref_logprobs[mask].double()
    everywhere = torch.ones_like(old, dtype=torch.bool)
    return float(masked_mean(token_kl(config.kl_estimator, old, ref, everywhere), everywhere))
