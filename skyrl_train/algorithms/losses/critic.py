"""The critic's loss per token, and how much of the returns it explains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import PolicyLossOutput
from skyrl_train.algorithms.losses.ratios import masked, token_means
from skyrl_train.batch import require_bool, require_float, require_rows, rounding_tolerance
from skyrl_train.config.algorithm import AlgorithmConfig, NonNegative

DECLARED_METRICS = """
critic/value_loss | | Half the squared distance of values from returns. | with a critic | verl `critic/vf_loss`; SkyRL
    `critic/critic_loss`
critic/abs_error | reward | Mean distance. | with a critic
critic/value | reward | Mean value. | with a critic | verl `critic/vpred_mean`; SkyRL `critic/values_mean`
critic/clip_fraction | share | Values that clipping changed. | with a critic | verl `critic/vf_clipfrac`; SkyRL
    `critic/values_clipfrac`
"""


@dataclass(frozen=True, kw_only=True)
class ValueLossInputs:
    """Rows of one micro-batch, `[rows, len]` each. Values outside `loss_mask` may be anything, NaN included."""

    values: Tensor
    """Float: of the critic that is trained. Carries the gradient."""
    old_values: Tensor
    """Float: of the critic at the start of the update, from which advantages were estimated."""
    returns: Tensor
    """Float: what the values should be."""
    loss_mask: Tensor
    """Bool."""


def value_loss(inputs: ValueLossInputs, _config: AlgorithmConfig, *, value_clip: NonNegative = 0.2) -> PolicyLossOutput:
    """`max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2` with `c = value_clip`; no clipping where it is 0.

    The clipping is that of the PPO authors' code (github.com/openai/baselines, ppo2), as TRL and verl have it; the
    paper, arXiv:1707.06347, has the square alone. Per token: reduced with the loss weights of the closed mini-batch, as
    all terms are. Raises BatchError for malformed inputs.

    Args:
        value_clip: Clip new values to within this of the old; 0 is off.
    """
    shape = require_rows("values", inputs.values)
    for name in ("values", "old_values", "returns"):
        require_float(name, getattr(inputs, name), shape)
    require_bool("loss_mask", inputs.loss_mask, shape)
    mask = inputs.loss_mask
    values, old_values, returns = (
        masked(column, mask) for column in (inputs.values, inputs.old_values, inputs.returns)
    )
    losses = (values - returns).square()
    was_clipped = torch.zeros_like(mask)
    if value_clip > 0:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        clipped_losses = (near - returns).square()
        # Within the range the clipped value is the value but for rounding, which is no clipping.
        was_clipped = (clipped_losses > losses) & ((values - old_values).abs() > value_clip)
        losses = torch.maximum(losses, clipped_losses)
    losses = masked(0.5 * losses, mask)
    abs_error = (values - returns).detach().abs()
    metrics = token_means(
        mask, "critic", value_loss=losses, clip_fraction=was_clipped, value=values, abs_error=abs_error
    )
    return PolicyLossOutput(token_losses=losses, metrics=metrics)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """`1 - var(R - V) / var(R)` over the masked tokens: 1 is perfect, 0 as good as a constant, below 0 worse.

    Any one shape; `mask` bool. None where it is not defined: fewer than two tokens, or returns that do not vary.
    Raises BatchError for malformed inputs.
    """
    require_float("values", values, values.shape)
    require_float("returns", returns, values.shape)
    require_bool("mask", mask, values.shape)
    kept, predicted = returns[mask].double(), values[mask].double()
    if kept.numel() < 2 or bool(kept.max() - kept.min() <= rounding_tolerance(kept.abs().max(), returns.dtype)):
        return None
    return float(1 - (kept - predicted).var() / kept.var())
