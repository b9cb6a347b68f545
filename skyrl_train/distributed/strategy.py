"""How one model is spread over ranks: what a pass over micro-batches and an optimizer step have to do about it.

    single   one process; nothing to do
    ddp      a replica per rank; gradients are summed over the ranks once per optimizer step
    fsdp2    parameters, gradients and optimizer state sharded; gradients are summed as the backward pass produces them,
             that of each micro-batch or, for one exchange a step, of the last (`strategy.gradient_sync`). With
             `strategy.fsdp_size` groups of ranks hold the same shards, and sum theirs behind it

Gradients are sums and never divided: loss denominators were counted over the whole mini-batch before it was sharded.
Ranks that compute micro-batches together (`group`) are ranks like any other here: each has the gradient of its positions,
as it would have that of its rows, so that sums and shards go over all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyrl_train.batch.layouts import PositionGroup
from skyrl_train.config.models import MeshSizes, StrategyConfig, sums_once_a_step
from skyrl_train.distributed import collectives
from skyrl_train.distributed.experts import ExpertGroup, divide_experts
from skyrl_train.distributed.fsdp import (
    forget_pass,
    gather_ahead,
    gathering,
    hold_whole_gradients,
    shard_model,
    state_ahead_of_pass,
    sum_gradients,
    whole_gradient_bytes,
    whole_gradients,
)
from skyrl_train.distributed.gather import gather_whole
from skyrl_train.distributed.mesh import RankMesh
from skyrl_train.distributed.oom_consensus import OomConsensus
from skyrl_train.distributed.sequence_parallel import SequenceGroup
from skyrl_train.errors import ConfigError, RankOutOfMemory, Violation
from skyrl_train.model.parallel import TensorGroup
from skyrl_train.parts import STRATEGIES
from skyrl_train.registry import part_name

T = TypeVar("T")
GradientSync = Literal["auto", "step", "micro_batch"]


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a strategy is made from, in each process, after its ranks have joined the default process group."""

    num_ranks: int
    """1 in one process without a process group, too."""
    device: torch.device
    """Where passes are computed."""
    dtype: torch.dtype
    """That of forward passes; parameters are float32."""
    cpu_offload: bool = False
    """Whether `strategy.cpu_offload` is true: shards of parameters, gradients and state are in host memory."""
    gradient_sync: GradientSync = "auto"
    """`strategy.gradient_sync`."""
    group: SequenceGroup | None = None
    """The ranks that this one computes each micro-batch with (`strategy.sequence_parallel_size`); None: it does so alone."""
    mesh: RankMesh | None = None
    """How the ranks of a model are laid out; None: they all hold parts of each parameter, or all of it."""
    layers_ahead: int | None = None
    """`strategy.layers_ahead`."""


class ModelStrategy:
    """What one process alone does. Strategies of many ranks, bundled or custom, override what they do otherwise.

    Methods that talk to other ranks are called by all, in step.
    """

    rank: int = 0
    num_ranks: int = 1
    num_shards: int = 1
    """Ranks over which parameters are sharded; groups of so many hold the same."""
    sharded: bool = False
    """Whether parameters, or experts, are DTensors of which each rank holds a part."""
    receives: bool = False
    """Whether rank 0 alone reads weights, of which the others receive their parts."""
    expert_ranks: int = 1
    """Ranks among which experts are divided."""
    tensor_ranks: int = 1
    """Ranks that compute the same rows, each with parts of the matrices."""
    device: torch.device | None = None
    """Where passes are computed; None is where the parameters are."""
    group: PositionGroup | None = None
    """The ranks that this one computes each micro-batch with; None: it does so alone."""
    keeps_whole_gradients: bool = False
    """Whether parameters are sharded, but their gradients are kept whole until the last micro-batch of a step."""

    def prepare(self, model: PreTrainedModel) -> None:
        """Spread the model, before an optimizer is made for it."""

    def agree(self, count: int) -> int:
        """Return the largest `count` of all ranks."""
        return count

    def compute(self, model: PreTrainedModel, function: Callable[[], T]) -> T:  # noqa: ARG002
        """Runs a forward computation that reads parameters of `model` beside calling it."""
        return function()

    def begin_micro_batch(self, model: PreTrainedModel, *, is_last: bool | None) -> None:
        """Called before each forward. `is_last`: whether its backward pass is the last of a mini-batch; None where none
        follows. All ranks have equally many."""

    def hold_gradients(self, model: PreTrainedModel, parameters: Iterable[nn.Parameter]) -> None:  # noqa: ARG002
        """Gives each of `parameters` a gradient of zeros, in the form in which it is kept between micro-batches."""
        _zero_gradients(parameters)

    def whole_gradients(self, model: PreTrainedModel) -> Iterable[Tensor]:  # noqa: ARG002
        """Return what is kept outside of `parameter.grad`: gradients of sharded parameters that are not summed yet."""
        return ()

    def gathered(self) -> Iterable[Tensor]:
        """Return the tensors in which parts of a sharded model are gathered; some of them are empty at any time."""
        return ()

    def in_consensus(self, model: PreTrainedModel, work: Callable[[], T]) -> T:  # noqa: ARG002
        """Runs passes of `model` of which all ranks finish theirs, or none. See `distributed/oom_consensus.py`.

        Raises RankOutOfMemory on all ranks where memory runs out on one; the model is ready for another pass then.
        """
        return OomConsensus(lambda code: code).run(work)

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums over ranks what the backward pass has not summed."""

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the L2 norm of the whole model's gradient: a plain scalar, the same on each rank."""
        return torch.nn.utils.get_total_norm(gradients)

    def first_reason(self, reason: str) -> str:
        """Return the lowest rank's reason that is not empty."""
        return reason

    def full(self, tensor: Tensor) -> Tensor:
        """Return the whole tensor, gathered from its shards."""
        return tensor

    def gather(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]) -> list[Tensor]:
        """Return each tensor whole, in its entry of `dtypes` (None: its own), in which it travels; in as few collectives
        as there are ways to shard. What asks for all weights asks layer by layer (`model/lora/adapter.py:
        merged_weights`)."""
        return [
            tensor.detach() if dtype is None else tensor.detach().to(dtype) for tensor, dtype in zip(tensors, dtypes)
        ]

    def of_rank_0(self, value: T) -> T:
        """Return what rank 0 gave."""
        return value


