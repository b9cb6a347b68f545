"""Linear layers on a CPU, multiplied in the type and by the library that are fastest on its processor.

float32: torch gives products to MKL, which on processors of other makers than Intel computes at half of their rate: 100
GFLOP/s on a core whose AVX-512 units do 220 under oneDNN. On Intel's own it is MKL that is ahead, and torch's products
are left as they are. Both sum in float32, in another order. torch has one operation that reaches oneDNN for float32
without a setting of the whole process; it has no gradient, which is given here.

bfloat16: a core without instructions for it takes several times as long for such a product as for one of float32. There
the numbers are rounded to bfloat16 as they are elsewhere, and multiplied in float32, which holds each of them and each
product of two exactly. Sums are of float32 in either case; the gradient of a weight, which others round to bfloat16, is not.
"""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_train.model.parallel.tiles import is_traced, on_host
from skyrl_train.system import has_bfloat16_instructions

_LEAST_PRODUCTS = 1 << 20
"""Multiplications from which a product is worth a kernel of its own, which oneDNN compiles for each new shape in 0.15 ms."""

_KERNELS_KEPT = "32"
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's cache of kernels and that of torch's operations above it. Each keeps 1,024 of some 0.1 MB, one for each shape,
and packed micro-batches have other shapes in each step; those of one micro-batch are enough."""

_LONG_SUM = 512
"""About as many numbers are added up by one product. oneDNN does so one after the other, of which the rounding grows with
their number; MKL adds blocks, too."""


@cache
def has_fast_products() -> bool:
    """Whether this process has the operation, and a processor that it is faster on."""
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return has_operation() and not (has_mkl and _is_intel())


def has_operation() -> bool:
    """Whether this process has the operation, and units that it is written for."""
    return (
        bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _is_intel() -> bool:
    """Whether Intel made the processor, as Linux says."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


@cache
def multiplies_halves() -> bool:
    """Whether the processor has instructions for products of bfloat16 numbers."""
    return has_bfloat16_instructions()


def operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` rounded to `dtype`, in the type in which its device multiplies such numbers fastest."""
    rounded = tensor.to(dtype)
    return rounded.float() if dtype == torch.bfloat16 and _widens(tensor) else rounded


def _widens(tensor: Tensor) -> bool:
    """Whether products of bfloat16 are computed in float32 on the device of `tensor`, or that it is traced for; not for
    a rank's share of a matrix."""
    return on_host(tensor.device.type) and not hasattr(tensor, "_local_tensor") and not multiplies_halves()


def use_fast_products(model: nn.Module) -> None:
    """Has the linear layers of a model on a CPU take them, where this machine has them. Idempotent; leaves out layers that
    are compiled, in which torch chooses the kernels, and everything that only resembles a linear layer."""
    if has_fast_products():
        _bound_kernels()
    elif multiplies_halves():
        return
    compiled = compiled_parts(model)
    for module in model.modules():
        if type(module) is nn.Linear and id(module) not in compiled:
            module.__class__ = FastLinear


def compiled_parts(model: nn.Module) -> set[int]:
    """Return the identities of the modules that are compiled, or are part of one that is."""
    return {id(part) for each in model.modules() if each._compiled_call_impl is not None for part in each.modules()}


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
    if _is_half(inputs, weight):
        half: Tensor = _HalfLinear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
        return half
    if not _fits(inputs, weight):
        return nn.functional.linear(inputs, weight, bias)
    found: Tensor = _Linear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
    return found


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right.T` without a gradient, of `left` `[m, k]` and `right` `[n, k]`."""
    return _multiply(left, right, None) if _fits(left, right) else left @ right.T


def _is_half(inputs: Tensor, weight: Tensor) -> bool:
    """Whether autocast would have a CPU multiply these in bfloat16, for which it has no instructions."""
    return (
        torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and inputs.dtype in _CAST
        and weight.dtype in _CAST
        and _widens(inputs)
        and _widens(weight)
    )


_CAST = (torch.float32, torch.bfloat16)
"""Types that autocast rounds to bfloat16."""


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
    # Of equal width, in whole vectors: 576 columns are one part, since 512 and 64 would take two products and two copies.
    parts = max(1, round(left.shape[-1] / _LONG_SUM))
    width = 64 * math.ceil(left.shape[-1] / parts / 64)
    for one, other in zip(torch.split(left, width, -1), torch.split(right, width, -1)):
        # columns of a matrix that lies row after row would be multiplied by a kernel that is slow
        part: Tensor = operation(
            one, other if other.stride(0) == 1 else other.contiguous(), bias if found is None else None, "none", [], ""
        )
        found = part if found is None else found.add_(part)
    assert found is not None
    return found


class _HalfLinear(torch.autograd.Function):
    """A linear layer in bfloat16, of which each product is computed in float32."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        by_inputs, by_weight, _ = ctx.needs_input_grad
        half = inputs.to(torch.bfloat16)
        ctx.save_for_backward(half if by_weight else None, weight if by_inputs else None)
        ctx.types = inputs.dtype, weight.dtype, None if bias is None else bias.dtype
        with torch.autocast("cpu", enabled=False):
            out = product(half.flatten(0, -2).float(), operand(weight, torch.bfloat16))
            out = out if bias is None else out.add_(bias.to(torch.bfloat16))
            return out.to(torch.bfloat16).view(*inputs.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        type_of_inputs, type_of_weight, type_of_bias = ctx.types
        flat = grad.flatten(0, -2).float()
        by_inputs = by_weight = None
        if weight is not None:
            by_inputs = product(flat, operand(weight, torch.bfloat16).T).to(type_of_inputs)
            by_inputs = by_inputs.view(*grad.shape[:-1], -1)
        if inputs is not None:
            by_weight = product(flat.T, inputs.flatten(0, -2).float().T).to(type_of_weight)
        return by_inputs, by_weight, flat.sum(0).to(type_of_bias) if ctx.needs_input_grad[2] else None


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
