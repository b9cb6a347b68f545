"""What a step takes on devices that are not here: memory, bytes on the wire, and seconds by stated rates. No torch.

    sizes of the model, ranks    --DeviceShare-->     parameters, gradients, optimizer state, what is gathered
    tokens of a step             --ModelShape-->      operations
    bytes, operations            --Device-->          seconds, and which of them are most

Arithmetic for choosing a layout before there is a machine: `search.py` ranks by it what `placement=auto` may choose.
Activations are counted from sizes; `plan/memory/` traces the run's own step instead. Rates are two thirds of
data sheets' for products (`batch/layouts/cost.py`) and four fifths for memory and links, and none of them was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from skyrl_train.batch.layouts import CostModel, DeviceRates, ModelShape, rates_of
from skyrl_train.config.models import STATE_BUCKET_BYTES, WEIGHT_BUCKET_BYTES, MeshSizes
from skyrl_train.config.rules import num_experts
from skyrl_train.learner.memory import DeviceShare
from skyrl_train.model.sizes import ParameterCounts, read_config, text_part
from skyrl_train.plan.time import FORWARD_SHARE
from skyrl_train.weight_sync import topology

_BF16 = 2
_FP32 = 4
_FITS = 0.9
"""Of a device's memory; the rest is an allocator's, and kernels'."""
_ENGINE_SHARE = 0.8
"""Of a device's memory, for an engine."""
ENGINE_OVERHEAD_BYTES = 2_000_000_000
"""What one engine takes beside weights, keys and values: activations of a prefill, and captured graphs."""
_DECODE_OVERHEAD_S = 2e-3
"""Of a step of decoding beside what is read: kernels that start, sampling. Stated, not measured."""
_SEQUENCE_OVERHEAD_S = 1e-5
"""Of one sequence in a step of decoding, on the engine's core: scheduling, sampling, output. Stated, not measured."""
_FRONT_TOKEN_S = 2e-5
"""Of one token in the process that hands answers over: `python -m scripts.bench.engine_front` on one core of a server."""
_BATCHED_TOKENS = 16_384
"""Tokens of a step, as `inference/vllm/settings.py` gives a context of so many."""
_COLLECTIVE_S = 1.5e-5
"""Of starting a sum over an engine's GPUs, of which a layer has two, or a transfer of weights. Stated, not measured."""


_EXPOSED = ("partial sums", "exchanged heads", "host optimizer", "state here and back")
"""What hides behind no products."""
_HIDDEN = 0.1
"""Share of what hides that is felt nevertheless, as it takes cores and memory from what it hides behind. Stated, not
measured."""


