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
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from skyrl_train.batch.layout import PositionGroup
from skyrl_train.config.parts import STRATEGIES
from skyrl_train.config.placement import MeshSizes, StrategyConfig, sums_once_a_step
from skyrl_train.distributed.mesh import RankMesh
from skyrl_train.distributed.sequence_parallel import SequenceGroup
from skyrl_train.errors import ConfigError, RankOutOfMemory, Violation
from skyrl_train.memory.oom_consensus import OomConsensus
from skyrl_train.registry import part_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
GradientSync = Literal["auto", "step", "micro_batch"]

_BUCKET_BYTES = 64 * 2**20
"""Gradients that are summed in one collective."""


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """What a strategy is made from, in each process, after its ranks have joined the default process group."""

    num_ranks: int
    """1 in one process without a process group, too."""
    device: torch.device
    """Where passes are computed."""
    dtype: torch.dtype
    """That of forward passes; parameters are float32."""
    cpu_offload: bool = False
    """`strategy.cpu_offload`."""
    gradient_sync: GradientSync = "auto"
    """`strategy.gradient_sync`."""
    group: SequenceGroup | None = None
    """The ranks that this one computes each micro-batch with (`strategy.sequence_parallel_size`); None: it does so alone."""
    mesh: RankMesh | None = None
    """How the ranks of a sharded model are laid out; None: parameters are sharded over all of them."""


class ModelStrategy:
    """What one process alone does. Strategies of many ranks, bundled or custom, override what they do otherwise.

    Methods that talk to other ranks are called by all, in step.
    """

    rank: int = 0
    num_ranks: int = 1
    num_shards: int = 1
    """Ranks over which parameters are sharded; groups of so many hold the same."""
    sharded: bool = False
    """Whether parameters are DTensors of which each rank holds a part."""
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

    def begin_backward(self, model: PreTrainedModel, *, is_last: bool) -> None:
        """Called before each forward whose backward pass follows; the last one of a mini-batch is told. All ranks have
        equally many."""

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
        """Runs passes of `model` of which all ranks finish theirs, or none. See `memory/oom_consensus.py`.

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
        as there are ways to shard. What asks for all weights asks layer by layer (`model/lora.py: merged_weights`)."""
        return [
            tensor.detach() if dtype is None else tensor.detach().to(dtype) for tensor, dtype in zip(tensors, dtypes)
        ]

    def of_rank_0(self, value: T) -> T:
        """Return what rank 0 gave."""
        return value


class SingleProcess(ModelStrategy):
    """`single`: one process."""


class Replicated(ModelStrategy):
    """`ddp`: a replica per rank of the default process group."""

    def __init__(self, group: SequenceGroup | None = None) -> None:
        self.group = group
        self._consensus = _consensus(group)
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()

    def prepare(self, model: PreTrainedModel) -> None:
        """Gives each rank what rank 0 has: one differing byte at the start would never be noticed."""
        with torch.no_grad():
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, src=0)

    def agree(self, count: int) -> int:
        """Return the largest count of all ranks."""
        return _largest(count)

    def in_consensus(self, model: PreTrainedModel, work: Callable[[], T]) -> T:  # noqa: ARG002
        """Ranks meet at the end, and before each collective of ranks that share forwards: else replicas do not talk."""
        return self._consensus.run(work)

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums all gradients, in buckets of one type."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat, op=dist.ReduceOp.SUM)
            for gradient, part in zip(bucket, torch.split(flat, [gradient.numel() for gradient in bucket])):
                gradient.copy_(part.view_as(gradient))

    def first_reason(self, reason: str) -> str:
        """Return the lowest rank's reason that is not empty."""
        return _first_reason(reason, self.num_ranks)

    def of_rank_0(self, value: T) -> T:
        """Return what rank 0 gave."""
        return _of_rank_0(value)


