"""What a batch that grows token by token remembers of its tokens.

Of models that have attention layers alone: keys and values, in room reserved ahead. `transformers.DynamicCache` copies the
whole cache for each new token; here a token is one slice assignment. Rows can be read out and put together into another
batch, so that a later turn of a conversation does not compute its earlier tokens again.

Of any other model (state-space, linear attention, convolution): the cache that it makes for itself. Such a layer carries a
state over every position that it is given, padding too, so that the rows of a batch have equally many tokens and none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from skyrl_train.errors import ModelError

_GROWTH = 1.5
_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class RowState:
    """Keys and values of one row's tokens; per layer `[heads, tokens, head_dim]` each."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    """Where experts are recorded, behind these one more pair: int16 `[layers, tokens, k]`, and nothing."""

    @property
    def num_tokens(self) -> int:
        return int(self.layers[0][0].shape[1])

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for layer in self.layers for tensor in layer)


class ReservedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, `[rows, heads, tokens, head_dim]`, with room for more tokens.

    Keeps all tokens of a sliding-window layer too: the model's mask lets it see the window only.
    """

    is_sliding = False

    def __init__(self, reserve: int) -> None:
        """`reserve`: tokens to make room for at first."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._reserve = reserve
        self._length = 0
        self._buffers: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        room = max(self._reserve, key_states.shape[2])
        self._buffers = _with_room(key_states[:, :, :0], room), _with_room(value_states[:, :, :0], room)
        self.is_initialized = True

    def fill(self, rows: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        """Starts with the given rows' tokens, right-aligned; None is a row without any (at least one has some)."""
        lengths = [0 if row is None else row[0].shape[1] for row in rows]
        width = max(lengths)
        example = next(row for row in rows if row is not None)
        room = max(self._reserve, width)
        keys, values = (part.new_empty((len(rows), part.shape[0], room, part.shape[2])) for part in example)
        for buffer in (keys, values):
            # Masked columns weigh nothing, but nothing times NaN is NaN.
            buffer[:, :, :width].zero_()
        self._buffers = keys, values
        for place, (row, length) in enumerate(zip(rows, lengths)):
            if row is not None:
                for buffer, part in zip(self._buffers, row):
                    buffer[place, :, width - length : width] = part
        self._length = width
        self.is_initialized = True

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Appends; returns views of everything so far."""
        if self._buffers is None:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._held()
        end = self._length + key_states.shape[2]
        if end > keys.shape[2]:
            keys, values = (_with_room(held[:, :, : self._length], int(end * _GROWTH)) for held in (keys, values))
            self._buffers = keys, values
        keys[:, :, self._length : end] = key_states
        values[:, :, self._length : end] = value_states
        self._length = end
        return keys[:, :, :end], values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1

    def take_rows(self, rows: Tensor) -> None:
        """Keeps the given rows, in that order."""
        keys, values = self._held()
        self._buffers = keys.index_select(0, rows), values.index_select(0, rows)

    def read_row(self, place: int, columns: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of one row's tokens in the given columns."""
        keys, values = self._held()
        return keys[place].index_select(1, columns), values[place].index_select(1, columns)

    def _held(self) -> tuple[Tensor, Tensor]:
        if self._buffers is None:
            raise RuntimeError("the cache is empty")
        return self._buffers


class _NotedCache(Cache):
    """What a model is given, and may note in where it sent its tokens."""

    routed: ReservedLayer


class BatchCache:
    """The cache of one batch, all layers."""

    def __init__(self, num_layers: int, *, reserve: int, rows: Sequence[RowState | None] = ()) -> None:
        """
        Args:
            reserve: Tokens to make room for, those of `rows` included.
            rows: What each row starts with, right-aligned; empty where no row starts with anything.
        """
        self._all = [ReservedLayer(reserve) for _ in range(num_layers + 1)]
        """The last has what `expert_routing.record_routing` notes; empty where nothing is recorded."""
        given = [row for row in rows if row is not None]
        for index in range(len(given[0].layers) if given else 0):
            self._all[index].fill([None if row is None else row.layers[index] for row in rows])
        self._for_model = _NotedCache(layers=list(self._all[:num_layers]))
        self._for_model.routed = self._all[num_layers]

    def arguments(self, mask: Tensor, positions: Tensor) -> dict[str, Any]:
        """What the model takes beside new tokens. `mask` bool `[rows, tokens]`, the new ones included; `positions` are
        theirs."""
        return {"attention_mask": mask, "position_ids": positions, "past_key_values": self._for_model}

    def take_rows(self, rows: Tensor) -> None:
        for layer in self._layers:
            layer.take_rows(rows)

    def read_row(self, place: int, columns: Tensor) -> RowState:
        return RowState(tuple(layer.read_row(place, columns) for layer in self._layers))

    def routed(self, place: int, columns: Tensor) -> Tensor | None:
        """int16 `[tokens, layers, k]`: experts of one row's tokens in the given columns, where they are recorded."""
        layer = self._all[-1]
        return layer.read_row(place, columns)[0].transpose(0, 1) if layer.is_initialized else None

    @property
    def _layers(self) -> list[ReservedLayer]:
        return [layer for layer in self._all if layer.is_initialized]


class OwnCache:
    """The cache of one batch as a model made it for itself. Its rows have equally many tokens."""

    def __init__(self, name: str, cache: Any) -> None:
        """`name` is the argument as which the model takes it."""
        self._name, self._cache = name, cache

    def arguments(self, mask: Tensor, positions: Tensor) -> dict[str, Any]:  # noqa: ARG002
        """What the model takes beside new tokens: no mask, as no row has padding. Positions are said, since some families
        (Bamba) do not find them in their cache."""
        return {"position_ids": positions, self._name: self._cache}

    def take_rows(self, rows: Tensor) -> None:
        """Keeps the given rows, in that order; a row may be asked for several times."""
        self._cache.reorder_cache(rows)


def start_own_cache(model: PreTrainedModel, input_ids: Tensor) -> tuple[OwnCache, Tensor]:
    """The cache after a forward over `input_ids` `[rows, tokens]`, and the logits `[rows, vocab]` of the next tokens."""
    output = model(input_ids=input_ids, use_cache=True, logits_to_keep=1)
    name = next((name for name in _OWN_CACHES if getattr(output, name, None) is not None), "")
    if not name:
        raise ModelError("it gives no cache back")
    return OwnCache(name, getattr(output, name)), output.logits[:, -1]


_OWN_CACHES = ("past_key_values", "cache_params")
"""What models call their cache, in arguments and outputs."""


@torch.inference_mode()
def require_exact_cache(model: PreTrainedModel) -> None:
    """Raises ModelError for a model whose own cache, used as `Decoder` does, gives other logits than no cache."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    rows = torch.arange(3, 19, device=model.device).remainder(vocabulary).view(2, 8)
    order = torch.tensor([1, 0, 1], device=model.device)
    tokens = rows[order]
    try:
        cache, _ = start_own_cache(model, rows[:, :4])
        cache.take_rows(order)
        for column in range(4, 8):
            mask, positions = tokens[:, : column + 1] >= 0, tokens.new_full((3, 1), column)
            arguments = cache.arguments(mask, positions)
            found = model(input_ids=tokens[:, column : column + 1], use_cache=True, **arguments).logits[:, -1].float()
        expected = model(input_ids=tokens, use_cache=False).logits[:, -1].float()
        difference = float((found - expected).abs().max() / expected.abs().max())
        reason = f"its logits are {difference:.2g} of their size off"
    except Exception as error:
        difference, reason = math.inf, f"{type(error).__name__}: {error}"
    if not difference <= (_TOLERANCE if model.dtype == torch.float32 else _HALF_TOLERANCE):
        raise ModelError(
            f"generator=hf cannot generate with a {model.config.model_type} model token by token ({reason}). "
            "Use generator=vllm"
        )


_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.1
"""Rounding of logits relative to the largest, in float32 and in half precision."""


def num_attention_layers(model: PreTrainedModel) -> int | None:
    """Layers of a model whose state is keys and values only; None for any other."""
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    if getattr(model, "_is_stateful", False) or set(layer_types) - _SUPPORTED_LAYERS:
        return None
    return len(layer_types)


def _with_room(held: Tensor, room: int) -> Tensor:
    """A buffer for `room` tokens that begins with `held`."""
    buffer = held.new_empty((*held.shape[:2], room, held.shape[3]))
    buffer[:, :, : held.shape[2]] = held
    return buffer


@dataclass(frozen=True)
class _Kept:
    state: RowState
    wave: int


class KeptPrefixes:
    """Token ids to row states. The next turn of a conversation comes one wave later, so older ones are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._wave = 0
        self._kept: dict[tuple[int, ...], _Kept] = {}
        self._lengths: Counter[int] = Counter()

    def start_wave(self) -> None:
        """Drops what the wave before the last left behind."""
        self._wave += 1
        for token_ids in [key for key, kept in self._kept.items() if kept.wave < self._wave - 1]:
            self._drop(token_ids)

    def clear(self) -> None:
        """After the weights changed."""
        self._kept.clear()
        self._lengths.clear()
        self._num_bytes = 0

    def keep(self, token_ids: tuple[int, ...], state: RowState) -> None:
        """Keeps the state of the first tokens of `token_ids` (all but the last, which no forward pass has seen).

        Nothing is kept once `max_bytes` are.
        """
        if token_ids in self._kept or self._num_bytes + state.num_bytes > self._max_bytes:
            return
        self._kept[token_ids] = _Kept(state, self._wave)
        self._lengths[len(token_ids)] += 1
        self._num_bytes += state.num_bytes

    def longest(self, prompt_token_ids: tuple[int, ...]) -> RowState | None:
        """The state of the longest kept sequence that the prompt begins with."""
        for length in sorted(self._lengths, reverse=True):
            if length <= len(prompt_token_ids):
                kept = self._kept.get(prompt_token_ids[:length])
                if kept is not None:
                    return kept.state
        return None

    def _drop(self, token_ids: tuple[int, ...]) -> None:
        kept = self._kept.pop(token_ids)
        self._num_bytes -= kept.state.num_bytes
        self._lengths[len(token_ids)] -= 1
        if not self._lengths[len(token_ids)]:
            del self._lengths[len(token_ids)]
