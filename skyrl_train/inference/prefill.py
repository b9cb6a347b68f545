"""Prompts to row states and first logits, computing as few token positions as possible.

Each distinct prompt is computed once, what an earlier turn left behind is not computed again, and prompts of similar
length go together, so that little is padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.images import ImageSpans
from skyrl_train.inference.kv_cache import BatchCache, RowState, right_aligned_mask
from skyrl_train.model.lora import adapters_at, runs_of
from skyrl_train.model.vision import shown, shown_prompts

TokenIds = tuple[int, ...]
Prompt = tuple[str, TokenIds]
"""The adapter that computes it, empty for the model's own weights; and its tokens."""
_NO_IMAGES: Mapping[Prompt, ImageSpans] = {}

_LENGTH_RATIO = 1.25
_LENGTH_SLACK = 8
"""Prompts go together while the longest is at most this ratio, or so many tokens, over the shortest."""
MAX_POSITIONS = 16384
"""Token positions of one forward pass, padding included."""


@dataclass(frozen=True)
class Prefilled:
    """One distinct prompt after its forward pass."""

    state: RowState
    logits: Tensor
    """`[vocab]`, of the token after the prompt."""


@dataclass(frozen=True)
class _Work:
    adapter: str
    prompt: TokenIds
    kept: RowState | None
    images: ImageSpans = ()

    @property
    def rest(self) -> TokenIds:
        """Tokens still to compute; at least one."""
        return self.prompt[self.kept.num_tokens :] if self.kept else self.prompt


def prefill(
    model: PreTrainedModel,
    num_layers: int,
    prompts: Sequence[Prompt],
    prefixes: KeptPrefixes,
    pad_token_id: int,
    images: Mapping[Prompt, ImageSpans] = _NO_IMAGES,
) -> dict[Prompt, Prefilled]:
    """Every distinct prompt's state and logits. Prompts with `images` are given by `images.content_ids`."""
    work = [_Work(*prompt, prefixes.longest(prompt), images.get(prompt, ())) for prompt in dict.fromkeys(prompts)]
    work.sort(key=lambda item: len(item.rest))
    done: dict[Prompt, Prefilled] = {}
    for group in _groups(work, gapless=_counts_columns(model)):
        for item, prefilled in zip(group, _prefill_group(model, num_layers, group, pad_token_id)):
            done[item.adapter, item.prompt] = prefilled
    return done


def _counts_columns(model: PreTrainedModel) -> bool:
    """Whether a layer sees a window, which transformers' masks count in columns: padding within a row would be counted."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    return "sliding_attention" in kinds if kinds else bool(getattr(config, "sliding_window", None))


def _groups(work: Sequence[_Work], *, gapless: bool) -> Iterator[list[_Work]]:
    """Runs of similar length; `work` is sorted by it. `gapless`: of the same length where anything is kept, so that no
    padding stands behind what is kept."""
    group: list[_Work] = []
    for item in work:
        if group:
            shortest, length = len(group[0].rest), len(item.rest)
            similar = length <= max(shortest * _LENGTH_RATIO, shortest + _LENGTH_SLACK)
            if gapless and (item.kept or any(each.kept for each in group)):
                similar = length == shortest
            if not similar or (len(group) + 1) * length > MAX_POSITIONS:
                yield _by_adapter(group)
                group = []
        group.append(item)
    if group:
        yield _by_adapter(group)


def _by_adapter(group: Sequence[_Work]) -> list[_Work]:
    return sorted(group, key=lambda item: item.adapter)


def _prefill_group(
    model: PreTrainedModel, num_layers: int, group: Sequence[_Work], pad_token_id: int
) -> list[Prefilled]:
    """Columns of a row: room, what is kept; padding, the rest. Padding and room are masked out."""
    device = model.device
    kept_lengths = torch.tensor([item.kept.num_tokens if item.kept else 0 for item in group], device=device)
    rest_lengths = torch.tensor([len(item.rest) for item in group], device=device)
    kept_width = int(kept_lengths.max())
    rest_width = int(rest_lengths.max())
    input_ids = torch.tensor(
        [[pad_token_id] * (rest_width - len(item.rest)) + list(item.rest) for item in group], device=device
    )
    given = shown_prompts(
        model,
        [(len(item.prompt), item.kept.num_tokens if item.kept else 0, item.images) for item in group],
        width=rest_width,
        device=device,
    )
    if given is not None:
        input_ids = input_ids.where(input_ids >= 0, pad_token_id)
    kept_mask = right_aligned_mask(kept_lengths, kept_width)
    rest_mask = right_aligned_mask(rest_lengths, rest_width)
    mask = torch.cat([kept_mask, rest_mask], dim=1)
    cache = BatchCache(num_layers, reserve=kept_width + rest_width, rows=[item.kept for item in group])
    runs = {rest_width * len(group): runs_of([item.adapter for item in group], [rest_width] * len(group))}
    with shown(model, given), adapters_at(model, runs):
        output = model(
            input_ids=input_ids,
            use_cache=True,
            logits_to_keep=1,
            **cache.arguments(mask, (kept_lengths[:, None] + rest_mask.cumsum(dim=1) - 1).clamp(min=0)),
        )
    return [
        Prefilled(
            cache.read_row(place, mask[place].nonzero()[:, 0], item.kept.prompt if item.kept else None),
            output.logits[place, -1],
        )
        for place, item in enumerate(group)
    ]


@dataclass(frozen=True)
class _Kept:
    state: RowState
    wave: int


class KeptPrefixes:
    """Prompts to row states. The next turn of a conversation comes one wave later, so older ones are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._wave = 0
        self._kept: dict[Prompt, _Kept] = {}
        self._lengths: Counter[int] = Counter()

    def start_wave(self) -> None:
        """Drops what the wave before the last left behind."""
        self._wave += 1
        for prompt in [key for key, kept in self._kept.items() if kept.wave < self._wave - 1]:
            self._drop(prompt)

    def forget(self, adapter: str) -> None:
        """Drops what one adapter has computed."""
        for prompt in [key for key in self._kept if key[0] == adapter]:
            self._drop(prompt)

    def clear(self) -> None:
        """Forget all states, which the weights of before have computed."""
        self._kept.clear()
        self._lengths.clear()
        self._num_bytes = 0

    def keep(self, prompt: Prompt, state: RowState) -> None:
        """Keeps the state of the first tokens of `prompt` (all but the last, which no forward pass has seen).

        Nothing is kept once `max_bytes` are.
        """
        if prompt in self._kept or self._num_bytes + state.num_bytes > self._max_bytes:
            return
        self._kept[prompt] = _Kept(state, self._wave)
        self._lengths[len(prompt[1])] += 1
        self._num_bytes += state.num_bytes

    def longest(self, prompt: Prompt) -> RowState | None:
        """The state of the longest kept sequence that the prompt begins with, computed by the same adapter."""
        adapter, token_ids = prompt
        for length in sorted(self._lengths, reverse=True):
            if length <= len(token_ids):
                kept = self._kept.get((adapter, token_ids[:length]))
                if kept is not None:
                    return kept.state
        return None

    def _drop(self, prompt: Prompt) -> None:
        kept = self._kept.pop(prompt)
        self._num_bytes -= kept.state.num_bytes
        self._lengths[len(prompt[1])] -= 1
        if not self._lengths[len(prompt[1])]:
            del self._lengths[len(prompt[1])]