class Sharded(ModelStrategy):
    """`fsdp2`: `fully_shard` on each decoder layer and on the model, over the ranks of the default process group."""

    sharded = True

    def __init__(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        cpu_offload: bool,
        gradient_sync: GradientSync = "auto",
        group: SequenceGroup | None = None,
        mesh: RankMesh | None = None,
    ) -> None:
        """`dtype` is that of forward passes; `gradient_sync` is `strategy.gradient_sync`; without a `mesh` all ranks are one
        group."""
        self.group = group
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self.mesh = mesh or _one_axis(device)
        self.num_shards = self.mesh.sizes.shard
        self.device = device
        self._device = device
        self._dtype = dtype
        self._cpu_offload = cpu_offload
        self._gradient_sync = gradient_sync
        self._consensus = _consensus(group)
        self._gathers: Callable[[], Iterable[Tensor]] = tuple
        self.keeps_whole_gradients = False

    def prepare(self, model: PreTrainedModel) -> None:
        """Shards the model and sends each rank its part of rank 0's parameters. Ranks agree on when to sum gradients."""
        from skyrl_train.distributed.fsdp import gathering, shard_model, whole_gradient_bytes

        once = sums_once_a_step(
            self._gradient_sync, gradient_bytes=whole_gradient_bytes(model), device_bytes=_device_bytes(self._device)
        )
        self.keeps_whole_gradients = not self.agree(int(not once))
        shard_model(
            model,
            mesh=self.mesh,
            device=self._device,
            dtype=self._dtype,
            cpu_offload=self._cpu_offload,
            consensus=self._consensus,
        )
        self._gathers = gathering(model)

    def agree(self, count: int) -> int:
        """Return the largest count of all ranks: every forward gathers parameters from all of them."""
        return _largest(count)

    def compute(self, model: PreTrainedModel, function: Callable[[], T]) -> T:
        """Runs `function` as a forward of `model`, so that the parameters outside its layers are whole meanwhile."""
        sharded: Any = model
        result: T = sharded.compute(function)
        return result

    def begin_backward(self, model: PreTrainedModel, *, is_last: bool) -> None:
        """Gradients are summed by the backward pass: of each micro-batch, or of the last one alone."""
        from skyrl_train.distributed.fsdp import sum_gradients

        sum_gradients(model, now=is_last or not self.keeps_whole_gradients)

    def hold_gradients(self, model: PreTrainedModel, parameters: Iterable[nn.Parameter]) -> None:
        """Give gradients of zeros, whole or of this rank's shards."""
        from skyrl_train.distributed.fsdp import hold_whole_gradients

        if self.keeps_whole_gradients:
            hold_whole_gradients(model)
        else:
            _zero_gradients(parameters)

    def whole_gradients(self, model: PreTrainedModel) -> Iterable[Tensor]:
        """Return the gradients that FSDP2 keeps."""
        from skyrl_train.distributed.fsdp import whole_gradients

        return whole_gradients(model)

    def gathered(self) -> Iterable[Tensor]:
        """Return the tensors into which FSDP2 gathers parameters."""
        return self._gathers()

    def in_consensus(self, model: PreTrainedModel, work: Callable[[], T]) -> T:
        """Ranks meet before each collective of a pass, too."""
        from skyrl_train.distributed.fsdp import forget_pass

        try:
            return self._consensus.run(work)
        except RankOutOfMemory:
            forget_pass(model)
            raise

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Does nothing: the backward pass has summed them."""

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the L2 norm over all shards of all gradients."""
        return self.full(torch.nn.utils.get_total_norm(gradients))

    def first_reason(self, reason: str) -> str:
        """Return the lowest rank's reason that is not empty."""
        return _first_reason(reason, self.num_ranks)

    def full(self, tensor: Tensor) -> Tensor:
        """Return the whole tensor, gathered from all ranks."""
        from torch.distributed.tensor import DTensor

        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def gather(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]) -> list[Tensor]:
        """Return whole tensors, on the device: shards that lie in host memory are moved there first."""
        from skyrl_train.distributed.gather import gather_whole

        return gather_whole(tensors, dtypes, self._device)

    def of_rank_0(self, value: T) -> T:
        """Return what rank 0 gave."""
        return _of_rank_0(value)


def single(ranks: RankSettings) -> ModelStrategy:  # noqa: ARG001
    """One process: nothing is spread."""
    return SingleProcess()


def ddp(ranks: RankSettings) -> ModelStrategy:
    """A replica per rank; gradients are summed once per optimizer step."""
    return Replicated(ranks.group)


def fsdp2(ranks: RankSettings) -> ModelStrategy:
    """Parameters, gradients and optimizer state sharded over the ranks."""
    return Sharded(
        device=ranks.device,
        dtype=ranks.dtype,
        cpu_offload=ranks.cpu_offload,
        gradient_sync=ranks.gradient_sync,
        group=ranks.group,
        mesh=ranks.mesh,
    )


def make_strategy(config: StrategyConfig, ranks: RankSettings) -> ModelStrategy:
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


def _consensus(group: SequenceGroup | None) -> OomConsensus:
    consensus = OomConsensus(_largest)
    if group is not None:
        group.before_collective = consensus.before_collective
    return consensus


def _of_rank_0(value: T) -> T:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _largest(count: int) -> int:
    value = torch.tensor(count, dtype=torch.int64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value)


def _first_reason(reason: str, num_ranks: int) -> str:
    if not _largest(int(bool(reason))):
        return ""
    reasons: list[str] = [""] * num_ranks
    dist.all_gather_object(reasons, reason)
    return next(f"{found} (rank {rank})" for rank, found in enumerate(reasons) if found)


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one type, about `_BUCKET_BYTES` together."""
    buckets: list[list[Tensor]] = []
    size = 0
    for gradient in gradients:
        num_bytes = gradient.numel() * gradient.element_size()
        if not buckets or size + num_bytes > _BUCKET_BYTES or buckets[-1][0].dtype != gradient.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += num_bytes
    return buckets
