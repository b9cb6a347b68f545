"""Root-mean-square norms and gates of feed-forward blocks on a CPU, each as one operation with a gradient of its own.

    norm    out = weight * x * r        r = (mean(x^2) + epsilon)^(-1/2) of a position (Zhang, Sennrich, arXiv:1910.07467)
            d x = r * (d out * weight - x * r * mean(d out * weight * x * r))
            d weight = the sum over positions of d out * x * r

    gate    out = silu(g) * u           silu(g) = g / (1 + exp(-g)) (Shazeer, arXiv:2002.05202)
            d g = d out * u * silu'(g)
            d u = d out * silu(g)

transformers writes a norm in six operations, and autograd makes some fifteen of their gradients: each is a pass over memory,
and half as many again are kept. Here a block of positions that a core's cache holds is computed at a time. Beside its input
a norm keeps one number a position, and a gate nothing: `silu(g)`, a quarter of what such a block kept, is computed again.
Outputs are those of transformers to the bit, and so are a gate's gradients; those of norms, which are in float32 alone, are
rounded in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from skyrl_train.model.layers.linear import compiled_parts
from skyrl_train.model.parallel.tiles import is_traced, on_host

_BLOCK = 1 << 16
"""Numbers of a block: 256 KiB."""


def use_fused_layers(model: nn.Module) -> None:
    """Has the norms and the feed-forward blocks of a model that are written as transformers writes them be computed so,
    where they are on a CPU. Idempotent; leaves out those of layers that are compiled."""
    compiled = compiled_parts(model)
    for module in model.modules():
        if id(module) in compiled or "forward" in vars(module):
            continue
        if _is_written_as(module, _norm_as_written):
            _replace_norm(module)
        elif _is_written_as(module, _block_as_written) and isinstance(module.act_fn, _SILU):
            _replace_block(module)


_SILU = (nn.SiLU, SiLUActivation)


def _norm_as_written(self: Any, hidden_states: Any) -> Any:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


def _block_as_written(self: Any, x: Any) -> Any:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj  # noqa: RET504  (its code is compared)


def _is_written_as(module: nn.Module, written: Callable[..., Any]) -> bool:
    """Whether the class of the module computes what `written` does: by its code, as a norm that adds 1 to its weight, or
    casts elsewhere, has another."""
    code, expected = getattr(type(module).forward, "__code__", None), written.__code__
    return code is not None and (code.co_code, code.co_names, code.co_varnames) == (
        expected.co_code,
        expected.co_names,
        expected.co_varnames,
    )


def _replace_norm(module: Any) -> None:
    compute = module.forward

    def forward(hidden_states: Tensor) -> Tensor:
        weight = module.weight
        alike = hidden_states.dtype == weight.dtype == torch.float32 and not hasattr(weight, "_local_tensor")
        if not alike or not on_host(hidden_states.device.type):
            found: Tensor = compute(hidden_states)
            return found
        fused: Tensor = _Norm.apply(hidden_states, weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
        return fused

    module.forward = forward


def _replace_block(module: Any) -> None:
    def forward(x: Tensor) -> Any:
        gate, up = module.gate_proj(x), module.up_proj(x)
        alike = gate.dtype == up.dtype and gate.shape == up.shape and not hasattr(gate, "_local_tensor")
        if not alike or not on_host(gate.device.type):
            return module.down_proj(module.act_fn(gate) * up)
        return module.down_proj(_Gate.apply(gate, up))  # type: ignore[no-untyped-call]

    module.forward = forward


def _blocks(rows: int, width: int) -> list[slice]:
    """Cut so many rows into blocks; for a trace of memory all are one."""
    step = max(1, rows if is_traced() else _BLOCK // width)
    return [slice(start, start + step) for start in range(0, rows, step)]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        flat = inputs.reshape(-1, inputs.shape[-1])
        out, roots = torch.empty_like(flat), flat.new_empty(len(flat), 1)
        for block in _blocks(*flat.shape):
            rows = flat[block]
            root = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon)
            torch.mul(rows, root, out=out[block])
            out[block].mul_(weight)
            roots[block] = root
        ctx.save_for_backward(inputs, weight, roots)
        return out.view(inputs.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        inputs, weight, roots = ctx.saved_tensors
        width = inputs.shape[-1]
        flat, by_out = inputs.reshape(-1, width), grad.reshape(-1, width)
        by_input = torch.empty_like(flat)
        by_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for block in _blocks(*flat.shape):
            normal = flat[block] * roots[block]
            products = by_out[block] * normal
            if by_weight is not None:
                by_weight += products.sum(0)
            mean = torch.mv(products, weight).div_(width).unsqueeze(1)
            torch.mul(by_out[block], weight, out=by_input[block])
            by_input[block].sub_(normal.mul_(mean)).mul_(roots[block])
        return by_input.view(inputs.shape), by_weight, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        width = gate.shape[-1]
        gates, ups = gate.reshape(-1, width), up.reshape(-1, width)
        out = torch.empty_like(gates)
        for block in _blocks(*gates.shape):
            torch.mul(nn.functional.silu(gates[block]), ups[block], out=out[block])
        ctx.save_for_backward(gate, up)
        return out.view(gate.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        shape = grad.shape
        gates, ups, by_out = (each.reshape(-1, shape[-1]) for each in (*ctx.saved_tensors, grad))
        by_gate, by_up = torch.empty_like(gates), torch.empty_like(gates)
        for block in _blocks(*gates.shape):
            torch.mul(by_out[block], nn.functional.silu(gates[block]), out=by_up[block])
            torch.ops.aten.silu_backward.grad_input(by_out[block] * ups[block], gates[block], grad_input=by_gate[block])
        return by_gate.view(shape), by_up.view(shape)
