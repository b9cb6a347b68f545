"""Several adapters in one forward: the base's product once for all positions, and each adapter's own part on its positions.

    positions   a a a b b - - -        runs   ("a", 0, 3), ("b", 3, 5)        the rest computes as the base

Without it a forward is of one adapter, the active one, and a batch of eight tenants is eight forwards that each read the
base from memory. Gradients reach the adapters that are named and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_train.model.layers.linear import operand, product

Runs = tuple[tuple[str, int, int], ...]
"""Name of an adapter, and the positions `[start, stop)` that it computes; ascending."""

_PARTS = ("lora_A", "lora_B", "lora_dropout")
"""What an adapter has on a layer of PEFT: modules by the adapter's name."""
_RUNS = "skyrl_adapter_runs"
"""Attribute of a model with adapters that have names."""


class AdapterRuns:
    """What a model with several adapters is told of them."""

    def __init__(self) -> None:
        self.value: Mapping[int, Runs] | None = None
        """Runs of the running forward, by how many positions a layer is given; None where it is of the active adapter."""
        self.slots: dict[str, str] = {}
        """By the name in a run: what PEFT calls the adapter, where that is another name."""
        self.layers: Sequence[Any] = ()
        """Of the model, those that adapters are on or were."""
        self._beside: dict[str, list[tuple[nn.ModuleDict, nn.Module]]] = {}
        """Adapters that are not on the model: their modules, and where each was."""
        self._stacks: dict[int, _Stack] = {}

    def attach(self, names: Iterable[str]) -> None:
        """As `attach_adapters`."""
        wanted = set(names)
        on = {name for layer in self.layers for name in layer.lora_A}
        for name in on - wanted:
            homes = [getattr(layer, part) for layer in self.layers for part in _PARTS]
            self._beside[name] = [(home, home.pop(name)) for home in homes if name in home]
        for name in wanted & self._beside.keys():
            for home, module in self._beside.pop(name):
                home[name] = module

    def stack(self, layer: Any, runs: Runs) -> _Stack:
        """Return the weights of the runs as one tensor each, kept until a layer is asked for others: from token to token
        the adapters are the same."""
        a, b = ([parts[name].weight for name, _, _ in runs] for parts in (layer.lora_A, layer.lora_B))
        of = [(weight, weight._version) for weight in (*a, *b)]
        kept = self._stacks.get(id(layer))
        if kept is None or not _same(kept.of, of):
            scales = torch.tensor([layer.scaling[name] for name, _, _ in runs], dtype=a[0].dtype, device=a[0].device)
            kept = _Stack(
                of=of, a=torch.stack([each.T for each in a]), b=torch.stack([each.T for each in b]), scales=scales
            )
            self._stacks[id(layer)] = kept
        return kept


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """Weights of several adapters of one rank on one layer."""

    of: Sequence[tuple[Tensor, int]]
    """The parameters that they were copied from, and their versions."""
    a: Tensor
    """`[runs, in, rank]`."""
    b: Tensor
    """`[runs, rank, out]`."""
    scales: Tensor
    """`[runs]`."""


def adapter_slots(model: nn.Module) -> dict[str, str]:
    """Return the names that PEFT has for those in runs, which may be added to; of a model with adapters that have names."""
    current: AdapterRuns = getattr(model, _RUNS)
    return current.slots


def runs_of(names: Sequence[str], lengths: Sequence[int]) -> Runs:
    """Return the runs of rows that lie one behind the other, with this many positions each; an empty name is the base."""
    found, start = [], 0
    for name, rows in groupby(zip(names, lengths), key=lambda row: row[0]):
        stop = start + sum(length for _, length in rows)
        if name:
            found.append((name, start, stop))
        start = stop
    return tuple(found)


@contextmanager
def adapters_at(model: nn.Module, runs: Mapping[int, Runs]) -> Iterator[None]:
    """Within it, forwards and backwards compute each position with its adapter; what is active does not matter.

    `runs` has an entry for each number of positions that an adapted layer may be given: all of the forward, and those that
    the last layer is narrowed to. Does nothing for a model that has no adapters with names.
    """
    current: AdapterRuns | None = getattr(model, _RUNS, None)
    if current is None:
        yield
        return
    current.value = runs
    try:
        yield
    finally:
        current.value = None


def let_several_compute(model: nn.Module, layers: Sequence[Any]) -> None:
    """Has `adapters_at` take effect on these layers of PEFT. Idempotent."""
    current: AdapterRuns | None = getattr(model, _RUNS, None)
    if current is None:
        current = AdapterRuns()
        setattr(model, _RUNS, current)
    current.layers = layers
    for layer in layers:
        if "forward" not in vars(layer):
            layer.forward = _forward_of(layer, current, layer.forward)


def attach_adapters(model: nn.Module, names: Iterable[str]) -> None:
    """Has the model hold the adapters of these names alone; others are kept beside it, so that what walks over its modules
    does not take longer the more there are. Does nothing for a model without adapters that have names."""
    current: AdapterRuns | None = getattr(model, _RUNS, None)
    if current is not None:
        current.attach(names)


