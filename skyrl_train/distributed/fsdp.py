"""FSDP2: a model's parameters sharded over ranks, all of them or groups that hold the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from skyrl_train.distributed.experts import ExpertGroup, divide_experts
from skyrl_train.distributed.mesh import RankMesh
from skyrl_train.distributed.oom_consensus import CountedAllGather, CountedReduceScatter, OomConsensus
from skyrl_train.errors import ModelError
from skyrl_train.model import decoder_layers
from skyrl_train.model.parallel import TensorGroup, cut_matrices, expert_modules, fsdp_groups

T = TypeVar("T")


def shard_model(
    model: PreTrainedModel,
    *,
    mesh: RankMesh,
    device: torch.device,
    dtype: torch.dtype,
    cpu_offload: bool,
    consensus: OomConsensus,
    experts: ExpertGroup | None = None,
    tensors: TensorGroup | None = None,
) -> None:
    """Shards `model` in place over `mesh`, each decoder layer on its own and the rest with the root, and gives it a method
    `compute(function)` that runs `function` as if it were the model's forward.

    Gradients are summed over ranks, not averaged. Rank 0's parameters and buffers are what counts: each other rank
    receives its shards of them, so that only rank 0 has to have read the weights. Collectives of a pass go through
    `consensus`.
    """
    full: dict[str, Any] = model.state_dict() if dist.get_rank() == 0 else {}
    _require_same_names([name for name, _ in model.named_parameters()])
    options: dict[str, Any] = {
        "mesh": mesh.parameters,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy(),
    }
    if tensors is not None:
        cut_matrices(model, tensors, name=model.name_or_path or "")
    if experts is not None:
        # By their second dimension: the first is divided already, and whole experts need not divide over what is left.
        among = {"mesh": experts.same_experts, "shard_placement_fn": lambda _: Shard(1)}
        for module in divide_experts(model, experts):
            fully_shard(module, **options | among)
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo knows no scaled sum, which a divide factor becomes unless plain sums are asked for.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            as_fsdp: Any = module
            as_fsdp.set_custom_all_gather(CountedAllGather(consensus))
            replicas = mesh.group("replicate") if mesh.sizes.replicate > 1 else None
            as_fsdp.set_custom_reduce_scatter(CountedReduceScatter(consensus, replicas))
    _receive_from_rank_0(model, full, cpu_offload=cpu_offload)
    as_any: Any = model
    as_any.compute = MethodType(_compute, model)
    register_fsdp_forward_method(model, "compute")


def gather_ahead(model: PreTrainedModel, count: int) -> None:
    """Has each decoder layer of a sharded model begin to gather the parameters of the next `count` layers, in a backward
    pass of those before it, ahead of what it computes itself. By itself FSDP2 gathers a layer when the host comes to it,
    and one ahead in backward passes: too late where the host waits for the device within each layer."""
    # a layer, then what of it is sharded by itself, in the order in which a forward comes to them
    parts = [[part for part in layer.modules() if isinstance(part, FSDPModule)] for layer in decoder_layers(model)]
    for number, (layer, *_) in enumerate(parts):
        following, before = parts[number + 1 : number + 1 + count], parts[max(0, number - count) : number]
        layer.set_modules_to_forward_prefetch([part for each in following for part in each])
        layer.set_modules_to_backward_prefetch([part for each in reversed(before) for part in each])


def reshard(model: nn.Module) -> None:
    """Drops parameters that a forward gathered and keeps, so that the next one gathers the shards as they are by then.

    Call it before changing shards of a model that is only scored: no backward pass does it there.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def sum_gradients(model: nn.Module, *, now: bool) -> None:
    """Whether the backward pass to come sums gradients over ranks and leaves each its shards, or adds them up whole."""
    root: Any = model
    root.set_requires_gradient_sync(now)


def whole_gradient_bytes(model: nn.Module, *, expert_ranks: int = 1) -> int:
    """Return how many bytes gradients take on a rank, in the type of sums, of all trained parameters of a model that is not
    sharded yet, whose experts so many ranks will divide."""
    divided = {parameter for module in expert_modules(model).values() for parameter in module.parameters()}
    return sum(
        parameter.numel() * max(4, parameter.element_size()) // (expert_ranks if parameter in divided else 1)
        for parameter in model.parameters()
        if parameter.requires_grad
    )


def hold_whole_gradients(model: nn.Module) -> None:
    """Zeros in place of the gradients that earlier micro-batches of a step left whole."""
    for parameter in _sharded_parameters(model):
        if parameter.sharded_param.requires_grad:
            zeros = torch.zeros(parameter._orig_size, dtype=parameter.sharded_param.dtype, device=parameter.device)
            whole = parameter._unsharded_dtensor_spec  # of what is divided over other ranks, too
            parameter.unsharded_accumulated_grad = (
                zeros if whole is None else DTensor.from_local(zeros, whole.mesh, whole.placements, run_check=False)
            )


def whole_gradients(model: nn.Module) -> Iterator[Tensor]:
    """Gradients that were not summed over ranks yet."""
    for parameter in _sharded_parameters(model):
        kept = [
            parameter.unsharded_accumulated_grad,
            getattr(getattr(parameter, "_unsharded_param", None), "grad", None),
        ]
        yield from (gradient for gradient in kept if gradient is not None)


def gathering(model: nn.Module) -> Callable[[], Iterable[Tensor]]:
    """Return a function that gives the tensors into which FSDP2 gathers parameters, whose storages it empties after use."""
    parameters = list(_sharded_parameters(model))
    return lambda: (tensor for each in parameters for tensor in each.all_gather_outputs)


def state_ahead_of_pass(model: nn.Module) -> tuple[tuple[bool, frozenset[torch.dtype]], ...]:
    """Return, of each group of parameters, what the collectives of a pass over it depend on: whether it is whole, so that a
    forward does not gather it, and the types of gradients that earlier passes left whole, in which they are summed."""
    return tuple(
        (
            group.is_unsharded,
            frozenset(
                parameter.unsharded_accumulated_grad.dtype
                for parameter in group.fsdp_params
                if parameter.unsharded_accumulated_grad is not None
            ),
        )
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in fsdp_groups(module)
    )


def forget_pass(model: nn.Module) -> None:
    """Brings a sharded model back to where it was before a forward or backward that did not come to its end; gradients
    of that pass which were not summed yet are dropped. Those in `parameter.grad` stay."""
    root: Any = model
    root.reset_iter_state()
    for parameter in _sharded_parameters(model):
        # torch keeps these, and the next backward pass would add to them
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def _sharded_parameters(model: nn.Module) -> Iterator[Any]:
    """FSDP2's own objects, one per parameter."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_groups(module):
                yield from group.fsdp_params


def _require_same_names(names: list[str]) -> None:
    """Ranks whose parameters differ would send each other the wrong tensors, or end without a word."""
    first = [names]
    dist.broadcast_object_list(first, src=0)
    if first[0] != names:
        odd = sorted(set(first[0]) ^ set(names))
        raise ModelError(f"rank {dist.get_rank()} has other parameters than rank 0, e.g. {odd[:1]}")


def _compute(self: PreTrainedModel, function: Callable[[], T]) -> T:  # noqa: ARG001
    return function()


def _receive_from_rank_0(model: PreTrainedModel, full: dict[str, Any], *, cpu_offload: bool) -> None:
    set_model_state_dict(
        model,
        full,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload),
    )
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
