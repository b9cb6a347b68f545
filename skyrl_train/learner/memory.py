"""Peak memory of one pass over a micro-batch, predicted without running it and without a device. Imports no torch.

    ModelFacts + MemorySettings --memory_facts()--> MemoryFacts --predict(phase, rows, longest, positions)--> by kind

A pass holds most at one of a few moments; each is counted by kind, and the largest is the peak:

    training    in the head, at the end of the forward pass   all activations, tiles of logits, the head's gradient
                in the topmost layer, as the backward begins  all activations, what that layer's backward makes
                in the embedding, at its end                  gradients of embedding and head
    scoring     in the largest layer                          one layer's tensors
                in the head                                   the last hidden states, tiles of logits

Gradients are counted from the first micro-batch on, optimizer state from the first step on. Every token is taken for one
that is trained. Of sharded models the layers in flight are counted: the one at work and the one that is gathered next,
each whole, and the gradients of the one before on their way to their shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from skyrl_train.config.placement import sums_once_a_step
from skyrl_train.errors import MemoryLimitError
from skyrl_train.learner.memory_blocks import BackboneCost, Precision, gated_backbone, most_bytes
from skyrl_train.learner.memory_facts import GATED, ModelFacts

Phase = Literal["training", "scoring"]
Kinds = Mapping[str, int]

TOKENS_PER_TILE, ELEMENTS_PER_TILE, ELEMENTS_PER_TILE_ACCELERATOR = 128, 1 << 21, 1 << 26
TOKENS_PER_PRODUCT = 4096
"""Of the output head: those of `model/logprobs.py`, which a test keeps equal. That module imports torch."""
BLOCK, MAX_BLOCKS = 128, 1024
"""Of flex attention's block mask: those of `model/segments.py`, which a test keeps equal too."""
_MAX_BUDGET = 1 << 32
"""Positions: more than any batch has."""
_INPUT_BYTES = 75
"""Per position: the columns of a micro-batch, as they are taken from the batch, and its layout."""
_LOSS_BYTES = 100
"""Per place of `[rows, longest]`: log-probabilities, advantages, ratios, clipped terms, KL and entropy."""
_SCORE_BYTES = 16
"""The same for a forward alone: its scores, and the mask by which they are spread."""


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """How one model is trained or scored on one rank."""

    strategy: Literal["single", "ddp", "fsdp2"] = "single"
    num_ranks: int = 1
    cpu_offload: bool = False
    """Shards, their gradients and optimizer state are in host memory (fsdp2)."""
    gradient_sync: Literal["auto", "step", "micro_batch"] = "micro_batch"
    """`strategy.gradient_sync`: whether whole gradients lie there between the micro-batches of a step (fsdp2)."""
    device_bytes: int = 0
    """Memory of the device, by which `auto` decides."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward pass; master weights are float32."""
    checkpointing: bool = False
    eager: bool = False
    """Attention with plain products in the padded layout; the fused kernels else."""
    layout: Literal["padded", "packed", "prefix_shared"] = "padded"
    """What decides whether attention reads a block mask."""
    optimizer: Literal["adamw", "sgd", "none"] = "adamw"
    """`none`: the model is only scored."""
    lora_rank: int = 0
    """Of an adapter on all linear layers; 0 trains all weights."""
    head: Literal["logprobs", "values"] = "logprobs"
    """A critic has a head of one number."""
    accelerator: bool = True
    """Whether it runs on one, where tiles of logits are larger than on a CPU."""

    @property
    def precision(self) -> Precision:
        """Sharded weights are gathered in the compute type; others stay float32 and autocast copies them."""
        compute = 2 if self.dtype == "bfloat16" else 4
        return Precision(stream=compute if self.strategy == "fsdp2" else 4, compute=compute)

    @property
    def block_mask(self) -> bool:
        """Whether attention reads a block mask: flex attention does, for trees and for packed rows in float32."""
        flex = self.layout == "prefix_shared" or (self.layout == "packed" and self.dtype == "float32")
        return flex and self.accelerator

    @property
    def trained(self) -> str:
        """`all`, `adapter` or `none` of the weights."""
        if self.optimizer == "none":
            return "none"
        return "adapter" if self.lora_rank else "all"


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """All that a prediction needs."""

    model: ModelFacts
    settings: MemorySettings
    backbone: BackboneCost


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """A pass at its peak."""

    phase: Phase
    moment: str
    """Where it holds most."""
    kinds: Kinds
    """Bytes by kind; none is 0."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.kinds.values())


def memory_facts(model: ModelFacts, settings: MemorySettings, backbone: BackboneCost | None = None) -> MemoryFacts:
    """`backbone`: as measured by `memory_trace.py`; counted where it is not given and the family is known.

    Raises ValueError for another family without it.
    """
    if backbone is None:
        if model.family not in GATED:
            raise ValueError(f"layers of model_type={model.family!r} have to be traced (memory_trace.py)")
        backbone = gated_backbone(
            model,
            settings.precision,
            checkpointing=settings.checkpointing,
            eager=settings.eager,
            trained=settings.trained,
        )
    return MemoryFacts(model=model, settings=settings, backbone=backbone)


def predicted_peak_bytes(facts: MemoryFacts, rows: int, longest: int, positions: int, *, training: bool) -> int:
    """Of one forward and backward (`training`) or one forward of a micro-batch, with what lies there all the time."""
    return predict(facts, "training" if training else "scoring", rows, longest, positions).peak_bytes


def predict(facts: MemoryFacts, phase: Phase, rows: int, longest: int, positions: int) -> MemoryEstimate:
    """The largest of the phase's moments. `positions`: `rows * longest` padded, the sum of lengths packed."""
    growing = _training if phase == "training" else _scoring
    resident = resident_bytes(facts, training=phase == "training")
    moments = [
        MemoryEstimate(phase=phase, moment=moment, kinds=_merged(resident, kinds))
        for moment, kinds in growing(facts, rows, longest, positions)
    ]
    return max(moments, key=lambda estimate: estimate.peak_bytes)


