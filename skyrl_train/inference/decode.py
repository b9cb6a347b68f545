"""Generates a batch of responses with a Hugging Face causal LM: a prefill, then a token per row and step.

Rows are right-aligned, so that every row's newest token stands in the last column. Each row draws its random numbers
from its own seed, so a sample does not depend on the rows beside it (beyond the rounding of matrix products). Samples
of one prompt share its prefill, and the next turn of a conversation starts from what this one computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.inference.kv_cache import BatchCache, RowState, num_attention_layers
from skyrl_train.inference.prefill import prefill, right_aligned_mask
from skyrl_train.inference.prefixes import KeptPrefixes
from skyrl_train.inference.sampling import SamplingTable, sample_tokens
from skyrl_train.types import GenerationRequest, StopReason

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


class _Row:
    """One request while it runs."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.stop_reason: StopReason | None = None
        # A stop string that ends with the newest token lies within so many tokens: a byte has at most one.
        self.stop_window = max((len(string.encode()) for string in request.sampling.stop), default=0) + 1

    def append(self, token_id: int, logprob: float) -> None:
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if len(self.token_ids) >= self.request.sampling.max_generate_length:
            self.stop_reason = StopReason.LENGTH

    @property
    def all_token_ids(self) -> tuple[int, ...]:
        return (*self.request.prompt_token_ids, *self.token_ids)

    def response(self) -> Response:
        return Response(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            stop_reason=self.stop_reason or StopReason.ABORT,
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
    ) -> None:
        """`decode_text` turns tokens to text, with special tokens; used only for requests with stop strings.

        Raises ModelError for a model with other than attention layers.
        """
        self._model = model
        self._num_layers = num_attention_layers(model)
        self._eos_token_ids = eos_token_ids
        self._pad_token_id = pad_token_id
        self._decode_text = decode_text
        self._prefixes = KeptPrefixes(_MAX_KEPT_BYTES)

    def start_wave(self) -> None:
        """Forgets what the wave before the last computed."""
        self._prefixes.start_wave()

    def forget(self) -> None:
        """Forgets everything that older weights computed."""
        self._prefixes.clear()

    @torch.inference_mode()
    def run(
        self, requests: Sequence[GenerationRequest], *, wanted: Callable[[], bool] = lambda: True
    ) -> list[Response]:
        """Responses in the order of the requests.

        `wanted` is asked now and then; once it says no, what there is so far is returned with stop reason `abort`.
        """
        rows = [_Row(request) for request in requests]
        state = self._start(requests)
        while True:
            tokens, logprobs = state.sample()
            for index, token_id, logprob in zip(state.row_of, tokens.tolist(), logprobs.tolist()):
                if rows[index].stop_reason is None:
                    self._append(rows[index], token_id, logprob)
            running = [place for place, index in enumerate(state.row_of) if rows[index].stop_reason is None]
            if not running or not wanted():
                self._keep(rows, state, range(len(state.row_of)))
                return [row.response() for row in rows]
            if len(running) < _COMPACT_BELOW * len(state.row_of):
                self._keep(rows, state, sorted(set(range(len(state.row_of))) - set(running)))
                state.take(running)
                tokens = tokens[running]
            state.forward(self._model, tokens)

    def _start(self, requests: Sequence[GenerationRequest]) -> _DecodeState:
        """The state after the prompts."""
        device = self._model.device
        prompts = [request.prompt_token_ids for request in requests]
        prefilled = prefill(self._model, self._num_layers, prompts, self._prefixes, self._pad_token_id)
        logits = torch.stack([prefilled[prompt].logits for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        width = max(map(len, prompts))
        new_tokens = max(request.sampling.max_generate_length for request in requests)
        return _DecodeState(
            cache=BatchCache(
                self._num_layers,
                reserve=width + min(new_tokens, _RESERVED_NEW_TOKENS),
                rows=[prefilled[prompt].state for prompt in prompts],
            ),
            logits=logits,
            mask=right_aligned_mask(lengths, width),
            positions=lengths,
            uniforms=_uniforms(requests, new_tokens, device),
            table=SamplingTable.of(
                [request.sampling for request in requests], vocab_size=logits.shape[-1], device=device
            ),
        )

    def _append(self, row: _Row, token_id: int, logprob: float) -> None:
        row.append(token_id, logprob)
        stop = row.request.sampling.stop
        if token_id in self._eos_token_ids:
            row.stop_reason = StopReason.STOP
        elif stop:
            recent = self._decode_text(row.token_ids[-row.stop_window :])
            if any(string in recent for string in stop):
                row.stop_reason = StopReason.STOP

    def _keep(self, rows: Sequence[_Row], state: _DecodeState, places: Iterable[int]) -> None:
        """Keeps what finished rows computed, for prompts that continue them."""
        for place in places:
            row = rows[state.row_of[place]]
            if row.stop_reason is not None:
                token_ids = row.all_token_ids
                self._prefixes.keep(token_ids, state.read(place, num_tokens=len(token_ids) - 1))


class _DecodeState:
    """What one step needs; `row_of[place]` is the request that a computed row belongs to."""

    def __init__(
        self,
        *,
        cache: BatchCache,
        logits: Tensor,
        mask: Tensor,
        positions: Tensor,
        uniforms: Tensor,
        table: SamplingTable,
    ) -> None:
        self.row_of = list(range(logits.shape[0]))
        self._cache = cache
        self._logits = logits
        self._mask = mask
        self._positions = positions
        self._uniforms = uniforms
        self._table = table
        self._step = 0

    def sample(self) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities, one per computed row."""
        result = sample_tokens(self._logits, self._uniforms[:, self._step], self._table)
        self._step += 1
        return result

    def take(self, places: list[int]) -> None:
        """Removes all rows but these."""
        rows = torch.tensor(places, device=self._logits.device)
        self.row_of = [self.row_of[place] for place in places]
        self._cache.take_rows(rows)
        self._mask = self._mask[rows]
        self._positions = self._positions[rows]
        self._uniforms = self._uniforms[rows]
        self._table = self._table.take(rows)

    def read(self, place: int, *, num_tokens: int) -> RowState:
        """Keys and values of a row's first tokens."""
        return self._cache.read_row(place, self._mask[place].nonzero()[:num_tokens, 0])

    def forward(self, model: PreTrainedModel, tokens: Tensor) -> None:
        """Logits after one more token per row."""
        self._mask = torch.cat([self._mask, self._mask.new_ones((len(self.row_of), 1))], dim=1)
        output = model(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=self._positions[:, None],
            past_key_values=self._cache.for_model,
            use_cache=True,
        )
        self._logits = output.logits[:, -1]
        self._positions = self._positions + 1


def _uniforms(requests: Sequence[GenerationRequest], count: int, device: torch.device) -> Tensor:
    """float64 [requests, count] in [0, 1), row i from the seed of request i alone."""
    generator = torch.Generator()
    rows = [
        torch.rand(count, generator=generator.manual_seed(request.seed), dtype=torch.float64) for request in requests
    ]
    return torch.stack(rows).to(device)
