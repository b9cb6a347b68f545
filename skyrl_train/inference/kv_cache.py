"""Keys and values of a batch that grows token by token, in room reserved ahead.

`transformers.DynamicCache` copies the whole cache for each new token; here a token is one slice assignment.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

_GROWTH = 1.5


class ReservedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, `[rows, heads, tokens, head_dim]`, with room for more tokens."""

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
        """Keeps the given rows, in that order; a row may be taken several times."""
        keys, values = self._held()
        self._buffers = keys.index_select(0, rows), values.index_select(0, rows)

    def _held(self) -> tuple[Tensor, Tensor]:
        if self._buffers is None:
            raise RuntimeError("the cache is empty")
        return self._buffers


def _with_room(held: Tensor, room: int) -> Tensor:
    """A buffer for `room` tokens that begins with `held`."""
    buffer = held.new_empty((*held.shape[:2], room, held.shape[3]))
    buffer[:, :, : held.shape[2]] = held
    return buffer


def make_cache(model: PreTrainedModel, *, reserve: int) -> Cache:
    """A cache for `model` with room for `reserve` tokens a row."""
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    if set(layer_types) <= {"full_attention", "sliding_attention"}:
        # A sliding layer may keep all its keys: the model's mask lets it see the window only.
        return Cache(layers=[ReservedLayer(reserve) for _ in layer_types])
    return DynamicCache(config=config)


def take_rows(cache: Cache, rows: Tensor) -> None:
    """Keeps the given rows of every layer."""
    for layer in cache.layers:
        if isinstance(layer, ReservedLayer):
            layer.take_rows(rows)
        else:
            layer.reorder_cache(rows)  # type: ignore[arg-type]
