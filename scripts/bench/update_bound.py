"""The least time that an update can take on one core: what must be computed, by the rates of `core_rates.py`.

What must be computed, of rows of which each distinct prefix is computed once:

    linear      6 * weights of a layer * positions; of the last layer queries, outputs and the feed-forward block of the
                positions that are read alone, keys and values of all
    attention   12 * query size * layers * pairs: two products forward, four backward (none of the forward's is repeated)
    head        6 * vocabulary * hidden * tokens that carry loss, those that rows have in common once
    weights     read once forward and once backward, their gradients written once
    optimizer   gradients read for their norm, then AdamW: weights, gradients, two averages read, all but gradients written

    least time = the larger of (operations / rate) and (bytes of weights / memory)  +  bytes of the optimizer / memory

Products can hide the reading of weights; the optimizer waits for the norm, which waits for all gradients. Norms, rotary
embeddings, activations, the softmax of attention and the loss are left out, as if they were free. So is everything that the
caches do not hold of a layer's activations. A share of 1 is out of reach, then, and one above 1 is an error of the count
or of the rates.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from core_rates import CoreRates
from torch.utils._python_dispatch import TorchDispatchMode
from update_work import ModelSize

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.layouts import Layout, make_layout

NUMBER_BYTES = 4
"""Weights, gradients and averages are float32, whatever the products are."""
NAMED_FROM = 0.03
"""Costs of at least this share of an update are named."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an update must compute and move at least."""

    positions: int
    """Distinct tokens of the rows."""
    read: int
    """Of these, the ones that tokens with loss are predicted from."""
    scored: int
    """Tokens that carry loss, those at one position once."""
    rows_tokens: int
    """Tokens of all rows, as they are before anything is shared."""
    linear: float
    attention: float
    head: float
    """Floating-point operations."""
    weight_bytes: float
    optimizer_bytes: float

    @property
    def operations(self) -> float:
        """Of all products."""
        return self.linear + self.attention + self.head

    def least_s(self, rates: CoreRates, dtype: str) -> float:
        """Return the least seconds in which a core of these rates does it."""
        products = self.operations / rates.flops(dtype)
        return max(products, self.weight_bytes / rates.bytes) + self.optimizer_bytes / rates.bytes


def work_of(batch: TrainingInputBatch, size: ModelSize, parameters: int) -> Work:
    """Count the work of an update on the rows of a model with so many parameters."""
    layout = make_layout(batch, "prefix_shared", merge=True).with_scored(batch)
    assert layout.scored is not None
    seen = layout.position_ids.flatten() + 1  # a token sees itself and all before it
    positions, read, scored = len(seen), len(layout.scored.read), len(layout.scored.states)
    pairs, read_pairs = int(seen.sum()), int(seen[layout.scored.read].sum())
    query, kv = size.heads * size.head, size.kv_heads * size.head
    by_all, by_read = 2 * size.hidden * kv, 2 * size.hidden * query + 3 * size.hidden * size.intermediate
    return Work(
        positions=positions,
        read=read,
        scored=scored,
        rows_tokens=batch.num_tokens,
        linear=6.0 * ((size.layers - 1) * (by_all + by_read) * positions + by_all * positions + by_read * read),
        attention=12.0 * query * ((size.layers - 1) * pairs + read_pairs),
        head=6.0 * size.vocabulary * size.hidden * scored,
        weight_bytes=3.0 * NUMBER_BYTES * parameters,
        optimizer_bytes=8.0 * NUMBER_BYTES * parameters,
    )


@dataclass
class Cost:
    """Of all calls of one operation."""

    calls: int = 0
    cpu_s: float = 0.0
    bytes: int = 0
    """Of the tensors that it was given and gave back; none of a view, which moves nothing."""


class Costs(TorchDispatchMode):
    """Notes, while it is open, of each operation of torch how often it is called, in how many CPU seconds of the calling
    thread, and how many bytes it is handed. What Python, autograd and the dispatcher do in between belongs to none; looking
    makes that longer."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, Cost] = defaultdict(Cost)
        self.cpu_s = 0.0
        """Of everything since it was opened."""

    def __enter__(self) -> Costs:
        self._started = time.thread_time()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.cpu_s += time.thread_time() - self._started
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.thread_time()
        found = func(*args, **(kwargs or {}))
        spent = time.thread_time() - start
        name = func.name().partition(".")[0]
        cost = self.of[name.removeprefix("aten::")]
        cost.calls += 1
        cost.cpu_s += spent
        if func.is_view:
            return found
        cost.bytes += sum(each.numel() * each.element_size() for each in _tensors((args, found)))
        return found

    def named(self, cpu_s: float) -> dict[str, float]:
        """Return the operations that take at least `NAMED_FROM` of the CPU seconds of an update that is not looked at,
        largest first, and what is between them."""
        shares = {name: cost.cpu_s / cpu_s for name, cost in self.of.items()}
        named = {
            name: share for name, share in sorted(shares.items(), key=lambda each: -each[1]) if share >= NAMED_FROM
        }
        return {
            **named,
            "other operations": sum(shares.values()) - sum(named.values()),
            "between": 1 - sum(shares.values()),
        }


def _tensors(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, Sequence) and not isinstance(found, str):
        return [tensor for each in found for tensor in _tensors(each)]
    return []


def held_mib(ours: Any) -> float:
    """Return what must be held at the peak of an update: weights, gradients and two averages, and what autograd saves of
    the micro-batch that saves most, each piece of memory once."""
    engine = ours.engine
    always = {tensor.untyped_storage().data_ptr() for tensor in engine.model.parameters()}
    parameters = sum(each.numel() * each.element_size() for each in engine.parameters.values())
    saved: dict[int, int] = {}
    most = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in always:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    mini_batch = ours.close()

    def loss_of(hidden: torch.Tensor, rows: TrainingInputBatch, layout: Layout) -> Any:
        return ours.learner._loss(hidden, rows, layout, mini_batch.denominators, ())

    for part in engine.passes.plan(mini_batch.batch, training=True):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            engine.passes.accumulate([part], loss_of, step=0)
        most = max(most, sum(saved.values()))
    engine.zero_grad()
    return (4 * parameters + most) / 2**20
