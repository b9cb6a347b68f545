"""`platform=`, `strategy=` and `placement=`: what a run runs on. Part of the schema; see `config/schema.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from skyrl_train.config.fields.fields import (
    CutsRows,
    Free,
    LayoutOnly,
    NonNegativeCount,
    NonNegativeFloat,
    Of,
    PositiveCount,
    Seconds,
)
from skyrl_train.parts import STRATEGIES
from skyrl_train.registry import PartSpec

SHARING_SETTINGS = ("strategy.sequence_parallel_size", "strategy.tensor_parallel_size")
"""Which ranks compute micro-batches together."""
WEIGHT_BUCKET_BYTES = 256 * 2**20
"""Of weights that are on their way to engines together."""
STATE_BUCKET_BYTES = 1 << 30
"""Optimizer state that a step takes from the host to the device at once; a larger parameter's goes alone."""
ROLES = ("policy", "critic", "ref")
"""First part of the names of a model's settings."""
RATE_NAMES = ("linear_flops", "attention_flops", "flex_flops", "kernel_s", "read_bytes")
"""Entries of `platform.rates`."""


_SHARDED = Of(".name", ("fsdp2",))
_RANKS = Of(".name", ("fsdp2", "ddp"), why="that is one process")
_CHOSEN = Of(".auto", write="placement=auto")
_CLUSTER = Of(".ray_address", write="placement.ray_address=auto")


