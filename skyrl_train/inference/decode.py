"""Generates a batch of responses with a Hugging Face causal LM: a prefill, then a token per row and step.

Rows are right-aligned, so that every row's newest token stands in the last column. Each row draws its random numbers
from its own seed, so a sample does not depend on the rows beside it (beyond the rounding of matrix products). Samples
of one prompt share its prefill, and the next turn of a conversation starts from what this one computed.

The weights may change between two steps. Then the rows that run are computed again from their first token, or go on with the
keys and values that they have; each answer says which of its tokens are of which version.

A model with other than attention layers generates for prompts of one length at a time, and computes each turn from its first
token (`kv_cache.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.errors import ModelError
from skyrl_train.images import content_ids, position_offset
from skyrl_train.inference.grouped_attention import reads_shared_keys
from skyrl_train.inference.kv_cache import (
    BatchCache,
    OwnCache,
    num_attention_layers,
    require_exact_cache,
    right_aligned_mask,
    start_own_cache,
)
from skyrl_train.inference.prefill import MAX_POSITIONS, KeptPrefixes, Prompt, prefill
from skyrl_train.inference.sampling import SamplingTable, sample_tokens
from skyrl_train.model.lora import adapters_at, runs_of
from skyrl_train.rollout import Listener
from skyrl_train.types import NO_ROUTING, GenerationRequest, StopReason, VersionRun, routing_column

_RESERVED_NEW_TOKENS = 64
"""Room for new tokens in the first key-value reservation; it grows where responses get longer."""
_COMPACT_BELOW = 0.75
"""Finished rows are removed once fewer than this share of the computed rows is still running."""
_MAX_KEPT_BYTES = 512 * 2**20
"""Keys and values kept for the next turns."""


@dataclass(frozen=True, kw_only=True)
class Response:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    weight_versions: tuple[VersionRun, ...]
    """As of `GenerationOutput`."""
    routed_experts: NDArray[np.int16] = field(default_factory=lambda: NO_ROUTING, compare=False)
    """As of `GenerationOutput`, of prompt and response."""


class _Row:
    """One request while it runs."""

    def __init__(self, request: GenerationRequest, listener: Listener | None = None) -> None:
        self.request, self._listener = request, listener
        self._prompt = content_ids(request.prompt_token_ids, request.images) if request.images else None
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.weight_versions: list[VersionRun] = []
        self.routed_experts: list[NDArray[np.int16]] = []
        """As of `Response`, in parts."""
        self.stop_reason: StopReason | None = None
        # A stop string that ends with the newest token lies within so many tokens: a byte has at most one.
        self.stop_window = max((len(string.encode()) for string in request.sampling.stop), default=0) + 1

    def append(self, token_id: int, logprob: float, version: int) -> None:
        if not self.weight_versions or self.weight_versions[-1].version != version:
            self.weight_versions.append(VersionRun(start=len(self.token_ids), version=version))
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if self._listener is not None:
            self._listener((token_id,))
        if len(self.token_ids) >= self.request.sampling.max_generate_length:
            self.stop_reason = StopReason.LENGTH

    @property
    def all_token_ids(self) -> tuple[int, ...]:
        """By which equal beginnings are told; of an image `images.content_ids`."""
        return (*(self._prompt or self.request.prompt_token_ids), *self.token_ids)

    @property
    def as_prompt(self) -> Prompt:
        """All its tokens, and what computes them."""
        return self.request.adapter, self.all_token_ids

    def response(self) -> Response:
        return Response(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            stop_reason=self.stop_reason or StopReason.ABORT,
            weight_versions=tuple(self.weight_versions),
            routed_experts=routing_column(np.concatenate(self.routed_experts or [NO_ROUTING])),
        )


class Decoder:
    """Generates with one model. Not thread-safe."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: frozenset[int],
        pad_token_id: int,
        decode_text: Callable[[Sequence[int]], str],
        keeps_older_cache: bool = False,
    ) -> None:
        """`decode_text` turns tokens to text, with special tokens; used only for requests with stop strings.
        `keeps_older_cache`: where the weights change under running rows, these go on with the keys and values that older
        weights computed, rather than being computed again.

        Raises ModelError for a model with other than attention layers that does not compute the same with its own cache.
        """
        self._model = model
        self._num_layers = num_attention_layers(model)
        if self._num_layers is None:
            require_exact_cache(model)
        self._eos_token_ids = eos_token_ids
        self._pad_token_id = pad_token_id
        self._decode_text = decode_text
        self._keeps_older_cache = keeps_older_cache
        self._shares = reads_shared_keys(model)
        self._prefixes = KeptPrefixes(_MAX_KEPT_BYTES)

    def start_wave(self) -> None:
        """Forgets what the wave before the last computed."""
        self._prefixes.start_wave()

    def forget(self, adapter: str | None = None) -> None:
        """Forgets everything that older weights computed, or what this adapter did."""
        if adapter is None:
            self._prefixes.clear()
        else:
            self._prefixes.forget(adapter)

    @torch.inference_mode()
    def run(
        self,
        requests: Sequence[GenerationRequest],
        *,
        wanted: Callable[[], bool] = lambda: True,
        version: Callable[[], int] = lambda: 0,
        listeners: Sequence[Listener | None] = (),
    ) -> list[Response]:
        """Responses in the order of the requests, of which those of one adapter lie together.

        `wanted` is asked now and then; once it says no, what there is so far is returned with stop reason `abort`.
        `version` is asked before each step, and gives the version of the weights that the model has for it: where it is
        another than before, `forget` has been called. `listeners`, one for each request, are told tokens as they are
        sampled.
        """
        batches = [list(range(len(requests)))] if self._num_layers is not None else _alike(requests)
        found: dict[int, Response] = {}
        for places in batches:
            rows = [_Row(requests[place], listeners[place] if listeners else None) for place in places]
            found |= zip(places, self._run_batch(rows, wanted, version))
        return [found[place] for place in range(len(requests))]

    def _run_batch(
        self, rows: Sequence[_Row], wanted: Callable[[], bool], version: Callable[[], int]
    ) -> list[Response]:
        current = version()
        state = _DecodeState([row.request for row in rows], self._compute(rows))
        while True:
            tokens, logprobs = state.sample()
            for index, token_id, logprob in zip(state.row_of, tokens.tolist(), logprobs.tolist()):
                if rows[index].stop_reason is None:
                    self._append(rows[index], token_id, logprob, current)
            running = [place for place, index in enumerate(state.row_of) if rows[index].stop_reason is None]
            if not running or not wanted():
                self._keep(rows, state, range(len(state.row_of)))
                return [row.response() for row in rows]
            before, current = current, version()
            if current != before and not self._keeps_older_cache:
                state.is_of_one_version = False
                self._keep(rows, state, range(len(state.row_of)))
                state.take(running)
                state.begin(self._compute([rows[index] for index in state.row_of]))
                continue
            # What several versions computed must not be found by a prompt that goes on from it.
            state.is_of_one_version &= current == before
            if len(running) < _COMPACT_BELOW * len(state.row_of):
                self._keep(rows, state, sorted(set(range(len(state.row_of))) - set(running)))
                state.take(running)
                tokens = tokens[running]
            state.forward(self._model, tokens)

    def _compute(self, rows: Sequence[_Row]) -> _Computed:
        """What the model has after all tokens of the rows, which are equally many where it has a cache of its own."""
        prompts = [row.as_prompt for row in rows]
        sequences = [token_ids for _, token_ids in prompts]
        new_tokens = max(row.request.sampling.max_generate_length - len(row.token_ids) for row in rows)
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=self._model.device)
        if self._num_layers is None:
            place_of = {sequence: place for place, sequence in enumerate(dict.fromkeys(sequences))}
            if any(row.request.images for row in rows):
                raise ModelError("generator=hf reads images with models of attention layers alone")
            runs = {len(place_of) * len(sequences[0]): runs_of([prompts[0][0]], [len(place_of) * len(sequences[0])])}
            with adapters_at(self._model, runs):
                own, logits = start_own_cache(self._model, torch.tensor(list(place_of), device=self._model.device))
            places = torch.tensor([place_of[sequence] for sequence in sequences], device=self._model.device)
            own.take_rows(places)
            mask = right_aligned_mask(lengths, int(lengths.max()))
            return _Computed(cache=own, logits=logits[places], mask=mask, positions=lengths)
        images = {prompt: row.request.images for prompt, row in zip(prompts, rows) if row.request.images}
        prefilled = prefill(self._model, self._num_layers, prompts, self._prefixes, self._pad_token_id, images)
        further = [position_offset(row.request.images) for row in rows]
        cache = BatchCache(
            self._num_layers,
            reserve=max(map(len, sequences)) + min(new_tokens, _RESERVED_NEW_TOKENS),
            rows=[prefilled[prompt].state for prompt in prompts],
            shares=self._shares,
        )
        return _Computed(
            cache=cache,
            logits=torch.stack([prefilled[prompt].logits for prompt in prompts]),
            mask=cache.mask(lengths),
            positions=lengths + torch.tensor(further, device=lengths.device) if images else lengths,
        )

    def _append(self, row: _Row, token_id: int, logprob: float, version: int) -> None:
        row.append(token_id, logprob, version)
        stop = row.request.sampling.stop
        is_eos = token_id in self._eos_token_ids and not row.request.ignores_eos
        if is_eos or token_id in row.request.stop_token_ids:
            row.stop_reason = StopReason.STOP
        elif stop:
            recent = self._decode_text(row.token_ids[-row.stop_window :])
            if any(string in recent for string in stop):
                row.stop_reason = StopReason.STOP

    def _keep(self, rows: Sequence[_Row], state: _DecodeState, places: Iterable[int]) -> None:
        """Keeps what finished rows computed, for prompts that continue them, and notes where the tokens of all were sent."""
        if not isinstance(state.cache, BatchCache):
            return
        for place in places:
            row = rows[state.row_of[place]]
            token_ids = row.all_token_ids
            columns = state.mask[place].nonzero()[: len(token_ids) - 1, 0]
            if row.stop_reason is not None and state.is_of_one_version:
                self._prefixes.keep(row.as_prompt, state.cache.read_row(place, columns))
            routed = state.cache.routed(place, columns)
            if routed is not None:
                # Those that were computed again have been sent, when they were sampled, where is noted.
                row.routed_experts.append(routed[sum(map(len, row.routed_experts)) :].cpu().numpy())


