"""Linear layers in float32 on a CPU, multiplied by oneDNN in place of the library that torch takes.

torch gives products of float32 matrices to MKL, which on processors of other makers than Intel computes at half of their
rate: 100 GFLOP/s on a core whose AVX-512 units do 220 under oneDNN. Both sum in float32, in another order. torch has one
operation that reaches oneDNN for float32 without a setting of the whole process; it has no gradient, which is given here.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_train.model.parallel.tiles import is_traced

_LEAST_PRODUCTS = 1 << 20
"""Multiplications from which a product is worth a kernel of its own, which oneDNN compiles for each new shape in 0.15 ms."""

_KERNELS_KEPT = "32"
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's cache of kernels and that of torch's operations above it. Each keeps 1,024 of some 0.1 MB, one for each shape,
and packed micro-batches have other shapes in each step; those of one micro-batch are enough."""

_LONGEST_SUM = 512
"""Numbers that one product adds up. oneDNN does so one after the other, of which the rounding grows with their number; MKL
adds blocks, too."""


def has_fast_products() -> bool:
    """Whether this process has the operation, and units that it is faster on."""
    return (
        bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def use_fast_products(model: nn.Module) -> None:
    """Has the linear layers of a model on a CPU take them, where this machine has them. Idempotent; leaves out layers that
    are compiled, in which torch chooses the kernels, and everything that only resembles a linear layer."""
    if not has_fast_products():
        return
    _bound_kernels()
    compiled = {id(part) for each in model.modules() if each._compiled_call_impl is not None for part in each.modules()}
    for module in model.modules():
        if type(module) is nn.Linear and id(module) not in compiled:
            module.__class__ = FastLinear


@cache
def _bound_kernels() -> None:
    """Have this process keep few kernels, unless the environment says how many. It is asked once, at the first product."""
    unstated = [name for name in _CACHES if name not in os.environ]
    os.environ.update(dict.fromkeys(unstated, _KERNELS_KEPT))
    try:
        _multiply(torch.zeros(16, 16), torch.zeros(16, 16), None)
    finally:
        for name in unstated:
            del os.environ[name]  # processes that are started from here have other needs


class FastLinear(nn.Linear):
    """A linear layer of the same parameters, whose products are those of `linear`."""

    def forward(self, inputs: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        return linear(inputs, self.weight, self.bias)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`inputs @ weight.T + bias`, `[..., out]`, of `inputs` `[..., in]` and `weight` `[out, in]`."""
    if not _fits(inputs, weight):
        return nn.functional.linear(inputs, weight, bias)
    found: Tensor = _Linear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
    return found


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right.T` without a gradient, of `left` `[m, k]` and `right` `[n, k]`."""
    return _multiply(left, right, None) if _fits(left, right) else left @ right.T


def _fits(left: Tensor, right: Tensor) -> bool:
    """Whether the operation computes this, and faster: no ranks' shares, no type that autocast would choose, no trace."""
    return (
        left.dtype == right.dtype == torch.float32
        and left.device.type == right.device.type == "cpu"
        and type(left) in _PLAIN
        and type(right) in _PLAIN
        and left.numel() * right.shape[0] >= _LEAST_PRODUCTS
        and not torch.is_autocast_enabled("cpu")
        and not is_traced()
        and has_fast_products()
    )


_PLAIN = (Tensor, nn.Parameter)


def _multiply(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """`left @ right.T + bias`, as a sum of products over a part of the columns each."""
    operation: Any = torch.ops.mkldnn._linear_pointwise
    found: Tensor | None = None
    for one, other in zip(torch.split(left, _LONGEST_SUM, -1), torch.split(right, _LONGEST_SUM, -1)):
        # columns of a matrix that lies row after row would be multiplied by a kernel that is slow
        part: Tensor = operation(
            one, other if other.stride(0) == 1 else other.contiguous(), bias if found is None else None, "none", [], ""
        )
        found = part if found is None else found.add_(part)
    assert found is not None
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        by_inputs, by_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(inputs if by_weight else None, weight if by_inputs else None)
        return _multiply(inputs, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        by_inputs = None if weight is None else product(flat, weight.T).view(*grad.shape[:-1], -1)
        by_weight = None
        if inputs is not None:
            rows = inputs.flatten(0, -2)
            # the operation copies its left matrix into the order of its rows: the smaller one
            wide = flat.shape[1] > rows.shape[1]
            by_weight = product(rows.T, flat.T).T if wide else product(flat.T, rows.T)
        return by_inputs, by_weight, flat.sum(0) if ctx.needs_input_grad[2] else None
