"""Named errors for malformed tensors. Plain `if`s, so that `python -O` keeps them."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import AdvantageInputs, AdvantageOutput, PolicyLossInputs, PolicyLossOutput
from skyrl_train.batch import require_bool, require_float, require_integer, require_rows
from skyrl_train.errors import BatchError

REMEDIES = {
    "values": "Configure a critic, e.g. critic.model.path=policy",
    "old_logprobs": "Score the batch with the policy first",
    "ref_logprobs": "Configure the reference (or teacher) model",
    "sum_pi_squared": "Score the batch with the policy first",
    "greedy_rewards": "Generate with advantage_estimator=remax, which samples each prompt greedily once more",
    "reward_components": "Name them in trainer.algorithm.reward_components",
    "rollout_logprobs": "Use a generator that reports the log-probability of each sampled token",
}


def needed(name: str, column: Tensor | None) -> Tensor:
    """Return the column. Raises BatchError saying what provides it where it is None."""
    if column is None:
        raise BatchError(f"this algorithm needs {name}, which the batch does not have. {REMEDIES[name]}")
    return column


def describe_row(inputs: AdvantageInputs, row: int) -> str:
    """Name a row as `row 3 (prompt 1, trajectory 9, step 0)`."""
    return (
        f"row {row} (prompt {int(inputs.prompt_index[row])}, trajectory {int(inputs.trajectory_index[row])},"
        f" step {int(inputs.step_index[row])})"
    )


def require_finite(name: str, value: Tensor, where: Tensor, inputs: AdvantageInputs) -> None:
    """Raises BatchError naming the first row with a NaN or infinity at a position of `where` `[rows, len]`."""
    bad = ~torch.isfinite(value) & where
    if bool(bad.any()):
        row, position = (int(index) for index in bad.nonzero()[0])
        raise BatchError(
            f"{name} of {describe_row(inputs, row)} is {float(value[row, position])} at position {position}; it must be"
            " finite. A trajectory without a valid reward must be marked as failed before training"
        )


def check_advantage_inputs(inputs: AdvantageInputs) -> None:
    """Check shapes, dtypes and finite numbers. Raises BatchError naming the column and the row."""
    shape = require_rows("rewards", inputs.rewards)
    rows = (shape[0],)
    require_float("rewards", inputs.rewards, shape)
    require_bool("loss_mask", inputs.loss_mask, shape)
    for name in ("prompt_index", "trajectory_index", "step_index"):
        require_integer(name, getattr(inputs, name), rows)
    for name in ("is_last_step", "is_padding"):
        require_bool(name, getattr(inputs, name), rows)
    if inputs.response_mask is not None:
        require_bool("response_mask", inputs.response_mask, shape)
    real = ~inputs.is_padding.unsqueeze(1)
    require_finite("rewards", inputs.rewards, real.expand(shape), inputs)
    for name in ("values", "old_logprobs", "ref_logprobs", "sum_pi_squared"):
        column = getattr(inputs, name)
        if column is not None:
            require_float(name, column, shape)
            require_finite(name, column, inputs.loss_mask & real, inputs)
    if inputs.greedy_rewards is not None:
        require_float("greedy_rewards", inputs.greedy_rewards, rows)
    if inputs.reward_components is not None:
        require_float("reward_components", inputs.reward_components, (*rows, *inputs.reward_components.shape[1:]))


def check_advantage_output(output: object, inputs: AdvantageInputs, name: str) -> None:
    """Check the output of any estimator, bundled or custom: shape, dtype, finite on trained tokens. Raises BatchError."""
    if not isinstance(output, AdvantageOutput):
        raise BatchError(
            f"advantage estimator {name!r} must return AdvantageOutput(advantages=..., returns=...) of "
            f"skyrl_train.algorithms.inputs; it returned {type(output).__name__}"
        )
    shape = inputs.rewards.shape
    trained = inputs.loss_mask & ~inputs.is_padding.unsqueeze(1)
    for column in ("advantages", "returns"):
        value = getattr(output, column)
        label = f"{column} from advantage estimator {name!r}"
        require_float(label, value, shape)
        require_finite(label, value, trained, inputs)
    if output.whiten_over_batch is not None:
        require_bool(f"whiten_over_batch from advantage estimator {name!r}", output.whiten_over_batch, shape)


def check_loss_output(output: object, shape: torch.Size, what: str) -> None:
    """Check what any loss returns, bundled or custom. Raises BatchError."""
    if not isinstance(output, PolicyLossOutput):
        raise BatchError(
            f"{what} must return PolicyLossOutput(token_losses, metrics) of skyrl_train.algorithms.inputs, with one "
            f"loss for each token {list(shape)}; it returned {type(output).__name__}"
        )
    require_float(f"token_losses from {what}", output.token_losses, shape)


def check_policy_loss_inputs(inputs: PolicyLossInputs) -> None:
    """Check shapes and dtypes. Raises BatchError naming the column."""
    shape = require_rows("logprobs", inputs.logprobs)
    require_bool("loss_mask", inputs.loss_mask, shape)
    for name in ("logprobs", "old_logprobs", "advantages"):
        require_float(name, getattr(inputs, name), shape)
    if inputs.rollout_logprobs is not None:
        require_float("rollout_logprobs", inputs.rollout_logprobs, shape)
