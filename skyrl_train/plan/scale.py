"""What a step takes on devices that are not here: memory, bytes on the wire, and seconds by stated rates. No torch.

    sizes of the model, ranks    --DeviceShare-->     parameters, gradients, optimizer state, what is gathered
    tokens of a step             --ModelShape-->      operations
    bytes, operations            --Device-->          seconds, and which of them are most

Arithmetic for choosing a layout before there is a machine. Activations are counted from sizes, for layers that are
recomputed in the backward pass; `python -m skyrl_train.plan` traces the run's own step instead. Rates are two thirds of
data sheets' for products (`batch/cost.py`) and four fifths for memory and links, and none of them was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_train.batch.cost import ModelShape, rates_of
from skyrl_train.config.placement import MeshSizes
from skyrl_train.memory.model_sizes import ParameterCounts, read_config
from skyrl_train.memory.predict import DeviceShare
from skyrl_train.plan.simulated_engines import EngineRates
from skyrl_train.plan.simulation import LearnerRates

_BF16 = 2
_FP32 = 4
_FITS = 0.9
"""Of a device's memory; the rest is an allocator's, and kernels'."""
_ENGINE_SHARE = 0.8
"""Of a device's memory, for an engine; weights may take 60 % of that (`placement=auto`)."""
_DECODE_OVERHEAD_S = 2e-3
"""Of a step of decoding beside what is read: kernels that start, a collective a layer, sampling. Stated, not measured."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU of a node of eight, and its links. Bytes and operations a second that are reckoned with."""

    name: str = "H100"
    memory_bytes: float = 80e9
    memory_rate: float = 0.8 * 3.35e12
    node_rate: float = 0.8 * 450e9
    """To the other GPUs of the node (NVLink), in each direction."""
    network_rate: float = 0.8 * 50e9
    """To other nodes: one adapter of 400 Gbit/s for each GPU."""
    host_rate: float = 0.8 * 64e9
    """To and from the host's memory (PCIe 5, 16 lanes)."""
    node_size: int = 8

    def link(self, num_ranks: int) -> float:
        """Return the rate of a collective of so many consecutive ranks."""
        return self.node_rate if num_ranks <= self.node_size else self.network_rate


