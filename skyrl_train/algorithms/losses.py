"""Policy losses: one number per trained token.

The loss of an optimizer step is `sum(loss_weights * token_losses)` with weights fixed over the closed mini-batch, so a
loss may not depend on which rows share its micro-batch: whatever it averages, it averages within a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from skyrl_train.algorithms.checks import check_policy_loss_inputs
from skyrl_train.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from skyrl_train.algorithms.kl import MAX_LOG_RATIO
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.telemetry.metrics import Mean, Metric

__all__ = ["POLICY_LOSSES", "PolicyLoss", "PolicyLossInputs", "PolicyLossOutput"]

PolicyLoss = Callable[[PolicyLossInputs, AlgorithmConfig], PolicyLossOutput]


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask`, exactly 0 elsewhere, whatever stood there."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def log_ratio_of(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> Tensor:
    """`logprobs - base_logprobs` where `mask`, clamped to +-20, 0 elsewhere. Carries the gradient of `logprobs`."""
    return masked(logprobs - base_logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def token_means(mask: Tensor, **columns: Tensor) -> dict[str, Metric]:
    """`policy/NAME`: mean over the masked tokens, with one transfer from the device for all of them."""
    with torch.no_grad():
        totals = [masked(column.detach().double(), mask).sum() for column in columns.values()]
        *sums, weight = torch.stack([*totals, mask.sum().double()]).tolist()
    return {f"policy/{name}": Mean(total, weight) for name, total in zip(columns, sums)}


def regular(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """`-min(ratio * A, clip(ratio, 1 - eps_clip_low, 1 + eps_clip_high) * A)`, `ratio = exp(logprob - old_logprob)`.

    PPO, arXiv:1707.06347, equation 7; different bounds below and above are DAPO's clip-higher, arXiv:2503.14476.
    Raises BatchError for malformed inputs.
    """
    check_policy_loss_inputs(inputs)
    mask = inputs.loss_mask
    log_ratio = log_ratio_of(inputs.logprobs, inputs.old_logprobs, mask)
    advantages = masked(inputs.advantages, mask)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
    unclipped_loss, clipped_loss = -ratio * advantages, -clipped * advantages
    return PolicyLossOutput(
        token_losses=masked(torch.maximum(unclipped_loss, clipped_loss), mask),
        metrics=token_means(
            mask,
            ratio=ratio,
            clip_fraction=(clipped_loss > unclipped_loss),
            approx_kl=torch.expm1(log_ratio) - log_ratio,
        ),
    )


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "regular": regular,
}
