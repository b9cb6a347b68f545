"""Log-probabilities and entropies of chosen tokens, without a `[tokens, vocabulary]` tensor.

The output head is applied to scored positions only (those that carry loss), a tile of tokens at a time. For a token `t`
with logits `z = head(hidden[t - 1]) / temperature`:

    logprob_t = z[token_t] - logsumexp(z)          d logprob / d z = onehot(token_t) - p
    entropy_t = logsumexp(z) - sum(p * z)          d entropy / d z = -p * (log p + entropy_t)

The backward pass recomputes each tile's logits from the hidden states, so memory is flat in the number of tokens. Where
all scored positions fit into one tile, its logits are kept instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skyrl_train.batch.layout import Layout, sequence_offsets, spread_to_rows
from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.errors import BatchError

ELEMENTS_PER_TILE = 1 << 21
"""Logits per tile on a CPU: 8 MiB in float32, near the size of a core's caches."""
ELEMENTS_PER_TILE_ACCELERATOR = 1 << 26
"""Logits per tile elsewhere: 256 MiB in float32, enough rows to fill the device."""


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """How a model turns the last hidden state into logits: `cap(scale * (weight @ hidden + bias))`."""

    weight: Tensor
    """`[vocabulary, hidden]`."""
    bias: Tensor | None = None
    """`[vocabulary]`."""
    scale: float = 1.0
    """Factor on the logits (Cohere's `logit_scale`, one over Granite's `logits_scaling`)."""
    softcap: float | None = None
    """`softcap * tanh(logits / softcap)` (Gemma 2)."""


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """`[rows, len]`, aligned with the tokens; 0 where a token is not scored."""

    logprobs: Tensor
    entropy: Tensor
    """nats; all 0 and without gradient where it was not asked for."""


@dataclass(frozen=True)
class _TileMaths:
    """What the two passes share: constants of the head and of the tiling."""

    scale: float
    softcap: float | None
    compute_dtype: torch.dtype
    tokens_per_tile: int

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """`[tokens, vocabulary]` in float32 (float64 for float64), and the derivative of the cap where there is one."""
        z = torch.nn.functional.linear(hidden.to(self.compute_dtype), weight)
        z = z.to(_accumulator(z.dtype))
        if bias is not None:
            z += bias
        if self.softcap is None:
            return (z.mul_(self.scale) if self.scale != 1.0 else z), None
        capped = torch.tanh(z / self.softcap)
        slope = 1.0 - capped.square()
        return capped.mul_(self.softcap * self.scale), slope


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _TokenScore(torch.autograd.Function):
    """`(logprobs, entropy)`, each `[tokens]`, with gradients for the hidden states, the weight and the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        maths: _TileMaths,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden.shape[0]
        dtype = _accumulator(hidden.dtype)
        logprobs = hidden.new_empty(num_tokens, dtype=dtype)
        entropy = hidden.new_zeros(num_tokens, dtype=dtype)
        log_sum_exp = hidden.new_empty(num_tokens, dtype=dtype)
        tile_weight = weight.to(maths.compute_dtype)
        kept: Tensor | None = None
        kept_slope: Tensor | None = None
        for start in range(0, num_tokens, maths.tokens_per_tile):
            tile = slice(start, start + maths.tokens_per_tile)
            z, slope = maths.logits(hidden[tile], tile_weight, bias)
            log_sum_exp[tile] = torch.logsumexp(z, dim=-1)
            logprobs[tile] = z.gather(1, targets[tile, None]).squeeze(1) - log_sum_exp[tile]
            if with_entropy:
                probabilities = torch.exp(z - log_sum_exp[tile, None])
                entropy[tile] = log_sum_exp[tile] - torch.linalg.vecdot(probabilities, z)
            if num_tokens <= maths.tokens_per_tile and any(ctx.needs_input_grad):
                kept, kept_slope = z, slope
        ctx.save_for_backward(hidden, weight, bias, targets, log_sum_exp, entropy, kept, kept_slope)
        ctx.maths, ctx.with_entropy = maths, with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, bias, targets, log_sum_exp, entropy, kept, kept_slope = ctx.saved_tensors
        maths: _TileMaths = ctx.maths
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        tile_weight = weight.to(maths.compute_dtype)
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=_accumulator(weight.dtype)) if want_weight else None
        grad_bias = torch.zeros_like(bias) if want_bias else None
        for start in range(0, hidden.shape[0], maths.tokens_per_tile):
            tile = slice(start, start + maths.tokens_per_tile)
            z, slope = (kept, kept_slope) if kept is not None else maths.logits(hidden[tile], tile_weight, bias)
            coefficients = grad_logprobs[tile, None]
            grad_z = z - log_sum_exp[tile, None]
            if ctx.with_entropy:
                probabilities = torch.exp(grad_z)
                grad_z.add_(entropy[tile, None]).mul_(grad_entropy[tile, None]).add_(coefficients)
                grad_z.mul_(probabilities).neg_()
            else:
                grad_z.exp_().mul_(-coefficients)
            grad_z.scatter_add_(1, targets[tile, None], coefficients)
            if maths.scale != 1.0:
                grad_z.mul_(maths.scale)
            if slope is not None:
                grad_z.mul_(slope)
            if grad_bias is not None:
                grad_bias += grad_z.sum(0)
            grad_z = grad_z.to(maths.compute_dtype)
            if grad_hidden is not None:
                grad_hidden[tile] = grad_z @ tile_weight
            if grad_weight is not None:
                grad_weight += grad_z.T @ hidden[tile].to(maths.compute_dtype)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), grad_bias, None, None, None


def token_scores(
    hidden: Tensor,
    targets: Tensor,
    head: OutputHead,
    *,
    temperature: float = 1.0,
    with_entropy: bool = True,
    compute_dtype: torch.dtype | None = None,
    tokens_per_tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`(logprobs, entropy)` of `targets`, each `[tokens]`, in float32 (float64 for float64 hidden states).

    `hidden` `[tokens, hidden]` predicts `targets` `[tokens]` (int64), position by position. `compute_dtype` is the type
    of the matrix products (that of `hidden` unless given); sums and exponentials are float32 or better. Without entropy
    the second tensor is 0 and carries no gradient. Not differentiable twice.
    """
    vocabulary = head.weight.shape[0]
    budget = ELEMENTS_PER_TILE if hidden.device.type == "cpu" else ELEMENTS_PER_TILE_ACCELERATOR
    maths = _TileMaths(
        scale=head.scale / temperature,
        softcap=head.softcap,
        compute_dtype=compute_dtype or hidden.dtype,
        tokens_per_tile=tokens_per_tile or max(1, budget // vocabulary),
    )
    with torch.autocast(hidden.device.type, enabled=False):
        scores: tuple[Tensor, Tensor] = _TokenScore.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, head.bias, targets, maths, with_entropy
        )
    return scores