@dataclass(frozen=True, kw_only=True)
class PlatformConfig:
    """`platform=cpu|gpu`: what the machine offers; gpu with a CUDA device unless stated."""

    name: Literal["cpu", "gpu"] = "cpu"
    """Chooses other groups' defaults: bundled model, inline, on cpu; Qwen2.5 with vLLM on gpu."""
    device: str = "cpu"
    """torch device of the inline learner and `generator=hf`."""
    num_threads: PositiveCount = 1
    """torch threads per process. Unless stated on a CPU: one below 20 million parameters, else all cores, divided among
    ranks or engines."""
    rates: CutsRows[Mapping[str, Any] | None] = None
    """Speeds of the device, for choosing layouts and balancing ranks. Unless stated: what `python -m
    skyrl_train.selftest --measure` found, or null (built in); kept on resume."""

    @property
    def on_gpu(self) -> bool:
        """Whether models of this process compute on a GPU."""
        return self.name == "gpu" and self.device.startswith("cuda")


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """`strategy=single|ddp|fsdp2`: how one model is spread over ranks."""

    name: Annotated[PartSpec, STRATEGIES] = "single"
    """single: one process. ddp: a replica per rank. fsdp2: sharded over ranks."""
    sequence_parallel_size: Annotated[CutsRows[PositiveCount], _RANKS] = 1
    """Ranks sharing each micro-batch's positions, for long rows; caps hold for all together. Must divide every model's
    ranks and heads."""
    fsdp_size: Annotated[LayoutOnly[NonNegativeCount], _SHARDED] = 0
    """Ranks over which a model is sharded; 0 is all. Fewer take more memory, but gather within a node, say. Must divide
    every model's ranks."""
    tensor_parallel_size: Annotated[CutsRows[PositiveCount], _SHARDED] = 1
    """Neighbouring ranks sharing each matrix, for layers too large for a device. Must divide every model's ranks,
    heads, features and vocabulary."""
    expert_parallel_size: Annotated[LayoutOnly[PositiveCount], _RANKS] = 1
    """Neighbouring ranks sharing a mixture's experts. Must divide every model's ranks and experts; at most
    `fsdp_size`."""
    layers_ahead: Annotated[Free[NonNegativeCount | None], _SHARDED] = None
    """Decoder layers gathered ahead: more memory, less waiting. 0: one, in backward passes. null: 1 with divided
    experts, else 0."""
    cpu_offload: Annotated[
        Literal["auto", "optimizer", True, False], Of(".name", ("fsdp2",), values=(True,), why="optimizer is for any")
    ] = "auto"
    """What is in host memory. optimizer: its state between steps, any strategy. true: parameters, gradients and state,
    updated by the CPU. auto: optimizer where `placement=auto` needs that room, else nothing."""
    gradient_sync: Annotated[Literal["auto", "step", "micro_batch"], _SHARDED] = "auto"
    """When ranks sum gradients. step: once, each keeping the whole gradient, 4 bytes a parameter. micro_batch: each
    time, keeping shards. auto: step if that takes at most a tenth of device memory."""

    @property
    def kind(self) -> str:
        """The built-in strategy that is chosen, whichever way its name is written; the target of a custom one."""
        return STRATEGIES.name_of(self.name)

    @property
    def offloads_all(self) -> bool:
        """Whether shards of parameters, gradients and state are in host memory."""
        return self.cpu_offload is True

    @property
    def offloads_state(self) -> bool:
        """Whether the optimizer's state alone is in host memory."""
        return self.cpu_offload == "optimizer"

    @property
    def ranks_per_share(self) -> int:
        """Ranks that compute each micro-batch together, and so have the same rows."""
        return self.sequence_parallel_size * self.tensor_parallel_size

    @property
    def stated_sharing(self) -> str:
        """The settings that make it more than 1, with their values, for messages."""
        stated = {name: getattr(self, name.partition(".")[2]) for name in SHARING_SETTINGS}
        return " x ".join(f"{name}={size}" for name, size in stated.items() if size > 1)

    @property
    def is_custom(self) -> bool:
        """Whether it is none of the built-in ones, so that nothing is known of how it spreads a model."""
        return self.kind not in STRATEGIES


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """`placement=`: which processes run where.

    State a model's ranks by number (`policy_num_workers`), or by nodes and GPUs of each; `auto` chooses all of it.
    """

    auto: bool = False
    """Choose backend, ranks, engines, sharing and `strategy=fsdp2` shards for the GPUs of this machine, or of
    `ray_address`. Stated ranks and sharing are refused; engine and `strategy` settings stay."""
    num_gpus: Annotated[NonNegativeCount, _CHOSEN] = 0
    """GPUs to choose, or plan, for; 0 counts them."""
    num_nodes: Annotated[PositiveCount, _CHOSEN] = 1
    """Nodes with equally many of them."""
    gpu_memory_gb: Annotated[NonNegativeFloat, _CHOSEN] = 0.0
    """Memory of one GPU in GB (10^9 bytes); 0 asks the driver, else 80."""
    host_memory_gb: Free[NonNegativeFloat] = 0.0
    """Memory of one node in GB (10^9 bytes), checked by plans; 0 reads it, if the GPUs are this machine's."""
    stated: Free[tuple[str, ...]] = ()
    """Settings of the command line that `auto` leaves at their default; filled in."""
    backend: Literal["inline", "ray"] = "inline"
    """inline: one process, no Ray, works with pdb. ray: actors on a cluster."""
    policy_num_workers: CutsRows[PositiveCount] = 1
    """Data-parallel ranks."""
    critic_num_workers: CutsRows[PositiveCount] = 1
    """Data-parallel ranks."""
    ref_num_workers: LayoutOnly[PositiveCount] = 1
    """Data-parallel ranks."""
    policy_num_nodes: PositiveCount = 1
    """Nodes of the policy's ranks, equally many on each."""
    policy_num_gpus_per_node: NonNegativeCount = 0
    """GPUs of each, one rank each; 0: `policy_num_workers` counts."""
    critic_num_nodes: PositiveCount = 1
    """The critic's nodes; the policy's where devices are shared."""
    critic_num_gpus_per_node: NonNegativeCount = 0
    """GPUs of each; 0: `critic_num_workers` counts."""
    ref_num_nodes: PositiveCount = 1
    """The reference's nodes; the policy's where devices are shared."""
    ref_num_gpus_per_node: NonNegativeCount = 0
    """GPUs of each; 0: `ref_num_workers` counts."""
    inference_num_nodes: NonNegativeCount = 0
    """Nodes for engines alone; 0: any node with room."""
    inference_num_gpus_per_node: Annotated[
        NonNegativeCount, Of(".inference_num_nodes", write="placement.inference_num_nodes=1")
    ] = 0
    """GPUs of each; 0 follows from the engines."""
    colocate_all: bool = False
    """Models and engines share devices, as `offload` says."""
    offload: Free[Literal["auto", True, False]] = "auto"
    """On shared GPUs, models and engines leave for host memory while others work (true) or stay (false). auto: stay
    where all fit, lowering `generator.vllm.gpu_memory_utilization`."""
    colocate_policy_ref: bool = True
    """Policy and reference share devices."""
    ray_address: Annotated[Free[str], Of(".backend", ("ray",))] = ""
    """Cluster to join (`auto`, `ray://host:port`, `host:port`); empty: this machine alone."""
    wait_for_nodes_s: Annotated[Free[NonNegativeFloat], _CLUSTER] = 0.0
    """Seconds for a cluster to get the devices; 0 refuses at once."""
    allow_fewer_workers: Annotated[Free[bool], _CLUSTER] = False
    """A restarted run (`trainer.max_restarts`) whose nodes stay lost for `wait_for_nodes_s` goes on with fewer ranks."""
    rollouts: Annotated[Free[Literal["driver", "engines"]], Of(".backend", ("ray",))] = "driver"
    """Where conversations run. driver: in the loop's process. engines: beside each engine, with rewards and
    `environment.num_workers` of its own, activity unmeasured; not with `trainer.max_staleness`, agent programs or
    rewards by models."""
    start_timeout_s: Free[Seconds] = 300.0
    """Deadline of starting Ray, an actor or a model (a second more per 50 MB of weights)."""
    call_timeout_s: Free[Seconds] = 1800.0
    """Deadline of a worker's or engine's call, and of a collective."""
    silence_timeout_s: Free[Seconds] = 60.0
    """A worker silent for so long counts as hung: the run restarts or ends."""

    def __post_init__(self) -> None:
        """The number of ranks where nodes and GPUs state it, so that everything else has one thing to read."""
        for role in ROLES:
            per_node = getattr(self, f"{role}_num_gpus_per_node")
            if per_node and getattr(self, f"{role}_num_workers") == 1:
                object.__setattr__(self, f"{role}_num_workers", per_node * getattr(self, f"{role}_num_nodes"))


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """How many ranks of a model lie along each axis; `distributed/mesh.py` says which."""

    shard: int
    """Those that hold parts of each parameter."""
    replicate: int = 1
    """Groups of those that hold the same."""
    tensor: int = 1
    """Those that compute with parts of each matrix."""
    sequence: int = 1
    """Those that compute parts of each micro-batch's positions; they lie within `shard`."""
    expert: int = 1
    """Those that have parts of the experts; they lie within `shard`."""

    @property
    def num_ranks(self) -> int:
        """All ranks of the model."""
        return self.replicate * self.shard * self.tensor


