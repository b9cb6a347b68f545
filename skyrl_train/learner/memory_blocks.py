"""What the decoder layers of a model hold for a micro-batch: a count for the common block, tensor by tensor. No torch.

The counted block is that of `memory_facts.GATED`, as transformers computes it and autograd keeps it:

    norm        the input and its normalised form (float32 and the stream's type), for the gradient of its weight
    linear      its input; under autocast a copy of it in the compute type for each linear layer that reads it
    attention   queries, keys, values, output, log-sum-exps; with `eager` the probabilities, whence the square term
    product     gate, its activation, the other factor and the product

Other families are measured on tensors without memory (`memory_trace.py`), which gives the same three numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_train.learner.memory_facts import ModelFacts


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes of a micro-batch: `constant + per_position * positions + per_pair * positions * longest`."""

    constant: float = 0.0
    per_position: float = 0.0
    per_pair: float = 0.0

    def bytes(self, positions: int, longest: int) -> float:
        """Of so many positions in rows of at most `longest` tokens."""
        return self.constant + positions * (self.per_position + self.per_pair * longest)


def most_bytes(moments: Sequence[Cost], positions: int, longest: int) -> float:
    """Of the moment that holds most."""
    return max(moment.bytes(positions, longest) for moment in moments)


@dataclass(frozen=True, kw_only=True)
class BackboneCost:
    """Of everything between token ids and the last hidden state."""

    saved: Cost
    """Kept from the forward pass for the backward pass, without the last hidden state."""
    attention: Cost
    """The part of `saved` that attention keeps."""
    scoring: tuple[Cost, ...]
    """What a forward without gradients holds at the moments when it holds most."""
    backward: tuple[Cost, ...]
    """What the backward pass holds at such moments, beyond `saved`; negative where what it frees first is more."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of an element, and what that implies."""

    stream: int
    """Of the residual stream: 4 where the weights are float32, autocast or not; 2 where they are bfloat16."""
    compute: int
    """Of matrix products."""

    @property
    def casts(self) -> bool:
        """Whether autocast copies inputs and weights of linear layers."""
        return self.compute < self.stream


def gated_backbone(
    model: ModelFacts, precision: Precision, *, checkpointing: bool, eager: bool, trained: str
) -> BackboneCost:
    """The count, for `trained` weights: `all`, `adapter` (on all linear layers) or `none`."""
    stream, compute, hidden = precision.stream, precision.compute, model.hidden_size
    inner = model.intermediate_size
    attention = _attention(model, compute, eager=eager)
    layer = _plus(attention, _rest_of_layer(model, precision, trained=trained))
    layers = _times(Cost(per_position=stream * hidden) if checkpointing else layer, model.num_layers)
    positions = 2 * model.head_dim * stream
    final_norm = 4 * hidden + stream * hidden * (trained == "all") + 4
    saved = _plus(layers, Cost(per_position=positions + final_norm))
    # In the topmost layer's products: gradients of the gate, of its activation, of the other factor. The final norm has
    # gone by then. Or still in that norm, which computes in float32.
    weight = inner * hidden * (compute + 4 * precision.casts) * (trained == "all")
    stream_gradient = stream * hidden + compute * hidden * precision.casts
    in_products = Cost(per_position=stream_gradient + 2 * compute * inner - final_norm)
    in_weight = Cost(per_position=stream_gradient + compute * inner - final_norm, constant=weight)
    in_norm = Cost(per_position=5 * 4 * hidden - stream * hidden)
    in_scores = Cost(per_position=-final_norm, per_pair=10 * model.num_heads * eager)
    recomputed = layer if checkpointing else Cost()
    return BackboneCost(
        saved=saved,
        attention=Cost() if checkpointing else _times(attention, model.num_layers),
        scoring=_scoring(model, precision, eager=eager),
        backward=tuple(_plus(moment, recomputed) for moment in (in_products, in_weight, in_norm, in_scores)),
    )


def _attention(model: ModelFacts, compute: int, *, eager: bool) -> Cost:
    """Queries, keys, values, output; and log-sum-exps, or the probabilities and the keys and values of every head."""
    query, kv = model.query_size, model.kv_size
    if not eager:
        return Cost(per_position=compute * (2 * query + 2 * kv) + 4 * model.num_heads)
    repeated = compute * (2 * query + (query + 2 * query if model.num_heads > model.num_kv_heads else query + 2 * kv))
    probabilities = model.num_heads * (4 + (2 if compute == 2 else 0))
    return Cost(per_position=repeated - compute * query, per_pair=probabilities)


def _rest_of_layer(model: ModelFacts, precision: Precision, *, trained: str) -> Cost:
    stream, compute, hidden, inner = precision.stream, precision.compute, model.hidden_size, model.intermediate_size
    norm = 4 * hidden + 4 + stream * hidden * (trained == "all")
    if model.qk_norm:
        heads = model.num_heads + model.num_kv_heads
        norm_of_heads = (4 + compute * (trained == "all")) * (model.query_size + model.kv_size) + 4 * heads
    else:
        norm_of_heads = 0
    inputs = 5 * compute * hidden if precision.casts else 2 * stream * hidden
    return Cost(per_position=2 * norm + norm_of_heads + inputs + 4 * compute * inner)


def _scoring(model: ModelFacts, precision: Precision, *, eager: bool) -> tuple[Cost, ...]:
    """In the product of a layer, or in the rotation of its queries: the embedding and the layer's input, which the model's
    forward holds on to, the residual stream, the normalised input, and the tensors of the moment."""
    stream, compute, hidden = precision.stream, precision.compute, model.hidden_size
    query, kv = model.query_size, model.kv_size
    outside = 2 * model.head_dim * stream + 3 * stream * hidden
    in_products = Cost(per_position=outside + stream * hidden + 3 * compute * model.intermediate_size)
    in_rotation = Cost(per_position=outside + compute * (query + 2 * kv) + 3 * stream * query)
    in_norm = Cost(per_position=outside + 2 * 4 * hidden)
    in_scores = Cost(per_position=outside + compute * (2 * query + 2 * kv), per_pair=2 * 4 * model.num_heads * eager)
    return in_products, in_rotation, in_norm, in_scores


def _plus(first: Cost, second: Cost) -> Cost:
    return Cost(
        constant=first.constant + second.constant,
        per_position=first.per_position + second.per_position,
        per_pair=first.per_pair + second.per_pair,
    )


def _times(cost: Cost, count: int) -> Cost:
    return Cost(constant=count * cost.constant, per_position=count * cost.per_position, per_pair=count * cost.per_pair)
