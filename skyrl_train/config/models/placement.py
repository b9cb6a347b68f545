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
    """`platform=cpu|gpu`: what the machine offers. Chosen by looking for a CUDA device unless stated."""

    name: Literal["cpu", "gpu"] = "cpu"
    """Chooses the other groups' defaults: tiny bundled model and inline learner on cpu, Qwen2.5 with vLLM on gpu."""
    device: str = "cpu"
    """torch device of the inline learner and of `generator=hf`, e.g. `cpu` or `cuda:0`."""
    num_threads: PositiveCount = 1
    """torch threads per process. Unless stated on a CPU: one for a model of less than 20 million parameters, which idle
    threads slow down, and for others all cores, divided among the ranks or engines that compute at once."""
    rates: CutsRows[Mapping[str, Any] | None] = None
    """What the device computes in a second, by which layouts are chosen and rows are dealt to ranks: operations of products,
    of attention, and of attention in prefix trees, seconds to start a kernel, bytes that are read. Unless stated: what
    `python -m skyrl_train.selftest --measure` found of such a device, or null, the rates that are built in. A run that
    goes on keeps those that it began with."""

    @property
    def on_gpu(self) -> bool:
        """Whether models of this process compute on a GPU."""
        return self.name == "gpu" and self.device.startswith("cuda")


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """`strategy=single|ddp|fsdp2`: how one model is spread over ranks."""

    name: Annotated[PartSpec, STRATEGIES] = "single"
    """single: one process. ddp: a replica per rank. fsdp2: sharded over ranks. Or a custom one, of one process or many."""
    sequence_parallel_size: Annotated[CutsRows[PositiveCount], _RANKS] = 1
    """So many ranks compute each micro-batch together, each a part of its positions: for long rows. Must divide the
    ranks and the attention heads of every model; a micro-batch's caps hold for all of them together."""
    fsdp_size: Annotated[LayoutOnly[NonNegativeCount], _SHARDED] = 0
    """Ranks over which parameters, gradients and optimizer state are sharded; 0 is all of them. Groups of so many
    ranks hold the same, and sum gradients among each other: less memory is saved, but what is gathered in each pass stays
    within a group, such as a node. Must divide the ranks of every model."""
    tensor_parallel_size: Annotated[CutsRows[PositiveCount], _SHARDED] = 1
    """So many neighbouring ranks compute each micro-batch together, each with a part of every matrix, by the plan that
    transformers has for the model's family. For models whose layers do not fit a device when they are gathered.
    Must divide the ranks, heads, features and vocabulary of every model."""
    expert_parallel_size: Annotated[LayoutOnly[PositiveCount], _RANKS] = 1
    """So many neighbouring ranks divide the experts of each layer of a mixture, and tokens travel to them; all else stays as
    `name` says. Must divide the ranks and the experts of every model, and not go beyond `fsdp_size` ranks."""
    layers_ahead: Annotated[Free[NonNegativeCount | None], _SHARDED] = None
    """Decoder layers whose parameters are gathered ahead of the one at work: more memory, less waiting. 0: as FSDP2
    does by itself, one ahead in backward passes alone. null: 1 where experts are divided, else 0."""
    cpu_offload: Annotated[
        Literal["auto", "optimizer", True, False], Of(".name", ("fsdp2",), values=(True,), why="optimizer is for any")
    ] = "auto"
    """What is in host memory. optimizer: the optimizer's state between its steps, in each of which it comes to the device a
    part at a time; any strategy, and the update is the same bit for bit. true: parameters, gradients and state, and the CPU
    updates them. auto: optimizer where `placement=auto` finds no room without and has it with that, else nothing."""
    gradient_sync: Annotated[Literal["auto", "step", "micro_batch"], _SHARDED] = "auto"
    """When ranks sum gradients. step: with an optimizer step's last micro-batch; until then each rank keeps the
    gradient of the whole model, 4 bytes a trained parameter. micro_batch: with each, which keeps shards alone. auto: step
    where whole gradients take at most a tenth of the device's memory."""

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

    How many ranks a model has is stated by their number (`policy_num_workers`), or by nodes and GPUs of each, from which
    the number follows. With `auto` all of it is chosen for the GPUs that there are.
    """

    auto: bool = False
    """Choose backend, ranks, engines, what they share and how `strategy=fsdp2` shards for the GPUs that there are
    (`placement=auto`): of this machine, or of the cluster at `ray_address`. What is stated of ranks and sharing is then
    refused; settings of engines and of `strategy` stay as they are stated."""
    num_gpus: Annotated[NonNegativeCount, _CHOSEN] = 0
    """GPUs to choose for: of those there are, or for a plan without any; 0 counts them."""
    num_nodes: Annotated[PositiveCount, _CHOSEN] = 1
    """Nodes over which `num_gpus` are spread evenly."""
    gpu_memory_gb: Annotated[NonNegativeFloat, _CHOSEN] = 0.0
    """Memory of one GPU in GB (10^9 bytes) to choose for; 0 asks the driver, and takes 80 where it does not say."""
    host_memory_gb: Free[NonNegativeFloat] = 0.0
    """Memory of one node in GB (10^9 bytes), against which a plan checks what the run keeps there; 0 reads it, or the limit
    of the container, where the GPUs that are planned for are this machine's."""
    stated: Free[tuple[str, ...]] = ()
    """Settings that `auto` leaves as they are although they have their default: those of the command line, which the
    composition fills in. What has another value than its default is left in any case."""
    backend: Literal["inline", "ray"] = "inline"
    """inline: one process, no Ray, debuggable with pdb. ray: actors on a cluster."""
    policy_num_workers: CutsRows[PositiveCount] = 1
    """Data-parallel ranks of the policy."""
    critic_num_workers: CutsRows[PositiveCount] = 1
    """Data-parallel ranks of the critic."""
    ref_num_workers: LayoutOnly[PositiveCount] = 1
    """Data-parallel ranks of the reference."""
    policy_num_nodes: PositiveCount = 1
    """Nodes that the policy's ranks are spread over, equally many on each."""
    policy_num_gpus_per_node: NonNegativeCount = 0
    """GPUs of each of them, one rank each; 0 where `policy_num_workers` says how many there are in all."""
    critic_num_nodes: PositiveCount = 1
    """Nodes of the critic's ranks; those of the policy where they share devices."""
    critic_num_gpus_per_node: NonNegativeCount = 0
    """GPUs of each of them; 0 where `critic_num_workers` counts."""
    ref_num_nodes: PositiveCount = 1
    """Nodes of the reference's ranks; those of the policy where they share devices."""
    ref_num_gpus_per_node: NonNegativeCount = 0
    """GPUs of each of them; 0 where `ref_num_workers` counts."""
    inference_num_nodes: NonNegativeCount = 0
    """Nodes for engines alone; 0 puts engines on any node with room."""
    inference_num_gpus_per_node: Annotated[
        NonNegativeCount, Of(".inference_num_nodes", write="placement.inference_num_nodes=1")
    ] = 0
    """GPUs of each of them; 0 follows from the engines."""
    colocate_all: bool = False
    """Models and engines share devices; each gives its memory up while the others work, as `offload` says."""
    offload: Free[Literal["auto", True, False]] = "auto"
    """Where models and engines share GPUs: all of them leave for the host's memory while others work (true), or all stay
    (false). auto: they stay where all are predicted to fit at once, with a micro-batch of the largest model, and engines
    whose `generator.vllm.gpu_memory_utilization` still has half the context of each sequence; it is then lowered to that."""
    colocate_policy_ref: bool = True
    """Policy and reference share devices."""
    ray_address: Annotated[Free[str], Of(".backend", ("ray",))] = ""
    """A cluster to join (`auto`, `ray://host:port`, `host:port`); empty starts a session of this machine alone."""
    wait_for_nodes_s: Annotated[Free[NonNegativeFloat], _CLUSTER] = 0.0
    """How long a joined cluster may take to have the devices that are asked for: nodes that are still joining, or an
    autoscaler. 0 refuses at once what its nodes cannot hold."""
    allow_fewer_workers: Annotated[Free[bool], _CLUSTER] = False
    """Where a run is restarted (`trainer.max_restarts`) and the cluster has lost nodes that do not come back within
    `wait_for_nodes_s`: go on with the most ranks that the batch sizes allow and the other nodes hold."""
    rollouts: Annotated[Free[Literal["driver", "engines"]], Of(".backend", ("ray",))] = "driver"
    """Where conversations run. driver: in the process of the loop, which sees each token once. engines: beside the engine
    that answers them, in its actor, which puts their arrays into a file and into the object store of its node; the loop has
    references. Each engine then has rewards and `environment.num_workers` of its own, and what engines and environments are
    at is not measured. For engines on Ray without `trainer.max_staleness`, programs as agents, and rewards by models."""
    start_timeout_s: Free[Seconds] = 300.0
    """Deadline of Ray, of each actor's start and of loading a model. Where models are loaded it has a second more for
    every 50 MB of their weights."""
    call_timeout_s: Free[Seconds] = 1800.0
    """Deadline of one call to a worker or an engine, and of each collective among ranks."""
    silence_timeout_s: Free[Seconds] = 60.0
    """A worker that gives no sign of life for so long is taken for hung, whatever its call's deadline: the run is restarted,
    or ended."""

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