def predicted_token_budget(facts: MemoryFacts, phase: Phase, limit_bytes: int, longest: int) -> int:
    """The largest C so that every micro-batch of at most C computed positions, in rows of at most `longest` tokens, fits.

    A single row goes alone, even over C. Raises MemoryLimitError where one of `longest` does not fit.
    """

    def peak(positions: int) -> int:
        rows = _share(positions, longest)
        return predict(facts, phase, rows, min(longest, positions), positions).peak_bytes

    if peak(longest) > limit_bytes:
        raise MemoryLimitError(
            f"one row of {longest} tokens takes {peak(longest)} bytes in {phase}, of which "
            f"{sum(resident_bytes(facts, training=phase == 'training').values())} do not depend on it; {limit_bytes} bytes "
            "are there"
        )
    low, high = longest, 2 * longest
    while peak(high) <= limit_bytes and high < _MAX_BUDGET:
        low, high = high, 2 * high
    while high - low > 1:
        middle, _ = divmod(low + high, 2)
        low, high = (middle, high) if peak(middle) <= limit_bytes else (low, middle)
    return low


def resident_bytes(facts: MemoryFacts, *, training: bool) -> Kinds:
    """What lies on the device whatever the micro-batch. Gradients only while training."""
    model, settings = facts.model, facts.settings
    shards = settings.num_ranks if settings.strategy == "fsdp2" else 1
    adapter = model.adapter_parameters(settings.lora_rank)
    base = model.parameters - (model.head_parameters if settings.head == "values" else 0)
    trained = {"all": base, "adapter": adapter, "none": 0}[settings.trained]
    whole = 4 * trained * training
    once = sums_once_a_step(settings.gradient_sync, gradient_bytes=whole, device_bytes=settings.device_bytes)
    kept_whole = {"gradients": whole} if settings.strategy == "fsdp2" and once and whole else {}
    if settings.strategy == "fsdp2" and settings.cpu_offload:
        return kept_whole
    states = {"adamw": 8, "sgd": 0, "none": 0}[settings.optimizer]
    kinds = {
        "parameters": 4 * (base + adapter),
        "gradients": 4 * trained * training,
        "optimizer state": states * trained,
    }
    return {**{kind: _share(count, shards) for kind, count in kinds.items() if count}, **kept_whole}


def bytes_of_sharding(facts: MemoryFacts, *, training: bool) -> int:
    """What a pass of a sharded model holds beside its shards and its activations: gathered parameters, and gradients on
    their way to their shards; in the moment in which there are most of them."""
    in_flight = _gradients_in_flight(facts) if training else 0
    return _gathered(facts, layers=2) + math.ceil(in_flight)