@dataclass(frozen=True, kw_only=True)
class ScaledModel:
    """A model by its config."""

    name: str
    counts: ParameterCounts
    experts_per_token: int
    """0 for a dense model."""
    shape: ModelShape
    hidden: int
    kv_size: int
    kv_heads: int
    layer_features: int
    """Numbers of one position that a layer's forward makes, of the experts that it passes."""

    @staticmethod
    def named(name: str) -> ScaledModel:
        """Return a model of the table of known ones, or of a folder. Raises ModelError, KeyError."""
        config: Mapping[str, Any] = read_config(name)
        hidden, layers, heads = (
            int(config[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        head = int(config.get("head_dim") or hidden // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        query, kv = heads * head, kv_heads * head
        experts = int(config.get("num_experts") or 0)
        width = int(config["moe_intermediate_size"] if experts else config["intermediate_size"])
        expert_block = 3 * hidden * width * experts
        block = 2 * hidden * (query + kv) + (expert_block or 3 * hidden * width)
        total = int(config["parameters"])
        chosen = int(config.get("num_experts_per_tok") or 1) if experts else 0
        return ScaledModel(
            name=name,
            counts=ParameterCounts(
                total=total,
                trained=total,
                block=block,
                root=total - layers * block,
                block_experts=expert_block,
                experts=layers * expert_block,
                trained_experts=layers * expert_block,
            ),
            experts_per_token=chosen,
            shape=ModelShape.of_config(config),
            hidden=hidden,
            kv_size=kv,
            kv_heads=kv_heads,
            layer_features=4 * hidden + 2 * (query + kv) + 3 * width * max(1, chosen),
        )

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values of one token, in bfloat16."""
        return 2 * _BF16 * self.num_layers * self.kv_size

    @property
    def active_flops(self) -> float:
        """Of a token's forward through the layers."""
        return self.shape.linear_flops_per_token


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one step trains on."""

    tokens: float
    """Of all rows."""
    mean_length: float
    longest: int
    """Tokens of the longest row, which a micro-batch has to hold."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step of the policy on one GPU."""

    mesh: MeshSizes
    memory: Mapping[str, int]
    """Bytes by kind."""
    moved: Mapping[str, float]
    """Bytes that the GPU receives in a step, by what moves them."""
    seconds: Mapping[str, float]
    """By what is at work: those of the links go on beside those of the products, as far as they can be hidden."""
    micro_batches: int
    micro_batch: int
    """Tokens of each."""
    host_bytes: int = 0
    """What lies in the host's memory instead (`strategy.cpu_offload`)."""

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    def fits(self, device: Device) -> bool:
        """Whether the device has the memory."""
        return self.memory_bytes <= _FITS * device.memory_bytes

    @property
    def step_s(self) -> float:
        """Seconds of the update where exchanges hide behind products, the weight sync aside. What ranks with parts of
        matrices sum hides behind nothing: what comes next needs it."""
        apart = ("products", "weight sync", "partial sums")
        links = sum(seconds for name, seconds in self.seconds.items() if name not in apart)
        return max(self.seconds["products"], links) + self.seconds["partial sums"]

    @property
    def limit(self) -> str:
        """What takes longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def update_on(
    model: ScaledModel, mesh: MeshSizes, work: Work, device: Device, *, micro_batch: int, offloaded: bool = False
) -> Update:
    """Return what an optimizer step takes on ranks that are laid out so, with FSDP2, bfloat16 and recomputed layers.

    Gradients of micro-batches are added up on each rank where whole ones are small enough for `strategy.gradient_sync=auto`;
    else each is summed over ranks as it comes.
    """
    tensor, counts = mesh.tensor, model.counts.cut(mesh.tensor)
    share = DeviceShare(
        num_shards=mesh.shard,
        sequence=mesh.sequence,
        expert_ranks=mesh.expert,
        sharded=True,
        cpu_offload=offloaded,
        gradient_sync="auto",
        device_bytes=int(device.memory_bytes),
        compute_bytes=_BF16,
    )
    ranks = mesh.num_ranks
    # Ranks that share micro-batches have the same rows.
    tokens = work.tokens * tensor * mesh.sequence / ranks
    micro_batches = max(1, math.ceil(tokens / micro_batch))
    resident = share.resident(counts, training=True)
    # Inputs of all layers are kept; one layer's numbers and their gradients are there while it is recomputed. Inputs and
    # outputs of its halves are whole on each rank.
    whole = 4 * model.hidden
    layer = whole + (model.layer_features - whole) // tensor
    per_position = _BF16 * (model.num_layers * model.hidden + 2 * layer)
    activations = {"activations": int(per_position * micro_batch / mesh.sequence)}
    keeps_whole = mesh.shard > 1 and resident.get("gradients", 0) >= _FP32 * counts.on_a_rank(mesh.expert).trained
    sums = 1 if keeps_whole else micro_batches
    others = (mesh.shard - 1) / mesh.shard
    # A rank's experts are sharded over those that have the same.
    received = (counts.total - counts.experts) * others
    received += counts.experts / mesh.expert * (1 - mesh.expert / mesh.shard)
    # A token's state goes to each of its experts and comes back: forward, recomputed forward and backward.
    states = 6 * _BF16 * model.hidden * model.experts_per_token * model.num_layers * work.tokens / ranks
    moved = {
        "gathered parameters": 2 * micro_batches * _BF16 * received,
        "summed gradients": sums * _FP32 * received,
        "states": states * (mesh.expert - 1) / mesh.expert,
        # Two in each layer's forward, recomputed forward and backward, the embedding's, and the gradient behind the head;
        # a sum over ranks moves what is summed there and back.
        "partial sums": 2 * (tensor - 1) / tensor * _BF16 * model.hidden * (6 * model.num_layers + 2) * tokens,
        "replicas": sums * 2 * _FP32 * counts.total / mesh.shard * (mesh.replicate - 1) / mesh.replicate,
        # Shards come as they are gathered, in float32, and gradients leave.
        "host memory": offloaded * (2 * micro_batches + sums) * _FP32 * counts.total / mesh.shard,
        "weight sync": _BF16 * model.counts.total * (1 - 1 / (mesh.shard * tensor)),
    }
    rates, within = rates_of(device.name), device.link(mesh.shard * tensor)
    linear = 4 * model.active_flops * work.tokens + 3 * model.shape.head_flops_per_token * work.tokens
    attention = 4.5 * work.tokens * work.mean_length / 2 * model.shape.attention_flops_per_pair
    links = dict.fromkeys(moved, within) | {
        "states": device.link(mesh.expert),
        "partial sums": device.link(tensor),
        "replicas": device.network_rate,
        "host memory": device.host_rate,
    }
    return Update(
        mesh=mesh,
        memory={**resident, **share.exchanged(counts, training=True), **activations},
        moved=moved,
        seconds={
            "products": (linear / rates.linear_flops + attention / rates.attention_flops) / ranks,
            **{name: count / links[name] for name, count in moved.items()},
        },
        micro_batches=micro_batches,
        micro_batch=micro_batch,
        host_bytes=offloaded * 4 * _FP32 * counts.total // mesh.shard,
    )


def best_update(model: ScaledModel, num_gpus: int, work: Work, device: Device, *, tensor: int = 1) -> Update:
    """Return the quickest way to lay out so many GPUs that fits: shards over all, or over groups of nodes that hold the
    same (`strategy.fsdp_size`); experts gathered, or divided over eight; micro-batches of one to eight of the longest rows.
    Where nothing fits, parameters and state are in host memory; where that does not either, it is what takes least.
    `tensor` ranks have parts of each matrix (`strategy.tensor_parallel_size`)."""
    sizes = [size for size in (8, 16, 32, 64, 128, 256, 512) if size <= num_gpus and num_gpus % size == 0]
    sizes = [size for size in sizes if size > tensor or size == num_gpus]
    found = [
        update_on(
            model,
            MeshSizes(shard=size // tensor, replicate=num_gpus // size, tensor=tensor, expert=experts),
            work,
            device,
            micro_batch=rows * work.longest,
            offloaded=offloaded,
        )
        for offloaded in (False, True)
        for size in sizes or [num_gpus]
        for experts in ((1, 8) if model.experts_per_token and size >= 8 else (1,))
        for rows in (1, 2, 4, 8)
    ]
    fitting = [each for each in found if each.fits(device)]
    resident = [each for each in fitting if not each.host_bytes]
    if not fitting:
        return min(found, key=lambda each: each.memory_bytes)
    # Sums that are equal on paper differ in their last bits, and not in each Python in the same.
    return min(resident or fitting, key=lambda each: (round(each.step_s, 6), each.memory_bytes))


def devices_per_engine(model: ScaledModel, device: Device) -> int:
    """Return the GPUs of one engine: as few as leave 40 % of its memory to keys and values."""
    weights = _BF16 * model.counts.total
    room = 0.6 * _ENGINE_SHARE * device.memory_bytes
    return next(size for size in (1, 2, 4, 8) if weights / size <= room or size == device.node_size)


def engine_rates(
    model: ScaledModel, size: int, device: Device, *, mean_length: float, max_seqs: int = 256
) -> EngineRates:
    """Return how fast an engine of `size` GPUs is: a step reads all weights once, and each sequence's keys and values.
    Experts count whole, as some sequence passes each of them."""
    weights = _BF16 * model.counts.total
    rates = rates_of(device.name)
    room = size * _ENGINE_SHARE * device.memory_bytes - weights
    flops = model.active_flops + model.shape.head_flops_per_token
    return EngineRates(
        step_s=weights / size / device.memory_rate + _DECODE_OVERHEAD_S,
        sequence_s=flops / rates.linear_flops / size,
        context_token_s=model.kv_bytes / size / device.memory_rate,
        prompt_token_s=model.active_flops / rates.linear_flops / size,
        slots=max(1, min(max_seqs, int(room / (model.kv_bytes * mean_length)))),
    )


def learner_rates(model: ScaledModel, num_gpus: int, work: Work, device: Device) -> LearnerRates:
    """Return how fast a learner on so many GPUs is, by its best layout for this work."""
    best = best_update(model, num_gpus, work, device)
    return LearnerRates(token_s=best.step_s / work.tokens, sync_s=best.seconds["weight sync"])