class SingleProcess(ModelStrategy):
    """`single`: one process."""


class ManyRanks(ModelStrategy):
    """What ranks of the default process group do alike, however they hold the model."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()

    def agree(self, count: int) -> int:
        """Return the largest count of all ranks."""
        return collectives.largest(count)

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the L2 norm over all parts of all gradients, each counted once."""
        return collectives.total_norm(gradients)

    def first_reason(self, reason: str) -> str:
        """Return the lowest rank's reason that is not empty."""
        return collectives.first_reason(reason, self.num_ranks)

    def full(self, tensor: Tensor) -> Tensor:
        """Return the whole tensor, gathered from the ranks that have parts of it."""
        return collectives.full(tensor)

    def of_rank_0(self, value: T) -> T:
        """Return what rank 0 gave."""
        return collectives.of_rank_0(value)


class Replicated(ManyRanks):
    """`ddp`: a replica per rank of the default process group, but for experts that are divided over ranks."""

    def __init__(self, group: SequenceGroup | None = None, *, mesh: RankMesh | None = None) -> None:
        """`mesh` says among which ranks experts are divided; None: each rank has them all."""
        super().__init__()
        self.group = group
        self._experts = experts = _expert_group(mesh)
        self.sharded = experts is not None
        self.expert_ranks = 1 if experts is None else experts.size
        self._consensus = _consensus(group, experts)

    def prepare(self, model: PreTrainedModel) -> None:
        """Gives each rank what rank 0 has: one differing byte at the start would never be noticed."""
        with torch.no_grad():
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, src=0)
        if self._experts is not None:
            list(divide_experts(model, self._experts, in_memory_of_their_own=True))

    def in_consensus(self, model: PreTrainedModel, work: Callable[[], T]) -> T:  # noqa: ARG002
        """Ranks meet at the end, and before each collective of ranks that share forwards or experts: else replicas do not
        talk."""
        return self._consensus.run(work)

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums all gradients, in buckets of one type: over all ranks, or those with the same experts."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        collectives.add_up([each for each in gradients if not collectives.is_divided(each)], None)
        if self._experts is not None:
            own: list[Any] = [each for each in gradients if collectives.is_divided(each)]
            collectives.add_up([each.to_local() for each in own], self._experts.same_group)

    def gather(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]) -> list[Tensor]:
        """Return whole tensors, those of a layer's experts gathered together."""
        return gather_whole(tensors, dtypes)