@dataclass(frozen=True, kw_only=True)
class EngineRates:
    """How fast one engine is, in seconds of a step of decoding that all running sequences make together."""

    step_s: float
    """Of each step, however many run: the weights that are read."""
    sequence_s: float = 0.0
    """Of each running sequence in it."""
    context_token_s: float = 0.0
    """Of each token that a running sequence has: keys and values that are read."""
    prompt_token_s: float = 0.0
    """Of a prompt's token, once."""
    slots: int = 256
    """Sequences that run together."""
    front_token_s: float = 0.0
    """Of each token that it hands over, in its front end, which has one core and works beside the next step."""
    batched_tokens: int = 0
    """Tokens of prompts that a step computes beside what runs; 0: a prompt is computed whole before the next step."""
    batching: Literal["continuous", "waves"] = "continuous"


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """What one rank does in a second; operations are floating-point ones."""

    source: str
    """Where they are from, for the reader of the plan."""
    widths: tuple[float, ...]
    """Hidden sizes of the models for which the next one holds; between them is interpolated."""
    trained_flops: tuple[float, ...]
    """Of the layers' products, forward and backward, with all that is computed beside them."""
    decoded_flops: float
    """Of a forward of one token for each sequence."""
    head_flops: float
    attention_flops: float
    pass_s: float
    """Of a micro-batch, however small."""
    layer_s: float
    """Of one in each layer: operators that are started, forward and backward."""
    decoded_step_s: float
    """Of a step of decoding, layers aside."""
    decoded_layer_s: float
    """Of a step of decoding in each layer, weights aside."""
    token_s: float
    """Of each token that is sampled, beside the model."""
    read_bytes: float
    """Of weights, and of keys and values."""
    parameter_s: float
    """Of an optimizer step, for each parameter: its gradient is made, and it is updated."""
    forward_share: float = FORWARD_SHARE
    """How much faster a position is scored than trained."""

    def cost(self, shape: ModelShape, *, more: float = 1.0) -> CostModel:
        """What a forward and backward of the model costs, in seconds; `more`: how often that of its layers."""
        linear = self._at(self.trained_flops, shape)
        layers = DeviceRates(
            linear_flops=linear,
            attention_flops=self.attention_flops,
            kernel_s=0.0,
            read_bytes=self.read_bytes,
        )
        cost = CostModel.of_model(shape, layers)
        return replace(
            cost,
            per_position=cost.per_position * more,
            per_pair=cost.per_pair * more,
            per_loss_token=cost.per_loss_token * linear / self.head_flops,
            per_call=self.pass_s + shape.num_layers * self.layer_s * more,
        )

    def engine(self, shape: ModelShape, *, number_bytes: int, slots: int) -> EngineRates:
        """What an engine of the model takes, `number_bytes` for each weight."""
        return EngineRates(
            step_s=self.decoded_step_s
            + shape.num_layers * self.decoded_layer_s
            + number_bytes * shape.parameters / self.read_bytes,
            sequence_s=self.token_s + 2 * shape.parameters / self.decoded_flops,
            context_token_s=number_bytes * shape.kv_numbers_per_token / self.read_bytes,
            prompt_token_s=self.cost(shape).per_position / self.forward_share,
            slots=slots,
        )

    def _at(self, rates: Sequence[float], shape: ModelShape) -> float:
        return float(np.interp(np.log(shape.hidden_size), np.log(self.widths), rates))


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
    host_update_rate: float = 5e9
    """Of the optimizer in the host's memory, for each GPU: four threads of torch's fused AdamW."""
    node_size: int = 8

    def link(self, num_ranks: int) -> float:
        """Return the rate of a collective of so many consecutive ranks."""
        return self.node_rate if num_ranks <= self.node_size else self.network_rate


