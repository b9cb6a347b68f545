"""Generates a batch of responses with a Hugging Face causal LM: one prefill, then a token per row and step.

Left-padded, so that every row's newest token stands in the last column. Each row draws its random numbers from its own
seed, so a sample does not depend on the rows beside it (beyond the rounding of matrix products). Samples of one prompt
share its prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from skyrl_train.inference.kv_cache import make_cache, take_rows
from skyrl_train.inference.sampling import SamplingTable, sample_tokens
from skyrl_train.types import GenerationRequest, StopReason

_RESERVED_NEW_TOKENS = 64
"""Room for new tokens in the first key-value reservation; it grows where responses get longer."""
_COMPACT_BELOW = 0.75
"""Finished rows are removed once fewer than this share of the computed rows is still running."""


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

    def append(self, token_id: int, logprob: float, *, ended: bool) -> None:
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if ended:
            self.stop_reason = StopReason.STOP
        elif len(self.token_ids) >= self.request.sampling.max_generate_length:
            self.stop_reason = StopReason.LENGTH

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
        """`decode_text` turns tokens to text, with special tokens; used only for requests with stop strings."""
        self._model = model
        self._eos_token_ids = eos_token_ids
        self._pad_token_id = pad_token_id
        self._decode_text = decode_text

    @torch.inference_mode()
    def run(
        self, requests: Sequence[GenerationRequest], *, wanted: Callable[[], bool] = lambda: True
    ) -> list[Response]:
        """Responses in the order of the requests.

        `wanted` is asked now and then; once it says no, what there is so far is returned with stop reason `abort`.
        """
        rows = [_Row(request) for request in requests]
        state = self._prefill(requests)
        running = list(range(len(rows)))
        while True:
            tokens, logprobs = state.sample()
            for place, (token_id, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist())):
                row = rows[state.row_of[place]]
                if row.stop_reason is None:
                    row.append(token_id, logprob, ended=token_id in self._eos_token_ids)
                    if row.stop_reason is not StopReason.STOP and self._has_stop_string(row):
                        row.stop_reason = StopReason.STOP
            running = [place for place, index in enumerate(state.row_of) if rows[index].stop_reason is None]
            if not running or not wanted():
                return [row.response() for row in rows]
            if len(running) < _COMPACT_BELOW * len(state.row_of):
                state.keep(running)
                tokens = tokens[running]
            state.forward(self._model, tokens)

    def _prefill(self, requests: Sequence[GenerationRequest]) -> _DecodeState:
        """The state after the prompts, each distinct prompt computed once."""
        device = self._model.device
        places: dict[tuple[int, ...], int] = {}
        for request in requests:
            places.setdefault(request.prompt_token_ids, len(places))
        width = max(map(len, places))
        input_ids = torch.tensor(
            [[self._pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in places], device=device
        )
        lengths = torch.tensor([len(prompt) for prompt in places], device=device)
        mask = torch.arange(width, device=device) >= (width - lengths)[:, None]
        new_tokens = max(request.sampling.max_generate_length for request in requests)
        cache = make_cache(self._model, reserve=width + min(new_tokens, _RESERVED_NEW_TOKENS))
        output = self._model(
            input_ids=input_ids,
            attention_mask=None if mask.all() else mask,
            position_ids=(mask.cumsum(dim=-1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        source = torch.tensor([places[request.prompt_token_ids] for request in requests], device=device)
        take_rows(cache, source)
        table = SamplingTable.of(
            [request.sampling for request in requests], vocab_size=output.logits.shape[-1], device=device
        )
        return _DecodeState(
            cache=cache,
            logits=output.logits[:, -1][source],
            mask=mask[source],
            positions=lengths[source],
            uniforms=_uniforms(requests, new_tokens, device),
            table=table,
        )

    def _has_stop_string(self, row: _Row) -> bool:
        stop = row.request.sampling.stop
        if not stop:
            return False
        text = self._decode_text(row.token_ids)
        return any(string in text for string in stop)


class _DecodeState:
    """What one step needs; `row_of[place]` is the request that a computed row belongs to."""

    def __init__(
        self,
        *,
        cache: Cache,
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
        result = sample_tokens(self._logits, self._uniforms[:, self._step], self._table)
        self._step += 1
        return result

    def keep(self, places: list[int]) -> None:
        """Removes all rows but these."""
        rows = torch.tensor(places, device=self._logits.device)
        self.row_of = [self.row_of[place] for place in places]
        take_rows(self._cache, rows)
        self._mask = self._mask[rows]
        self._positions = self._positions[rows]
        self._uniforms = self._uniforms[rows]
        self._table = self._table.take(rows)

    def forward(self, model: PreTrainedModel, tokens: Tensor) -> None:
        """Logits after one more token per row."""
        self._mask = torch.cat([self._mask, self._mask.new_ones((len(self.row_of), 1))], dim=1)
        output = model(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=self._positions[:, None],
            past_key_values=self._cache,
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
