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
from dataclasses import dataclass, replace
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
    prompt: RowState | None = None
    """What the row begins with, before `layers`: of a prompt that several samples have in common, once for all of them."""

    @property
    def num_tokens(self) -> int:
        return int(self.layers[0][0].shape[1]) + self.num_prompt_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt.num_tokens if self.prompt else 0

    @property
    def num_bytes(self) -> int:
        own = sum(tensor.numel() * tensor.element_size() for layer in self.layers for tensor in layer)
        return own + (self.prompt.num_bytes if self.prompt else 0)

    @property
    def root(self) -> RowState:
        """What other rows may have in common with this one."""
        return self.prompt or self

    def whole(self, layer: int) -> tuple[Tensor, ...]:
        """The keys and values of all tokens in one layer."""
        if self.prompt is None:
            return self.layers[layer]
        return tuple(torch.cat(parts, dim=1) for parts in zip(self.prompt.layers[layer], self.layers[layer]))


@dataclass(frozen=True)
class SharedKeys:
    """One layer's keys and values of prompts, each read by all rows that go on from it (`grouped_attention.py`)."""

    keys: Tensor
    values: Tensor
    """`[prompts, key heads, tokens, size]`, right-aligned."""
    slots: Tensor
    """int64 `[rows]`: a row's place among `most` rows of each prompt."""
    most: int

    def spread(self, of_rows: Tensor) -> Tensor:
        """`[rows, key heads, queries, n]` to `[prompts, key heads, most x queries, n]`, zeros where there is no row."""
        prompts, (_, heads, queries, size) = self.keys.shape[0], of_rows.shape
        full = of_rows.new_zeros((prompts * self.most, heads, queries, size)).index_copy_(0, self.slots, of_rows)
        of_prompts = full.view(prompts, self.most, heads, queries, size).transpose(1, 2)
        return of_prompts.reshape(prompts, heads, self.most * queries, size)

    def collect(self, of_prompts: Tensor, queries: int) -> Tensor:
        """Undo `spread`: return `[rows, heads, queries, head_dim]` of values that are laid out by prompt."""
        prompts, heads, _, size = of_prompts.shape
        full = of_prompts.view(prompts, heads, self.most, queries, size).transpose(1, 2)
        return full.reshape(prompts * self.most, heads, queries, size).index_select(0, self.slots)


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
        self._shared: SharedKeys | None = None

    @property
    def shared_length(self) -> int:
        """Columns before those of a row's own."""
        return self._shared.keys.shape[2] if self._shared else 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        room = max(self._reserve, key_states.shape[2])
        self._buffers = _with_room(key_states[:, :, :0], room), _with_room(value_states[:, :, :0], room)
        self.is_initialized = True

    def fill(self, rows: Sequence[tuple[Tensor, ...] | None], shared: SharedKeys | None = None) -> None:
        """Starts with the given rows' tokens, right-aligned; None is a row without any (at least one has some). What is
        `shared` comes before them."""
        self._shared = shared
        room = max(self._reserve - self.shared_length, *(0 if row is None else row[0].shape[1] for row in rows))
        keys, values = (_right_aligned([None if row is None else row[part] for row in rows], room) for part in (0, 1))
        self._buffers = keys[0], values[0]
        self._length = self.shared_length + keys[1]
        self.is_initialized = True

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Appends; returns views of everything so far, of what is not shared: that the keys have as `shared`."""
        if self._buffers is None:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._held()
        begin = self._length - self.shared_length
        end = begin + key_states.shape[2]
        if end > keys.shape[2]:
            keys, values = (_with_room(held[:, :, :begin], int(end * _GROWTH)) for held in (keys, values))
            self._buffers = keys, values
        keys[:, :, begin:end] = key_states
        values[:, :, begin:end] = value_states
        self._length = self.shared_length + end
        own = keys[:, :, :end]
        if self._shared is not None:
            own.shared = self._shared  # type: ignore[attr-defined]
        return own, values[:, :, :end]

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
        if self._shared is not None:
            self._shared = replace(self._shared, slots=self._shared.slots[rows])

    def read_row(self, place: int, columns: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of one row's tokens in the given columns, which are counted from what is not shared."""
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

    def __init__(
        self, num_layers: int, *, reserve: int, rows: Sequence[RowState | None] = (), shares: bool = False
    ) -> None:
        """
        Args:
            reserve: Tokens to make room for, those of `rows` included.
            rows: What each row starts with, right-aligned; empty where no row starts with anything.
            shares: Rows with the same root read it together, where there are at least two for each: the mask's columns
                are those of the roots, and then those of the rest, both right-aligned.
        """
        self._all = [ReservedLayer(reserve) for _ in range(num_layers + 1)]
        """The last has what `expert_routing.record_routing` notes; empty where nothing is recorded."""
        given = [row for row in rows if row is not None]
        roots = list({id(row.root): row.root for row in given}.values())
        # where experts are recorded, rows stand by themselves
        self._roots = roots if shares and 2 * len(roots) <= len(rows) and len(given[0].layers) == num_layers else []
        self._root_of = [_index_of(row.root, self._roots) for row in given] if self._roots else []
        for index in range(len(given[0].layers) if given else 0):
            if self._roots:
                self._fill_shared(index, given)
            else:
                self._all[index].fill([None if row is None else row.whole(index) for row in rows])
        self._for_model = _NotedCache(layers=list(self._all[:num_layers]))
        self._for_model.routed = self._all[num_layers]

    def mask(self, lengths: Tensor) -> Tensor:
        """bool `[rows, columns]`: where the tokens lie of rows that have so many."""
        if not self._roots:
            return right_aligned_mask(lengths, int(lengths.max()))
        first = lengths.new_tensor([self._roots[index].num_tokens for index in self._root_of])
        parts = [right_aligned_mask(part, int(part.max())) for part in (first, lengths - first)]
        return torch.cat(parts, dim=1)

    def arguments(self, mask: Tensor, positions: Tensor) -> dict[str, Any]:
        """What the model takes beside new tokens. `mask` bool `[rows, tokens]`, the new ones included; `positions` are
        theirs."""
        return {"attention_mask": mask, "position_ids": positions, "past_key_values": self._for_model}

    def take_rows(self, rows: Tensor) -> None:
        for layer in self._layers:
            layer.take_rows(rows)
        if self._roots:
            self._root_of = [self._root_of[row] for row in rows.tolist()]

    def read_row(self, place: int, columns: Tensor, prompt: RowState | None = None) -> RowState:
        """A copy of one row's tokens in the given columns; not of `prompt`, which it begins with."""
        if self._roots:
            prompt = self._roots[self._root_of[place]]
            shared = self._layers[0].shared_length
            columns = columns[prompt.num_tokens :] - shared
        elif prompt is not None:
            columns = columns[prompt.num_tokens :]
        return RowState(tuple(layer.read_row(place, columns) for layer in self._layers), prompt)

    def _fill_shared(self, index: int, rows: Sequence[RowState]) -> None:
        """Start a layer from the rows, with their roots beside them."""
        count: Counter[int] = Counter()
        ranks = []
        for root in self._root_of:
            ranks.append(count[root])
            count[root] += 1
        most = max(count.values())
        keys, values = (_right_aligned([root.layers[index][part] for root in self._roots]) for part in (0, 1))
        slots = torch.tensor([root * most + rank for root, rank in zip(self._root_of, ranks)], device=keys[0].device)
        shared = SharedKeys(keys=keys[0], values=values[0], slots=slots, most=most)
        none = tuple(part[:, :0] for part in rows[0].root.layers[index])
        self._all[index].fill([row.layers[index] if row.prompt else none for row in rows], shared)

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