def block_mask_bytes(positions: int) -> int:
    """Of flex attention's block mask: int32 counts and numbers of blocks, by queries and by keys, of those read in part
    and in full; and of where each position's subtree ends."""
    block = BLOCK
    while positions > block * MAX_BLOCKS:
        block *= 2
    blocks = _share(positions, block)
    return 4 * 4 * (blocks + blocks * blocks) + 4 * positions


def _training(facts: MemoryFacts, rows: int, longest: int, positions: int) -> Iterator[tuple[str, dict[str, float]]]:
    model, settings, backbone = facts.model, facts.settings, facts.backbone
    stream = settings.precision.stream
    attention = backbone.attention.bytes(positions, longest)
    kept = {
        "inputs": _INPUT_BYTES * positions,
        "activations": backbone.saved.bytes(positions, longest) - attention,
        "attention": attention,
        "block mask": block_mask_bytes(positions) * settings.block_mask,
    }
    hidden = stream * model.hidden_size * positions
    dropped = settings.checkpointing and settings.trained == "adapter"
    copies = _largest_copy(facts) if dropped else _weight_copies(facts)
    head = _head_in_training(facts, positions)
    yield (
        "in the head",
        {
            **kept,
            "loss terms": _LOSS_BYTES * rows * longest,
            "activations": kept["activations"] + hidden,
            "head": head,
            "copies in bfloat16": copies,
            "gathered parameters": _gathered(facts, layers=0),
        },
    )
    in_layer = most_bytes(backbone.backward, positions, longest)
    waiting = _head_gradient(facts)
    yield (
        "in the topmost layer's backward",
        {
            **kept,
            "loss terms": _LOSS_BYTES * rows * longest,
            "backward of a layer": in_layer + max(0, -in_layer),
            "activations": kept["activations"] + min(0, in_layer),
            "head": waiting,
            "copies in bfloat16": 0 if settings.checkpointing else copies,
            "gathered parameters": _gathered(facts, layers=2),
            "gradients in flight": _gradients_in_flight(facts),
        },
    )
    yield (
        "in the embedding's backward",
        {
            "inputs": kept["inputs"],
            "backward of a layer": 2 * hidden,
            "head": waiting,
            "gradients in flight": _embedding_gradient(facts),
            "gathered parameters": _gathered(facts, layers=1),
        },
    )


def _scoring(facts: MemoryFacts, rows: int, longest: int, positions: int) -> Iterator[tuple[str, dict[str, float]]]:
    model, settings = facts.model, facts.settings
    inputs = _INPUT_BYTES * positions + _SCORE_BYTES * rows * longest
    hidden = settings.precision.stream * model.hidden_size * positions
    copies = _weight_copies(facts) if settings.trained == "all" else _largest_copy(facts)
    yield (
        "in a layer",
        {
            "inputs": inputs,
            "block mask": block_mask_bytes(positions) * settings.block_mask,
            "activations": most_bytes(facts.backbone.scoring, positions, longest),
            "copies in bfloat16": copies,
            "gathered parameters": _gathered(facts, layers=2),
        },
    )
    yield (
        "in the head",
        {
            "inputs": inputs,
            "activations": hidden,
            "head": _head_in_scoring(facts, positions),
            "copies in bfloat16": copies if settings.trained == "all" else 0,
            "gathered parameters": _gathered(facts, layers=0),
        },
    )


def _tiles(facts: MemoryFacts, positions: int) -> tuple[int, int]:
    """Logits in the first tile, and in the one after it, 0 where there is none."""
    budget = ELEMENTS_PER_TILE_ACCELERATOR if facts.settings.accelerator else ELEMENTS_PER_TILE
    vocabulary = facts.model.vocabulary_size
    most, _ = divmod(budget, vocabulary)
    most = max(TOKENS_PER_TILE, most)
    return min(most, positions) * vocabulary, min(most, max(0, positions - most)) * vocabulary


