"""Masked sums, means and whitening, and named errors for malformed tensors (plain `if`s, so that `python -O` keeps them).

A mean and a variance always run over the same tokens: those of the mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl_train.errors import BatchError

Shape = torch.Size | tuple[int, ...]


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask`; whatever stands elsewhere, NaN included, counts as nothing."""
    # Not a product with the mask: NaN times 0 is NaN.
    kept = torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` (same shape, bool); 0 where nothing is masked in. Along `dim`, or over everything.

    Raises BatchError for another shape or dtype.
    """
    require_float("values", values, values.shape)
    require_bool("mask", mask, values.shape)
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def rounding_tolerance(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """How far apart two numbers of this magnitude, kept in `dtype`, may be and still be equal up to rounding."""
    return 4 * torch.finfo(dtype).eps * magnitude


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    copies: Tensor | None = None,
    boundaries: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """`(x - mean) / std` over the masked tokens, 0 elsewhere. Mean and (n - 1) variance are both masked.

    `values` and `mask` have the same shape; `boundaries` are half-open ranges of the first dimension, each whitened on
    its own (without them: everything together), and what no range covers becomes 0. `copies`, integers of the same shape:
    how often mean and variance count each value, once unless given. Computed in float64, returned in the dtype of
    `values`. Equal values, or a single one, give exactly 0: the spread that rounding leaves is no signal.

    Raises BatchError for shapes and dtypes that differ, boundaries out of range, and values that are not finite.
    """
    require_float("values", values, values.shape)
    require_bool("mask", mask, values.shape)
    whitened = torch.zeros_like(values)
    for start, stop in [(0, len(values))] if boundaries is None else boundaries:
        if not 0 <= start <= stop <= len(values):
            raise BatchError(f"boundary ({start}, {stop}) lies outside 0..{len(values)}")
        # float64, since in float32 the mean of many values of one size loses the digits in which they differ.
        part, part_mask = values[start:stop].double(), mask[start:stop]
        kept = part[part_mask]
        if copies is not None:
            # Copied indeed, and not weighed: the tests below and n - 1 are of the copies, too.
            kept = kept.repeat_interleave(copies[start:stop][part_mask])
        if kept.numel() == 0:
            continue
        if not bool(torch.isfinite(kept).all()):
            raise BatchError(f"values between {start} and {stop} are not all finite and cannot be whitened")
        # Divided by a std that is rounding alone, equal rewards would become advantages of the size of 1.
        spread = kept.max() - kept.min()
        if kept.numel() < 2 or bool(spread <= rounding_tolerance(kept.abs().max(), values.dtype)):
            continue
        scaled = (part - kept.mean()) / kept.std(unbiased=True)
        whitened[start:stop] = torch.where(part_mask, scaled, 0.0).to(values.dtype)
    return whitened


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


def _require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise BatchError(f"{name} must be a tensor; got {type(value).__name__}")


def _require_shape(name: str, value: Tensor, shape: Shape) -> None:
    if tuple(value.shape) != tuple(shape):
        raise BatchError(f"{name} has shape {list(value.shape)}; expected {list(shape)} like the others")