def score_tokens(
    hidden: Tensor,
    rows: TrainingInputBatch,
    layout: Layout,
    head: OutputHead,
    *,
    temperature: float = 1.0,
    with_entropy: bool = True,
    compute_dtype: torch.dtype | None = None,
) -> TokenScores:
    """Scores the tokens that `loss_mask` marks, once where several rows share them.

    hidden `[positions, hidden]` is the forward of `layout`. A token is predicted by the hidden state of the one before it;
    a row's first token has none. Raises BatchError where `loss_mask` marks one.
    """
    scored = loss_tokens(rows)
    positions = layout.position_of_token[scored]
    targets = rows["input_ids"][scored].long()
    before = layout.position_of_token[scored - 1]
    copies: Tensor | None = None
    if layout.is_shared:
        positions, copies = torch.unique(positions, return_inverse=True)
        one_of = torch.empty_like(positions).scatter_(0, copies, torch.arange(len(copies), device=copies.device))
        before, targets = before[one_of], targets[one_of]
    logprobs, entropy = token_scores(
        hidden.index_select(0, before),
        targets,
        head,
        temperature=temperature,
        with_entropy=with_entropy,
        compute_dtype=compute_dtype,
    )

    def spread(values: Tensor) -> Tensor:
        own = values if copies is None else values.index_select(0, copies)
        flat = own.new_zeros(rows.num_tokens).index_put((scored,), own)
        return spread_to_rows(flat, rows)

    return TokenScores(logprobs=spread(logprobs), entropy=spread(entropy))


def loss_tokens(rows: TrainingInputBatch) -> Tensor:
    """int64: the flat places of the tokens that `loss_mask` marks. Raises BatchError for the first token of a row."""
    mask = rows["loss_mask"]
    begins = sequence_offsets(rows)[:-1]
    first = mask[begins]
    if bool(first.any()):
        row = int(torch.searchsorted(rows.row_offsets, begins[first][0], right=True)) - 1
        raise BatchError(f"row {row} marks its first token for the loss, but nothing comes before it to predict it")
    return mask.nonzero().squeeze(1)
