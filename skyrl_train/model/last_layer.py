"""The last decoder layer, computed for the positions that are read.

What follows the last layer's attention is read before the tokens that carry loss, and nowhere else; keys and values are
needed of every position. Its query and output projections and its feed-forward block work on each position by itself,
so that they take the positions that are read, and give 0 for the others; so does attention over segments on a CPU. What
the layer adds up for the others is never read and no gradient comes from there: nothing changes but what it costs.

In a conversation of several turns most positions are prompt or observation. A model of few layers gains most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.layouts import Layout, find_scored
from skyrl_train.model.layers.attention import READ
from skyrl_train.model.lora.adapter import KeyedDropout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION = "self_attn"
_BY_POSITION = ("self_attn.q_proj", "self_attn.o_proj", "mlp")
"""Blocks of a layer that compute each position by itself."""
_WORTH_IT = 0.6
"""Where a larger share of the positions is read, picking them costs more time and memory than it saves."""


class ReadPositions:
    """int64 `[read]`: positions of the running forward; None for all."""

    value: Tensor | None = None


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model of images and text that computes tokens; any other model itself."""
    part: PreTrainedModel = getattr(getattr(model, "base_model", model), "language_model", model)
    return part


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers that the model's family declares indivisible; sharded ones are of a class derived from theirs. Those of a
    vision tower are none: not every forward goes through them."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    parts = language_model(model).modules()
    return [module for module in parts if any(kind.__name__ in names for kind in type(module).__mro__)]


def narrow_last_layer(model: PreTrainedModel) -> None:
    """Has `reading` take effect on `model`, whose adapter is there and whose layers are not sharded yet. Idempotent.

    Leaves out a layer that is compiled, which would be traced for each set of positions, and blocks of other than linear
    layers.
    """
    layers = decoder_layers(model)
    if not layers or hasattr(model, READ) or layers[-1]._compiled_call_impl is not None:
        return
    read = ReadPositions()
    setattr(model, READ, read)
    parts = dict(layers[-1].named_modules())
    if _ATTENTION in parts:
        setattr(parts[_ATTENTION], READ, read)
    for name in _BY_POSITION:
        if name in parts and _is_linear(parts[name]):
            _narrow(parts[name], read)


@contextmanager
def reading(model: PreTrainedModel, rows: TrainingInputBatch, layout: Layout) -> Iterator[None]:
    """Forwards and backwards inside may compute the last layer only where tokens that `loss_mask` marks are predicted
    from it. Raises BatchError for a row whose first token is marked."""
    read: ReadPositions | None = getattr(model, READ, None)
    if read is None:
        yield
        return
    positions = (layout.scored or find_scored(rows, layout)).read
    if len(positions) <= _WORTH_IT * layout.num_positions:
        read.value = positions
    try:
        yield
    finally:
        read.value = None


def _is_linear(module: nn.Module) -> bool:
    """All parameters are of linear layers, there is no list of experts, and nothing drops features by the position of a
    forward that has them all."""
    parts = list(module.modules())
    own = [part for part in parts if any(True for _ in part.parameters(recurse=False))]
    if any(isinstance(part, (KeyedDropout, nn.ModuleList)) for part in parts):
        return False
    return bool(own) and all(isinstance(part, nn.Linear) for part in own)


def _narrow(module: nn.Module, read: ReadPositions) -> None:
    compute: Callable[..., Tensor] = module.forward

    def forward(inputs: Tensor, *others: Any, **named: Any) -> Tensor:
        # a block that is given more than the positions, as Bloom's is the residual, computes them all
        if read.value is None or others or named:
            return compute(inputs, *others, **named)
        flat = inputs.flatten(0, 1)
        found = compute(flat.index_select(0, read.value).unsqueeze(0)).squeeze(0)
        whole = found.new_zeros(len(flat), found.shape[-1]).index_copy(0, read.value, found)
        return whole.view(*inputs.shape[:2], -1)

    module.forward = forward
