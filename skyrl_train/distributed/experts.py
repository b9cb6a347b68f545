"""Experts of a mixture divided over ranks: tokens travel to the rank that has their expert, and what it makes of them back.

With 8 experts and groups of 2 ranks (`strategy.expert_parallel_size=2`):

    rank 0: its own rows, experts 0-3    tokens -> owners of the experts that they are routed to -> weighted sum at home
    rank 1: its own rows, experts 4-7
    rank 2: its own rows, experts 0-3    the ranks below one another have the same experts: FSDP2 shards these among
    rank 3: its own rows, experts 4-7    them, DDP keeps replicas

Each rank routes its own tokens, so that routers, auxiliary losses and recorded routes are what they are on one rank. A
token is sent once for each of its experts. The exchange is exact and so is its gradient, which goes the same way back: an
expert's owner has the gradient of all tokens of its group, and the sum over the ranks with the same experts is the whole.

What a forward of one layer sends from each rank, with T tokens of H numbers, k experts a token and groups of E ranks, is
`2 T k H (E - 1) / E` numbers, and twice as many again in the backward pass together with recomputation; without this, FSDP2
gathers all experts of the layer on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from skyrl_train.distributed.mesh import RankMesh
from skyrl_train.model.parallel import expert_modules


class ExpertGroup:
    """The ranks among which this one's copy of the experts is divided, and those that have the same experts."""

    def __init__(self, mesh: RankMesh) -> None:
        """A collective of all ranks."""
        self.mesh = mesh.experts["expert"]
        *same, _ = mesh.experts.mesh_dim_names or ()
        self.same_experts = mesh.experts[tuple(same)]
        """Over which FSDP2 shards what a rank has of them."""
        self.process_group, self.same_group = mesh.group("expert"), mesh.group("same_experts")
        self.size, self.rank = mesh.sizes.expert, mesh.index("expert")
        self.before_collective: Callable[[], None] = lambda: None
        """Where ranks learn that another left the pass (`distributed/oom_consensus.py`)."""


def divide_experts(
    model: nn.Module, group: ExpertGroup, *, in_memory_of_their_own: bool = False
) -> Iterator[nn.Module]:
    """Leave this rank its experts of each layer, as parameters sharded over the group, and have tokens travel. Yields each
    module when it is done. Call it before the model is spread in other ways, and after `check_experts`.

    `in_memory_of_their_own`: not views of what the model had, which is free then.
    """
    for module in expert_modules(model).values():
        own = module.num_experts // group.size
        for name, parameter in list(module.named_parameters(recurse=False)):
            local = parameter.detach().narrow(0, group.rank * own, own)
            local = local.clone() if in_memory_of_their_own else local
            part = DTensor.from_local(local, group.mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        module.num_experts = own
        _let_tokens_travel(module, group)
        yield module


def _let_tokens_travel(module: Any, group: ExpertGroup) -> None:
    compute = module.forward

    def forward(hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        with _local_parameters(module):
            return _compute_at_owners(compute, hidden, experts, weights, group, own=module.num_experts)

    module.forward = forward


def _compute_at_owners(
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    group: ExpertGroup,
    *,
    own: int,
) -> Tensor:
    """`[tokens, hidden]`: for each token the sum over its experts of weight times what the expert computes.

    Args:
        compute: Of this rank's experts, numbered from 0, as `compute(tokens, expert of each [n, 1], weight of each [n, 1])`.
        hidden: `[tokens, hidden]` of this rank.
        experts: int64 `[tokens, k]`, numbered over all ranks of the group.
        weights: `[tokens, k]`.
        own: Experts of each rank.
    """
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = flat.new_zeros(group.size * own).scatter_add_(0, flat, torch.ones_like(flat)).view(group.size, own)
    wanted = torch.empty_like(counts)
    group.before_collective()
    dist.all_to_all_single(wanted, counts, group=group.process_group)
    # The one wait of the host for the device in this layer: an exchange of unequal parts is told their sizes.
    sent, received = torch.stack([counts.sum(1), wanted.sum(1)]).tolist()
    visitors = _travel(hidden[order // experts.shape[1]], group, sent, received)
    numbers = torch.arange(own, device=flat.device).repeat(group.size)
    found = _of_visitors(compute, visitors, numbers.repeat_interleave(wanted.flatten(), output_size=sum(received)))
    home = _travel(found, group, received, sent)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return (home[back].view(*experts.shape, -1) * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _of_visitors(compute: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: Tensor, experts: Tensor) -> Tensor:
    """What each token's expert computes. Where none came, the gradient still has the way through the parameters that the
    ranks with the same experts wait for."""
    count = len(tokens)
    if not count:
        tokens, experts = tokens.sum(0, keepdim=True), experts.new_zeros(1)
    experts = experts.unsqueeze(1)
    return compute(tokens, experts, torch.ones_like(experts, dtype=tokens.dtype))[:count]


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    """The module has this rank's part of its parameters as plain tensors, which gradients flow through."""
    held = dict(module._parameters)
    local = {name: parameter.to_local() for name, parameter in held.items() if parameter is not None}  # type: ignore[attr-defined]
    for name, tensor in local.items():
        del module._parameters[name]
        module.__dict__[name] = tensor
    try:
        yield
    finally:
        for name in local:
            del module.__dict__[name]
        module._parameters.update(held)


def _travel(rows: Tensor, group: ExpertGroup, sent: list[int], received: list[int]) -> Tensor:
    """Rows sorted by the rank that they go to, `sent[i]` of them to rank i, for those that came, by rank."""
    travelled: Tensor = _Travel.apply(group, rows, sent, received)  # type: ignore[no-untyped-call]
    return travelled


class _Travel(torch.autograd.Function):
    """Rows to other ranks, whose gradient comes back the same way."""

    @staticmethod
    def forward(ctx: Any, group: ExpertGroup, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchange(rows, group, sent, received)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        return None, _exchange(grad, ctx.group, ctx.received, ctx.sent), None, None


def _exchange(rows: Tensor, group: ExpertGroup, sent: list[int], received: list[int]) -> Tensor:
    rows = rows.contiguous()
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    group.before_collective()
    dist.all_to_all_single(arrived, rows, received, sent, group=group.process_group)
    return arrived
