"""Keys and values of a batch that grows token by token, in room reserved ahead, and of single rows.

`transformers.DynamicCache` copies the whole cache for each new token; here a token is one slice assignment. Rows can be
read out and put together into another batch, so that a later turn of a conversation does not compute its earlier tokens
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


class BatchCache:
    """The cache of one batch, all layers."""

    def __init__(self, num_layers: int, *, reserve: int, rows: Sequence[RowState | None] = ()) -> None:
        """
        Args:
            reserve: Tokens to make room for, those of `rows` included.
            rows: What each row starts with, right-aligned; empty where no row starts with anything.
        """
        self._layers = [ReservedLayer(reserve) for _ in range(num_layers)]
        if any(row is not None for row in rows):
            for index, layer in enumerate(self._layers):
                layer.fill([None if row is None else row.layers[index] for row in rows])
        self.for_model = Cache(layers=list(self._layers))
        """What the model takes as `past_key_values`."""

    def take_rows(self, rows: Tensor) -> None:
        for layer in self._layers:
            layer.take_rows(rows)

    def read_row(self, place: int, columns: Tensor) -> RowState:
        return RowState(tuple(layer.read_row(place, columns) for layer in self._layers))


def num_attention_layers(model: PreTrainedModel) -> int:
    """Layers of a model whose state is keys and values only. Raises ModelError for any other."""
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    others = set(layer_types) - _SUPPORTED_LAYERS
    if others:
        raise ModelError(
            f"generator=hf keeps keys and values only, and a {config.model_type} model has layers of type "
            f"{', '.join(sorted(others))}. Use generator=vllm."
        )
    return len(layer_types)


def _with_room(held: Tensor, room: int) -> Tensor:
    """A buffer for `room` tokens that begins with `held`."""
    buffer = held.new_empty((*held.shape[:2], room, held.shape[3]))
    buffer[:, :, : held.shape[2]] = held
    return buffer