def right_aligned_mask(lengths: Tensor, width: int) -> Tensor:
    """bool `[rows, width]`, True in the last `lengths[row]` columns."""
    return torch.arange(width, device=lengths.device) >= (width - lengths)[:, None]


def _right_aligned(parts: Sequence[Tensor | None], room: int = 0) -> tuple[Tensor, int]:
    """`[heads, tokens, size]` each into one buffer `[parts, heads, room, size]`, and the width that they take of it."""
    width = max(0 if part is None else part.shape[1] for part in parts)
    example = next(part for part in parts if part is not None)
    buffer = example.new_empty((len(parts), example.shape[0], max(room, width), example.shape[2]))
    begin = 0
    while begin < len(parts):
        part, end = parts[begin], begin + 1
        while end < len(parts) and parts[end] is part:
            end += 1
        first = width - (0 if part is None else part.shape[1])
        # Masked columns weigh nothing, but nothing times NaN is NaN.
        buffer[begin:end, :, :first] = 0
        if part is not None:
            buffer[begin:end, :, first:width] = part
        begin = end
    return buffer, width


def _index_of(root: RowState, roots: Sequence[RowState]) -> int:
    return next(index for index, each in enumerate(roots) if each is root)


def _with_room(held: Tensor, room: int) -> Tensor:
    """A buffer for `room` tokens that begins with `held`."""
    buffer = held.new_empty((*held.shape[:2], room, held.shape[3]))
    buffer[:, :, : held.shape[2]] = held
    return buffer