class Sharded(ManyRanks):
    """`fsdp2`: `fully_shard` on each decoder layer and on the model, over the ranks of the default process group."""

    sharded = receives = True

    def __init__(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        cpu_offload: bool,
        gradient_sync: GradientSync = "auto",
        group: SequenceGroup | None = None,
        mesh: RankMesh | None = None,
        layers_ahead: int | None = None,
    ) -> None:
        """`dtype` is that of forward passes; `gradient_sync` is `strategy.gradient_sync`, `layers_ahead` its namesake;
        without a `mesh` all ranks are one group."""
        super().__init__()
        self.group = group
        self.mesh = mesh or _one_axis(device)
        self.num_shards = self.mesh.sizes.shard
        self.device = device
        self._device = device
        self._dtype = dtype
        self._cpu_offload = cpu_offload
        self._gradient_sync = gradient_sync
        self._experts = experts = _expert_group(self.mesh)
        self.expert_ranks = 1 if experts is None else experts.size
        self.tensor_ranks = size = self.mesh.sizes.tensor
        rank = self.mesh.index("tensor")
        self._tensors = TensorGroup(self.mesh.tensor, size=size, rank=rank) if size > 1 else None
        self._consensus = _consensus(group, experts, self._tensors)
        # Layers with experts on other ranks wait for the device, and the host would come late to the next one.
        self._layers_ahead = int(experts is not None) if layers_ahead is None else layers_ahead
        self._gathers: Callable[[], Iterable[Tensor]] = tuple
        self.keeps_whole_gradients = False

    def prepare(self, model: PreTrainedModel) -> None:
        """Shards the model and sends each rank its part of rank 0's parameters. Ranks agree on when to sum gradients."""
        once = sums_once_a_step(
            self._gradient_sync,
            gradient_bytes=whole_gradient_bytes(model, expert_ranks=self.expert_ranks) // self.tensor_ranks,
            device_bytes=_device_bytes(self._device),
        )
        self.keeps_whole_gradients = not self.agree(int(not once))
        shard_model(
            model,
            mesh=self.mesh,
            device=self._device,
            dtype=self._dtype,
            cpu_offload=self._cpu_offload,
            consensus=self._consensus,
            experts=self._experts,
            tensors=self._tensors,
        )
        if self._layers_ahead:
            gather_ahead(model, self._layers_ahead)
        self._gathers = gathering(model)

    def compute(self, model: PreTrainedModel, function: Callable[[], T]) -> T:
        """Runs `function` as a forward of `model`, so that the parameters outside its layers are whole meanwhile."""
        sharded: Any = model
        result: T = sharded.compute(function)
        return result

    def begin_micro_batch(self, model: PreTrainedModel, *, is_last: bool | None) -> None:
        """Ranks agree that they are well. Gradients are summed by the backward pass: of each micro-batch, or of the last
        one alone."""
        now = None if is_last is None else is_last or not self.keeps_whole_gradients
        if now is not None:
            sum_gradients(model, now=now)
        trained = sum(parameter.requires_grad for parameter in model.parameters())
        self._consensus.begin_micro_batch((now, trained, state_ahead_of_pass(model)))

    def hold_gradients(self, model: PreTrainedModel, parameters: Iterable[nn.Parameter]) -> None:
        """Give gradients of zeros, whole or of this rank's shards."""
        if self.keeps_whole_gradients:
            hold_whole_gradients(model)
        else:
            _zero_gradients(parameters)

    def whole_gradients(self, model: PreTrainedModel) -> Iterable[Tensor]:
        """Return the gradients that FSDP2 keeps."""
        return whole_gradients(model)

    def gathered(self) -> Iterable[Tensor]:
        """Return the tensors into which FSDP2 gathers parameters."""
        return self._gathers()

    def in_consensus(self, model: PreTrainedModel, work: Callable[[], T]) -> T:
        """Ranks meet before each micro-batch of a pass, too."""
        try:
            return self._consensus.run(work)
        except RankOutOfMemory:
            forget_pass(model)
            raise

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Does nothing: the backward pass has summed them."""

    def gather(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]) -> list[Tensor]:
        """Return whole tensors, on the device: shards that lie in host memory are moved there first."""
        return gather_whole(tensors, dtypes, self._device)


def single(ranks: RankContext) -> ModelStrategy:  # noqa: ARG001
    """One process: nothing is spread."""
    return SingleProcess()


def ddp(ranks: RankContext) -> ModelStrategy:
    """A replica per rank; gradients are summed once per optimizer step."""
    return Replicated(ranks.group, mesh=ranks.mesh)


def fsdp2(ranks: RankContext) -> ModelStrategy:
    """Parameters, gradients and optimizer state sharded over the ranks."""
    return Sharded(
        device=ranks.device,
        dtype=ranks.dtype,
        cpu_offload=ranks.cpu_offload,
        gradient_sync=ranks.gradient_sync,
        group=ranks.group,
        mesh=ranks.mesh,
        layers_ahead=ranks.layers_ahead,
    )


def make_strategy(config: StrategyConfig, ranks: RankContext) -> ModelStrategy:
    """Return what `strategy.name` chooses. Raises ConfigError where a custom part makes something else."""
    made = STRATEGIES.resolve(config.name)(ranks)
    if not isinstance(made, ModelStrategy):
        rule, remedy = "must make a ModelStrategy", "Subclass skyrl_train.distributed.strategy.ModelStrategy"
        value = f"{type(made).__name__} from {part_name(config.name)}"
        raise ConfigError([Violation(field=STRATEGIES.setting, rule=rule, value=value, remedy=remedy)])
    return made


def _one_axis(device: torch.device) -> RankMesh:
    return RankMesh(sizes=MeshSizes(shard=dist.get_world_size()), device_type=device.type)


def _zero_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def _device_bytes(device: torch.device) -> int:
    """Memory of the device; of this machine, shared out to the ranks, where that is a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // dist.get_world_size()


def _expert_group(mesh: RankMesh | None) -> ExpertGroup | None:
    return ExpertGroup(mesh) if mesh is not None and mesh.sizes.expert > 1 else None


def _consensus(*groups: SequenceGroup | ExpertGroup | TensorGroup | None) -> OomConsensus:
    consensus = OomConsensus(collectives.largest, follows=not any(groups))
    for group in groups:
        if group is not None:
            group.before_collective = consensus.before_collective
    return consensus
