"""`trainer.algorithm` (`algorithm=grpo|...`): advantages, losses and KL. Part of the schema; see `config/schema.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from skyrl_train.config.rules import Range


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """`trainer.algorithm`: chosen with `algorithm=NAME`."""

    advantage_estimator: str = "grpo"
    """A name in `algorithms/advantages.py`, or your own as `package.module:attr`."""
    normalize_by_std: bool = True
    """GRPO: divide by the group's standard deviation (false is Dr. GRPO's choice)."""
    step_rewards: Literal["outcome", "turn_return"] = "outcome"
    """Step-wise: the trajectory's reward for every turn, or each turn's discounted return-to-go."""
    normalize_advantages: bool = False
    """Whiten advantages over each mini-batch with masked mean and variance."""
    gamma: Annotated[float, Range(0.0, 1.0)] = 1.0
    """Discount of later rewards."""
    gae_lambda: Annotated[float, Range(0.0, 1.0)] = 1.0
    """GAE's lambda."""
    policy_loss: str = "regular"
    """A name in `algorithms/losses.py`, or your own as `package.module:attr`."""
    loss_reduction: Literal["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"] = "token_mean"
    """How token losses become one number. Denominators are counted over the whole optimizer step."""
    max_sequence_length_for_norm: Annotated[int, Range(1)] = 512
    """Constant divisor of `seq_mean_token_sum_norm` (tokens)."""
    eps_clip_low: Annotated[float, Range(0.0)] = 0.2
    """The ratio is clipped below 1 minus this."""
    eps_clip_high: Annotated[float, Range(0.0)] = 0.2
    """The ratio is clipped above 1 plus this (clip-higher: DAPO)."""
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator of KL(policy || reference) from sampled tokens."""
    kl_loss_coef: Annotated[float, Range(0.0)] = 0.0
    """Weight of the KL term in the loss; 0 needs no reference model."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