def _head_in_training(facts: MemoryFacts, positions: int) -> float:
    """Selected states and their gradient, the weight's gradient in float32 and its copy in the compute type; logits,
    log-probabilities, probabilities and their product with one another, and what the tile before left."""
    precision, hidden = facts.settings.precision, facts.model.hidden_size
    states = precision.stream * hidden * positions
    if facts.settings.head == "values":
        return states + (4 * hidden * positions if precision.stream == 2 else 0)
    first, second = _tiles(facts, positions)
    weight = facts.model.embedding_parameters
    own = 4 * weight if facts.settings.trained == "all" else 0
    copy = precision.compute * weight if precision.casts else 0
    # under autocast, the last tile's gradient in the compute type and its product for the weight
    product = (14 * first + precision.compute * weight) if own and precision.casts else 0
    # gradients of several tiles' logits, for one product
    rows = min(positions, TOKENS_PER_PRODUCT) if facts.settings.accelerator and second else 0
    kept = precision.compute * rows * facts.model.vocabulary_size
    return 2 * states + own + copy + kept + max(16 * first, 12 * first + 4 * second, 4 * first + 16 * second, product)


def _head_in_scoring(facts: MemoryFacts, positions: int) -> float:
    precision, hidden = facts.settings.precision, facts.model.hidden_size
    states = precision.stream * hidden * positions
    if facts.settings.head == "values":
        return states + (4 * hidden * positions if precision.stream == 2 else 0)
    first, second = _tiles(facts, positions)
    copy = precision.compute * facts.model.embedding_parameters if precision.casts else 0
    in_compute_type = 2 if precision.compute == 2 else 0
    return states + copy + max(8 * first + (4 + in_compute_type) * second, 4 * first + 8 * second)


def _head_gradient(facts: MemoryFacts) -> int:
    """That of a tied head waits for the embedding's; that of a sharded one for all outside the layers."""
    settings = facts.settings
    waits = facts.model.tied or settings.strategy == "fsdp2"
    trained = settings.trained == "all" and settings.head == "logprobs"
    return settings.precision.stream * facts.model.embedding_parameters if trained and waits else 0


def _embedding_gradient(facts: MemoryFacts) -> float:
    """The embedding's own, and its sum with that of a tied head; sharded, both in float32 on their way to the shards."""
    model, settings = facts.model, facts.settings
    if settings.trained != "all":
        return 0
    tied = model.tied and settings.head == "logprobs"
    own = settings.precision.stream * model.embedding_parameters * (2 if tied else 1)
    if settings.strategy != "fsdp2":
        return own
    roots = _root_parameters(facts)
    return settings.precision.stream * roots + 4 * roots + 4 * _share(roots, settings.num_ranks)


def _weight_copies(facts: MemoryFacts) -> int:
    """What autocast keeps of the layers' weights: of trained ones to the end of the forward, of any that the backward
    pass reads to that. The head makes its own."""
    if not facts.settings.precision.casts:
        return 0
    return facts.settings.precision.compute * facts.model.num_layers * facts.model.block_linear_parameters


def _largest_copy(facts: MemoryFacts) -> int:
    """Copies of frozen weights are dropped at once."""
    if not facts.settings.precision.casts:
        return 0
    return facts.settings.precision.compute * facts.model.hidden_size * facts.model.intermediate_size


def _root_parameters(facts: MemoryFacts) -> int:
    model = facts.model
    return model.root_parameters - (model.head_parameters if facts.settings.head == "values" else 0)


def _gathered(facts: MemoryFacts, *, layers: int) -> int:
    """Sharded parameters that are whole: those outside the layers all the time, and so many layers."""
    if facts.settings.strategy != "fsdp2":
        return 0
    count = _root_parameters(facts) + layers * facts.model.block_parameters
    return facts.settings.precision.compute * count


def _gradients_in_flight(facts: MemoryFacts) -> float:
    """The sharded layer before: its gradient in float32, as it is summed over ranks, and its shard of the sum."""
    settings, block = facts.settings, facts.model.block_parameters
    if settings.strategy != "fsdp2" or settings.trained != "all":
        return 0
    return 4 * block + 4 * _share(block, settings.num_ranks)


def _share(count: int, parts: int) -> int:
    return -(-count // parts)


def _merged(resident: Kinds, growing: Mapping[str, float]) -> Kinds:
    """Whole bytes, without kinds of which there are none."""
    kinds = {kind: resident.get(kind, 0) + growing.get(kind, 0) for kind in [*resident, *growing]}
    return {kind: -int(-count // 1) for kind, count in kinds.items() if count > 0}