def mesh_sizes(strategy: StrategyConfig, num_ranks: int) -> MeshSizes:
    """Return how `num_ranks` ranks of a sharded model are laid out, where the rules of `strategy` hold."""
    tensor = strategy.tensor_parallel_size
    shard = strategy.fsdp_size or max(1, num_ranks // tensor)
    return MeshSizes(
        replicate=max(1, num_ranks // (shard * tensor)),
        shard=shard,
        tensor=tensor,
        sequence=strategy.sequence_parallel_size,
        expert=strategy.expert_parallel_size,
    )


WHOLE_GRADIENTS_SHARE = 0.1
"""The share of a device's memory that the gradient of a whole model may take where `strategy.gradient_sync=auto` keeps
it."""


def sums_once_a_step(gradient_sync: str, *, gradient_bytes: int, device_bytes: int) -> bool:
    """Whether ranks of a sharded model sum gradients with the last micro-batch of an optimizer step alone.

    Args:
        gradient_sync: `strategy.gradient_sync`.
        gradient_bytes: Of all trained parameters, whole.
        device_bytes: Memory of one rank's device; 0 where it is not known.
    """
    if gradient_sync != "auto":
        return gradient_sync == "step"
    return gradient_bytes <= WHOLE_GRADIENTS_SHARE * device_bytes