def layers_with_adapters(model: nn.Module) -> Sequence[Any]:
    """Return the layers that adapters with names are on, or may be; empty where there are none."""
    current: AdapterRuns | None = getattr(model, _RUNS, None)
    return () if current is None else current.layers


def _forward_of(layer: Any, current: AdapterRuns, of_active: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(inputs: Tensor, *others: Any, **named: Any) -> Tensor:
        if current.value is None:
            return of_active(inputs, *others, **named)
        found: Tensor = layer.base_layer(inputs, *others, **named)
        named_runs = current.value[inputs.numel() // inputs.shape[-1]]
        slots = ((current.slots.get(name, name), start, stop) for name, start, stop in named_runs)
        runs = tuple(run for run in slots if run[0] in layer.lora_A)
        if not runs:
            return found
        if len(runs) > 1 and not torch.is_grad_enabled() and _are_alike(layer, runs):
            _add_alike(found.view(-1, found.shape[-1]), inputs.flatten(0, -2), runs, current.stack(layer, runs))
            return found
        weights = [part[name].weight for name, _, _ in runs for part in (layer.lora_A, layer.lora_B)]
        spans = [(start, stop, layer.scaling[name]) for name, start, stop in runs]
        added: Tensor = _AddParts.apply(found.contiguous(), inputs, spans, *weights)  # type: ignore[no-untyped-call]
        return added

    return forward


def _same(before: Sequence[tuple[Tensor, int]], now: Sequence[tuple[Tensor, int]]) -> bool:
    return len(before) == len(now) and all(
        one is other and version == later for (one, version), (other, later) in zip(before, now)
    )


def _are_alike(layer: Any, runs: Runs) -> bool:
    """Whether the runs adjoin, are of one length, and their adapters of one rank."""
    (first, start, stop), *_ = runs
    rank = layer.lora_A[first].weight.shape[0]
    return all(
        each[1:] == (start + number * (stop - start), stop + number * (stop - start))
        and layer.lora_A[each[0]].weight.shape[0] == rank
        for number, each in enumerate(runs)
    )


def _add_alike(whole: Tensor, rows: Tensor, runs: Runs, weights: _Stack) -> None:
    """Add what the adapters of runs that are alike compute, in two products of all of them: a token is one position, and of
    so few numbers it is the number of operations that takes time."""
    start, stop = runs[0][1], runs[-1][2]
    inputs = rows[start:stop].view(len(runs), -1, rows.shape[-1]).to(weights.a.dtype)
    parts = torch.bmm(torch.bmm(inputs, weights.a), weights.b).mul_(weights.scales[:, None, None])
    whole[start:stop].add_(parts.view(stop - start, -1))


class _AddParts(torch.autograd.Function):
    """The base's product `[..., out]`, to which each run's adapter adds `scale * B A x` in place.

    Gradients cost what the positions of the runs do: of slices that are taken and joined, torch would fill a whole
    gradient for each. Each product is in the adapter's type, or in the one that autocast asks for.
    """

    @staticmethod
    def forward(
        ctx: Any, base: Tensor, inputs: Tensor, spans: Sequence[tuple[int, int, float]], *weights: Tensor
    ) -> Tensor:
        kind = base.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weights[0].dtype
        rows, whole, narrow = inputs.flatten(0, -2), base.view(-1, base.shape[-1]), []
        with torch.autocast(kind, enabled=False):
            for (start, stop, scale), a, b in zip(spans, weights[::2], weights[1::2]):
                narrow.append(_times(rows[start:stop], a, dtype))
                whole[start:stop].add_(_times(narrow[-1], b, dtype).mul_(scale))
        ctx.mark_dirty(base)
        ctx.save_for_backward(inputs, *weights, *narrow)
        ctx.spans, ctx.dtype = spans, dtype
        return base

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *saved = ctx.saved_tensors
        count, dtype = 2 * len(ctx.spans), ctx.dtype
        rows, flat = inputs.flatten(0, -2), grad.flatten(0, -2)
        by_rows = torch.zeros_like(rows) if ctx.needs_input_grad[1] else None
        by_weights: list[Tensor | None] = []
        with torch.autocast(grad.device.type, enabled=False):
            for (start, stop, scale), a, b, hidden in zip(ctx.spans, saved[:count:2], saved[1:count:2], saved[count:]):
                own = flat[start:stop] * scale
                by_hidden = _times(own, b.T, dtype)
                if by_rows is not None:
                    by_rows[start:stop] = _times(by_hidden, a.T, dtype)
                of_a, of_b = ctx.needs_input_grad[3 + len(by_weights) : 5 + len(by_weights)]
                by_weights.append(_times(by_hidden.T, rows[start:stop].T, dtype).to(a.dtype) if of_a else None)
                by_weights.append(_times(own.T, hidden.T, dtype).to(b.dtype) if of_b else None)
        return grad, None if by_rows is None else by_rows.view(inputs.shape), None, *by_weights


def _times(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`left @ right.T`, of numbers of the type, in it."""
    return product(operand(left, dtype), operand(right, dtype)).to(dtype)
