"""Named errors for malformed tensors. Plain `if`s, so that `python -O` keeps them."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import AdvantageInputs, AdvantageOutput, PolicyLossInputs
from skyrl_train.errors import BatchError


def require_float(name: str, value: Tensor, shape: torch.Size | tuple[int, ...]) -> None:
    """Raises BatchError unless `value` is a floating-point tensor of this shape."""
    if not isinstance(value, Tensor):
        raise BatchError(f"{name} must be a tensor; got {type(value).__name__}")
    if not value.is_floating_point():
        raise BatchError(f"{name} must be floating point; got {value.dtype}. Convert it with .float() or .double()")
    require_shape(name, value, shape)


def require_bool(name: str, value: Tensor, shape: torch.Size | tuple[int, ...]) -> None:
    """Raises BatchError unless `value` is a bool tensor of this shape."""
    if not isinstance(value, Tensor):
        raise BatchError(f"{name} must be a tensor; got {type(value).__name__}")
    if value.dtype is not torch.bool:
        raise BatchError(f"{name} must be bool; got {value.dtype}. Convert it with .bool()")
    require_shape(name, value, shape)


def require_integer(name: str, value: Tensor, shape: torch.Size | tuple[int, ...]) -> None:
    """Raises BatchError unless `value` is an integer tensor of this shape."""
    if not isinstance(value, Tensor):
        raise BatchError(f"{name} must be a tensor; got {type(value).__name__}")
    if value.is_floating_point() or value.dtype is torch.bool:
        raise BatchError(f"{name} must be an integer tensor; got {value.dtype}")
    require_shape(name, value, shape)


def require_shape(name: str, value: Tensor, shape: torch.Size | tuple[int, ...]) -> None:
    if tuple(value.shape) != tuple(shape):
        raise BatchError(f"{name} has shape {list(value.shape)}; expected {list(shape)} like the others")


def require_finite(name: str, value: Tensor, where: Tensor, inputs: AdvantageInputs) -> None:
    """Raises BatchError naming the first row with a NaN or infinity at a position of `where` `[rows, len]`."""
    bad = ~torch.isfinite(value) & where
    if bool(bad.any()):
        row, position = (int(index) for index in bad.nonzero()[0])
        raise BatchError(
            f"{name} of {describe_row(inputs, row)} is {float(value[row, position])} at position {position}; it must be"
            " finite. A trajectory without a valid reward must be marked as failed before training"
        )


def describe_row(inputs: AdvantageInputs, row: int) -> str:
    return (
        f"row {row} (prompt {int(inputs.prompt_index[row])}, trajectory {int(inputs.trajectory_index[row])},"
        f" step {int(inputs.step_index[row])})"
    )


def check_advantage_inputs(inputs: AdvantageInputs, *, needs_values: bool = False) -> None:
    """Shapes, dtypes and finite numbers. Raises BatchError naming the column and the row."""
    if not isinstance(inputs.rewards, Tensor) or inputs.rewards.dim() != 2:
        raise BatchError("rewards must be a tensor of shape [rows, len]")
    shape = inputs.rewards.shape
    rows = (shape[0],)
    require_float("rewards", inputs.rewards, shape)
    require_bool("loss_mask", inputs.loss_mask, shape)
    for name in ("prompt_index", "trajectory_index", "step_index"):
        require_integer(name, getattr(inputs, name), rows)
    for name in ("is_last_step", "is_padding"):
        require_bool(name, getattr(inputs, name), rows)
    real = ~inputs.is_padding.unsqueeze(1)
    require_finite("rewards", inputs.rewards, real.expand(shape), inputs)
    if inputs.values is not None:
        require_float("values", inputs.values, shape)
        require_finite("values", inputs.values, inputs.loss_mask & real, inputs)
    elif needs_values:
        raise BatchError("this advantage estimator needs values; configure a critic with critic.model.path=policy")


def check_advantage_output(output: AdvantageOutput, inputs: AdvantageInputs, name: str) -> None:
    """For a user's own estimator as for ours: shape, dtype, finite on trained tokens. Raises BatchError."""
    trained = inputs.loss_mask & ~inputs.is_padding.unsqueeze(1)
    for column in ("advantages", "returns"):
        value = getattr(output, column)
        label = f"{column} from advantage estimator {name!r}"
        require_float(label, value, inputs.rewards.shape)
        require_finite(label, value, trained, inputs)


def check_policy_loss_inputs(inputs: PolicyLossInputs, *needed: str) -> None:
    """Shapes and dtypes; `needed` names optional columns that must be there. Raises BatchError."""
    if not isinstance(inputs.logprobs, Tensor) or inputs.logprobs.dim() != 2:
        raise BatchError("logprobs must be a tensor of shape [rows, len]")
    shape = inputs.logprobs.shape
    require_bool("loss_mask", inputs.loss_mask, shape)
    for name in ("logprobs", "old_logprobs", "advantages", "rollout_logprobs", "ref_logprobs"):
        value = getattr(inputs, name)
        if value is not None:
            require_float(name, value, shape)
        elif name in needed:
            raise BatchError(f"this policy loss needs {name}, which the batch does not have. {REMEDIES[name]}")


REMEDIES = {
    "rollout_logprobs": "Use a generator that reports the log-probability of each sampled token",
    "ref_logprobs": "Configure the reference (or teacher) model",
}