@dataclass(frozen=True, kw_only=True)
class _Computed:
    """What a model has of the tokens of some rows."""

    cache: BatchCache | OwnCache
    logits: Tensor
    """`[rows, vocab]`, of the next tokens."""
    mask: Tensor
    """bool `[rows, columns]`: where the tokens of each row lie."""
    positions: Tensor
    """int64 `[rows]`, of the next tokens."""


class _DecodeState:
    """What one step needs; `row_of[place]` is the request that a computed row belongs to."""

    def __init__(self, requests: Sequence[GenerationRequest], computed: _Computed) -> None:
        """`computed` is of the prompts of the requests."""
        new_tokens = max(request.sampling.max_generate_length for request in requests)
        device = computed.logits.device
        self.row_of = list(range(len(requests)))
        self._adapters = [request.adapter for request in requests]
        self._runs = runs_of(self._adapters, [1] * len(requests))
        self._uniforms = _uniforms(requests, new_tokens, device)
        self._table = SamplingTable.of(
            [request.sampling for request in requests], vocab_size=computed.logits.shape[-1], device=device
        )
        self._step = 0
        self.begin(computed)

    def begin(self, computed: _Computed) -> None:
        """Goes on from what is computed of the same rows, in order."""
        self.cache = computed.cache
        self.is_of_one_version = True
        """Whether the weights that computed the keys and values, all of them, are those of one version."""
        self.mask = computed.mask
        self._logits = computed.logits
        self._positions = computed.positions

    def sample(self) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities, one per computed row."""
        result = sample_tokens(self._logits, self._uniforms[:, self._step], self._table)
        self._step += 1
        return result

    def take(self, places: list[int]) -> None:
        """Removes all rows but these."""
        rows = torch.tensor(places, device=self._logits.device)
        self.row_of = [self.row_of[place] for place in places]
        self._runs = runs_of([self._adapters[row] for row in self.row_of], [1] * len(places))
        self.cache.take_rows(rows)
        self.mask = self.mask[rows]
        self._positions = self._positions[rows]
        self._uniforms = self._uniforms[rows]
        self._table = self._table.take(rows)

    def forward(self, model: PreTrainedModel, tokens: Tensor) -> None:
        """Logits after one more token per row."""
        self.mask = torch.cat([self.mask, self.mask.new_ones((len(self.row_of), 1))], dim=1)
        with adapters_at(model, {len(self.row_of): self._runs}):
            output = model(
                input_ids=tokens[:, None],
                use_cache=True,
                **self.cache.arguments(self.mask, self._positions[:, None]),
            )
        self._logits = output.logits[:, -1]
        self._positions = self._positions + 1


def _alike(requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """Places of the requests, those with prompts of one length and of one adapter together, as many as one forward may
    hold."""
    found: dict[tuple[int, str], list[int]] = {}
    for place, request in enumerate(requests):
        found.setdefault((len(request.prompt_token_ids), request.adapter), []).append(place)
    return [
        places[start : start + most]
        for (length, _), places in found.items()
        for most in [max(1, MAX_POSITIONS // length)]
        for start in range(0, len(places), most)
    ]


def _uniforms(requests: Sequence[GenerationRequest], count: int, device: torch.device) -> Tensor:
    """float64 [requests, count] in [0, 1), row i from the seed of request i alone."""
    generator = torch.Generator()
    rows = [
        torch.rand(count, generator=generator.manual_seed(request.seed), dtype=torch.float64) for request in requests
    ]
    return torch.stack(rows).to(device)
