"""Named errors for malformed tensors. Plain `if`s, so that `python -O` keeps them."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import AdvantageInputs, AdvantageOutput, PolicyLossInputs
from skyrl_train.errors import BatchError

Shape = torch.Size | tuple[int, ...]

REMEDIES = {
    "values": "Configure a critic, e.g. critic.model.path=policy",
    "old_logprobs": "Score the batch with the policy first",
    "ref_logprobs": "Configure the reference (or teacher) model",
    "sum_pi_squared": "Score the batch with the policy first",
    "greedy_rewards": "Generate with advantage_estimator=remax, which samples each prompt greedily once more",
    "reward_components": "Name them in trainer.algorithm.reward_components",
    "rollout_logprobs": "Use a generator that reports the log-probability of each sampled token",
}


def require_float(name: str, value: Tensor, shape: Shape) -> None:
    """Raises BatchError unless `value` is a floating-point tensor of this shape."""
    _require_tensor(name, value)
    if not value.is_floating_point():
        raise BatchError(f"{name} must be floating point; got {value.dtype}. Convert it with .float() or .double()")
    _require_shape(name, value, shape)


def require_bool(name: str, value: Tensor, shape: Shape) -> None:
    """Raises BatchError unless `value` is a bool tensor of this shape."""
    _require_tensor(name, value)
    if value.dtype is not torch.bool:
        raise BatchError(f"{name} must be bool; got {value.dtype}. Convert it with .bool()")
    _require_shape(name, value, shape)


def require_integer(name: str, value: Tensor, shape: Shape) -> None:
    """Raises BatchError unless `value` is an integer tensor of this shape."""
    _require_tensor(name, value)
    if value.is_floating_point() or value.dtype is torch.bool:
        raise BatchError(f"{name} must be an integer tensor; got {value.dtype}")
    _require_shape(name, value, shape)


def require_rows(name: str, value: Tensor) -> torch.Size:
    """The shape of a `[rows, len]` column. Raises BatchError for anything else."""
    _require_tensor(name, value)
    if value.dim() != 2:
        raise BatchError(f"{name} must have shape [rows, len]; got {list(value.shape)}")
    return value.shape


def needed(name: str, column: Tensor | None) -> Tensor:
    """The column. Raises BatchError saying what provides it where it is None."""
    if column is None:
        raise BatchError(f"this algorithm needs {name}, which the batch does not have. {REMEDIES[name]}")
    return column


def _require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise BatchError(f"{name} must be a tensor; got {type(value).__name__}")


def _require_shape(name: str, value: Tensor, shape: Shape) -> None:
    if tuple(value.shape) != tuple(shape):
        raise BatchError(f"{name} has shape {list(value.shape)}; expected {list(shape)} like the others")


def describe_row(inputs: AdvantageInputs, row: int) -> str:
    """`row 3 (prompt 1, trajectory 9, step 0)`."""
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
    """Shapes, dtypes and finite numbers. Raises BatchError naming the column and the row."""
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


def check_advantage_output(output: AdvantageOutput, inputs: AdvantageInputs, name: str) -> None:
    """For a user's own estimator as for ours: shape, dtype, finite on trained tokens. Raises BatchError."""
    shape = inputs.rewards.shape
    trained = inputs.loss_mask & ~inputs.is_padding.unsqueeze(1)
    for column in ("advantages", "returns"):
        value = getattr(output, column)
        label = f"{column} from advantage estimator {name!r}"
        require_float(label, value, shape)
        require_finite(label, value, trained, inputs)
    if output.whiten_over_batch is not None:
        require_bool(f"whiten_over_batch from advantage estimator {name!r}", output.whiten_over_batch, shape)


def check_policy_loss_inputs(inputs: PolicyLossInputs) -> None:
    """Shapes and dtypes. Raises BatchError naming the column."""
    shape = require_rows("logprobs", inputs.logprobs)
    require_bool("loss_mask", inputs.loss_mask, shape)
    for name in ("logprobs", "old_logprobs", "advantages"):
        require_float(name, getattr(inputs, name), shape)
    if inputs.rollout_logprobs is not None:
        require_float("rollout_logprobs", inputs.rollout_logprobs, shape)