@dataclass(frozen=True, kw_only=True)
class ScaledModel:
    """A model by its config."""

    name: str
    counts: ParameterCounts
    experts: int
    """Of a layer; 0 for a dense model."""
    experts_per_token: int
    shape: ModelShape
    hidden: int
    query_size: int
    kv_size: int
    heads: int
    kv_heads: int
    layer_features: int
    """Numbers of one position that a layer's forward makes, of the experts that it passes."""

    state_bytes: int = 8
    """Of the optimizer's state, for each parameter that is trained."""
    engine_bytes: int = _BF16
    """Of a parameter in an engine."""

    @classmethod
    def named(cls, name: str) -> ScaledModel:
        """Return a model of the table of known ones. Raises ModelError, KeyError."""
        config = read_config(name)
        return cls.of_config(name, config, parameters=int(config["parameters"]))

    @classmethod
    def of_config(
        cls, name: str, whole: Mapping[str, Any], *, parameters: int, trains_all: bool = True, **settings: int
    ) -> ScaledModel:
        """Return the model of a config.json; where not `trains_all`, an adapter's parameters count as none.
        `settings`: `state_bytes` and `engine_bytes`.

        Raises KeyError for a config that names no hidden size, layers or heads.
        """
        config = text_part(whole)
        shape = ModelShape.of_config(config)
        hidden, layers, heads = shape.hidden_size, shape.num_layers, int(config["num_attention_heads"])
        head = int(config.get("head_dim") or hidden // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        query, kv = heads * head, kv_heads * head
        experts = num_experts(config)
        width = int((experts and config.get("moe_intermediate_size")) or config.get("intermediate_size") or 4 * hidden)
        expert_block = 3 * hidden * width * experts
        all_experts = min(layers * expert_block, parameters)  # some families have dense layers, too
        block = 2 * hidden * (query + kv) + (expert_block or 3 * hidden * width)
        chosen = int(config.get("num_experts_per_tok") or 1) if experts else 0
        return cls(
            name=name,
            counts=ParameterCounts(
                total=parameters,
                trained=parameters * trains_all,
                block=block,
                root=max(0, parameters - layers * block),
                block_experts=expert_block,
                experts=all_experts,
                trained_experts=all_experts * trains_all,
            ),
            experts=experts,
            experts_per_token=chosen,
            shape=shape,
            hidden=hidden,
            query_size=query,
            kv_size=kv,
            heads=heads,
            kv_heads=kv_heads,
            layer_features=4 * hidden + 2 * (query + kv) + 3 * width * max(1, chosen),
            **settings,
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
class Rollouts:
    """What engines make for one training batch, environments left out."""

    samples: int
    response_tokens: float
    """Of a sample, in the mean."""
    longest_response: float
    prompt_tokens: float
    """Of a sample, in the mean, where those of a prompt share its computation."""
    context_tokens: float
    """Tokens before each token of a response, added up over a sample, in the mean."""


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
    def links_s(self) -> float:
        """Seconds of the exchanges that can hide behind products."""
        return sum(
            seconds for name, seconds in self.seconds.items() if name not in ("products", "weight sync", *_EXPOSED)
        )

    @property
    def step_s(self) -> float:
        """Seconds of the update where exchanges hide behind products but for a tenth, the weight sync aside. What ranks with
        parts of matrices sum or exchange hides behind nothing, as what comes next needs it; nor does an optimizer in the
        host."""
        shorter, longer = sorted((self.seconds["products"], self.links_s))
        return longer + _HIDDEN * shorter + sum(self.seconds[name] for name in _EXPOSED)


def update_on(
    model: ScaledModel,
    mesh: MeshSizes,
    work: Work,
    device: Device,
    *,
    micro_batch: int,
    offloaded: bool = False,
    state_in_host: bool = False,
    recomputed: bool = True,
) -> Update:
    """Return what an optimizer step takes on ranks that are laid out so, with FSDP2 and bfloat16; layers are `recomputed`
    in the backward pass, or keep all that it needs. `offloaded`, `state_in_host`: all, or the optimizer's state alone, is
    in the host (`strategy.cpu_offload`).

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
        state_bytes=model.state_bytes,
        state_at_once=STATE_BUCKET_BYTES if state_in_host else None,
        compute_bytes=_BF16,
        frozen_bytes=_BF16,
    )
    ranks = mesh.num_ranks
    # Ranks that share micro-batches have the same rows.
    micro_batches = max(1, math.ceil(work.tokens * tensor * mesh.sequence / ranks / micro_batch))
    resident = share.resident(counts, training=True)
    # Inputs of all layers are kept; one layer's numbers and their gradients are there while it is recomputed. Inputs and
    # outputs of its halves are whole on each rank.
    whole = 4 * model.hidden
    layer = whole + (model.layer_features - whole) // tensor
    kept = model.num_layers * (model.hidden if recomputed else layer)
    activations = {"activations": int(_BF16 * (kept + 2 * layer) * micro_batch / mesh.sequence)}
    own = counts.on_a_rank(mesh.expert).trained
    keeps_whole = mesh.shard > 1 and resident.get("gradients", 0) >= _FP32 * own
    passes, state = 3 if recomputed else 2, counts.trained / mesh.shard
    moved = _moved_bytes(
        model,
        mesh,
        work,
        micro_batches=micro_batches,
        sums=1 if keeps_whole else micro_batches,
        passes=passes,
        offloaded=offloaded,
        state_in_host=state_in_host,
    )
    rates, within = rates_of(device.name), device.link(mesh.shard * tensor)
    linear = (1 + passes) * model.active_flops * work.tokens + 3 * model.shape.head_flops_per_token * work.tokens
    attention = (1.5 + passes) * work.tokens * work.mean_length / 2 * model.shape.attention_flops_per_pair
    links = dict.fromkeys(moved, within) | {
        "states": device.link(mesh.expert),
        "partial sums": device.link(tensor),
        "exchanged heads": device.link(mesh.sequence),
        "replicas": device.link(ranks),
        "host memory": device.host_rate,
        "host optimizer": device.host_update_rate,
        "state here and back": device.host_rate,
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
        host_bytes=int((offloaded * (2 * _FP32 + model.state_bytes) + state_in_host * model.state_bytes) * state),
    )


def _moved_bytes(
    model: ScaledModel,
    mesh: MeshSizes,
    work: Work,
    *,
    micro_batches: int,
    sums: int,
    passes: int,
    offloaded: bool,
    state_in_host: bool,
) -> dict[str, float]:
    """Return the bytes that one GPU receives in an optimizer step, by what moves them.

    Args:
        sums: How often gradients are summed over ranks.
        passes: Of a layer: forward, backward, and the forward that is computed again.
    """
    tensor, ranks, counts = mesh.tensor, mesh.num_ranks, model.counts.cut(mesh.tensor)
    others, trained = (mesh.shard - 1) / mesh.shard, counts.trained / counts.total
    # A rank's experts are sharded over those that have the same.
    received = (counts.total - counts.experts) * others
    received += counts.experts / mesh.expert * (1 - mesh.expert / mesh.shard)
    # A token's state goes to each of its experts and comes back in each pass.
    states = 2 * passes * _BF16 * model.hidden * model.experts_per_token * model.num_layers * work.tokens / ranks
    # Queries and outputs, keys and values of a rank's own positions go to the ranks that have their heads.
    heads = 2 * passes * _BF16 * (model.query_size + model.kv_size) * model.num_layers * work.tokens * tensor / ranks
    state, tokens = counts.trained / mesh.shard, work.tokens * tensor * mesh.sequence / ranks
    return {
        "gathered parameters": 2 * micro_batches * _BF16 * received,
        "summed gradients": sums * _FP32 * received * trained,
        "states": states * (mesh.expert - 1) / mesh.expert,
        # Two in each pass of a layer, the embedding's, and the gradient behind the head; a sum over ranks moves what is
        # summed there and back.
        "partial sums": 2 * (tensor - 1) / tensor * _BF16 * model.hidden * (2 * passes * model.num_layers + 2) * tokens,
        "exchanged heads": heads * (mesh.sequence - 1) / mesh.sequence,
        "replicas": sums * 2 * _FP32 * state * (mesh.replicate - 1) / mesh.replicate,
        # Shards come as they are gathered, in float32, and gradients leave.
        "host memory": offloaded * _FP32 * (2 * micro_batches * counts.total / mesh.shard + sums * state),
        # It reads a parameter, its gradient and its state, and writes all but the gradient.
        "host optimizer": offloaded * state * (3 * _FP32 + 2 * model.state_bytes),
        "state here and back": state_in_host * 2 * state * model.state_bytes,
        "weight sync": _BF16 * model.counts.total * (1 - 1 / (mesh.shard * tensor)),
    }


@dataclass(frozen=True, kw_only=True)
class StreamedSync:
    """A weight sync from GPUs that train to others that generate, as `weight_sync/topology.py` plans it."""

    links: Mapping[topology.Stage, topology.StageBytes]
    """The most bytes that one link carries."""
    num_calls: int
    """How often the busiest GPU passes bytes on."""
    seconds: float


@cache
def streamed_sync(
    num_bytes: int,
    mesh: MeshSizes,
    device: Device,
    *,
    ranks_per_node: int,
    workers: int,
    workers_per_node: int,
    together: bool = False,
) -> StreamedSync:
    """Return what a sync of all weights takes: each stage as long as its fullest link, one after the other, as a worker
    passes a bucket on; and the calls. Parameters count as divided evenly over the ranks that are no replicas.

    Args:
        num_bytes: Of all weights, in the type that travels.
        workers: GPUs of engines, all of which want all weights.
        together: Whether they are on the ranks' nodes, on other GPUs.
    """
    sending, engines = mesh.shard * mesh.tensor, "ranks" if together else "engines"
    way = topology.Topology(
        sender_nodes=tuple(f"ranks-{index // ranks_per_node}" for index in range(mesh.num_ranks)),
        receiver_nodes=tuple(f"{engines}-{index // workers_per_node}" for index in range(workers)),
        sending=tuple(range(sending)),
    )
    links = way.link_bytes([num_bytes // sending] * sending)
    # What describes a bucket goes ahead of it.
    num_calls = 2 * way.most_calls() * math.ceil(num_bytes / WEIGHT_BUCKET_BYTES)
    moving_s = sum(max(each.network / device.network_rate, each.local / device.node_rate) for each in links.values())
    return StreamedSync(links=links, num_calls=num_calls, seconds=moving_s + num_calls * _COLLECTIVE_S)


def engine_room(device: Device, share: float = _ENGINE_SHARE) -> float:
    """Return the bytes of one GPU that an engine with this share of it has for weights, keys and values."""
    return share * device.memory_bytes - ENGINE_OVERHEAD_BYTES


def devices_per_engine(
    model: ScaledModel, device: Device, sizes: Sequence[int] = (1, 2, 4, 8), *, share: float = _ENGINE_SHARE
) -> int:
    """Return the GPUs of one engine: of `sizes` as few as leave 40 % of its memory to keys and values, else the most."""
    weights = model.engine_bytes * model.counts.total
    return next((size for size in sizes if weights / size <= 0.6 * engine_room(device, share)), sizes[-1])


def engine_rates(
    model: ScaledModel,
    size: int,
    device: Device,
    *,
    mean_length: float,
    max_seqs: int = 256,
    share: float = _ENGINE_SHARE,
) -> EngineRates:
    """Return how fast an engine of `size` GPUs is: a step reads all weights once, and each sequence's keys and values.
    Experts count whole, as some sequence passes each of them. Several GPUs sum twice in each layer."""
    weights = model.engine_bytes * model.counts.total
    rates = rates_of(device.name)
    room = size * engine_room(device, share) - weights
    flops = model.active_flops + model.shape.head_flops_per_token
    summed = 2 * model.num_layers * (size > 1)
    exchanged = summed * 2 * _BF16 * model.hidden * (size - 1) / size / device.link(size)
    return EngineRates(
        step_s=weights / size / device.memory_rate + _DECODE_OVERHEAD_S + summed * _COLLECTIVE_S,
        sequence_s=flops / rates.linear_flops / size + exchanged + _SEQUENCE_OVERHEAD_S,
        context_token_s=model.kv_bytes / size / device.memory_rate,
        prompt_token_s=model.active_flops / rates.linear_flops / size + exchanged,
        slots=max(1, min(max_seqs, int(room / (model.kv_bytes * mean_length)))),
        front_token_s=_FRONT_TOKEN_S,
        batched_tokens=_BATCHED_TOKENS,
    )


def rollout_s(rates: EngineRates, rollouts: Rollouts, num_engines: int) -> tuple[float, float]:
    """Return the seconds of a batch's rollouts with continuous batching, and those in which an engine is busy with as many
    sequences as it holds: from then on the longest sequence decides."""
    samples = rollouts.samples / num_engines
    tokens = rollouts.response_tokens * samples
    each = tokens * rates.sequence_s + samples * rollouts.context_tokens * rates.context_token_s
    each += samples * rollouts.prompt_tokens * rates.prompt_token_s
    busy = tokens / max(1.0, min(samples, rates.slots))
    return max(busy, rollouts.longest_response) * rates.step_s + each, busy * rates.step_s + each
