"""Policy losses: one number per trained token.

The loss of an optimizer step is `sum(loss_weights * token_losses)` with weights fixed over the closed mini-batch, so a
loss may not depend on which rows share its micro-batch: whatever it averages, it averages within a turn
(`ratios.turns_of`), so that rows per turn or per trajectory make no difference either.
"""

from __future__ import annotations

from collections.abc import Callable

from skyrl_train.algorithms.checks import needed, require_float
from skyrl_train.algorithms.clipped_losses import clip_cov, dual_clip, kl_cov, regular
from skyrl_train.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from skyrl_train.algorithms.off_policy import off_policy_weights
from skyrl_train.algorithms.sequence_losses import SEQUENCE_STATISTICS, gmpo, gspo, vespo
from skyrl_train.algorithms.weighted_losses import (
    cispo,
    cross_entropy,
    dppo,
    importance_sampling,
    reinforce,
    rollout_is,
    sapo,
)
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.registry import resolve

__all__ = ["POLICY_LOSSES", "PolicyLoss", "PolicyLossInputs", "PolicyLossOutput", "policy_loss"]

PolicyLoss = Callable[[PolicyLossInputs, AlgorithmConfig], PolicyLossOutput]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "regular": regular,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "gmpo": gmpo,
    "vespo": vespo,
    "cispo": cispo,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "rollout_is": rollout_is,
    "dppo": dppo,
    "importance_sampling": importance_sampling,
    "reinforce": reinforce,
    "cross_entropy": cross_entropy,
}


TOKENWISE_LOSSES = frozenset(POLICY_LOSSES) - {*SEQUENCE_STATISTICS, "clip_cov", "kl_cov"}
"""Losses in which a token's loss reads nothing of its row's other tokens."""


def is_tokenwise(config: AlgorithmConfig) -> bool:
    """Whether the configured loss of a token is a function of that token alone."""
    return config.policy_loss in TOKENWISE_LOSSES and not config.off_policy.enabled


def policy_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """The configured loss, times the weights of `trainer.algorithm.off_policy` where they are on.

    Raises ConfigError for an unknown name; BatchError for malformed inputs, or where a user's own loss returns another
    shape than `[rows, len]`.
    """
    loss = resolve(config.policy_loss, POLICY_LOSSES, field="trainer.algorithm.policy_loss")
    output = loss(inputs, config)
    require_float(f"token_losses from policy loss {config.policy_loss!r}", output.token_losses, inputs.logprobs.shape)
    if not config.off_policy.enabled:
        return output
    correction = off_policy_weights(
        inputs.old_logprobs, needed("rollout_logprobs", inputs.rollout_logprobs), inputs.loss_mask, config.off_policy
    )
    return PolicyLossOutput(
        token_losses=output.token_losses * correction.weights, metrics={**output.metrics, **correction.metrics}
    )
