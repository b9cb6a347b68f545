"""Log-probabilities and entropies of chosen tokens, without a `[tokens, vocabulary]` tensor.

The output head is applied to scored positions only (those that carry loss), a tile of tokens at a time. For a token `t`
with logits `z = head(hidden[t - 1]) / temperature`:

    logprob_t = z[token_t] - logsumexp(z)          d logprob / d z = onehot(token_t) - p
    entropy_t = logsumexp(z) - sum(p * z)          d entropy / d z = -p * (log p + entropy_t)

Where the caller foresees the loss's coefficients, gradients are formed while a tile's probabilities are available: one
pass, three matrix products. Else the backward pass recomputes each tile's logits from the hidden states (four
products), or, where all scored positions fit into one tile, its logits are kept. Either way memory is flat in the number
of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from skyrl_train.batch import ScoredTokens, TrainingInputBatch
from skyrl_train.batch.layouts import Layout, find_scored, spread_to_rows
from skyrl_train.model.layers.linear import operand, product
from skyrl_train.model.parallel.tensor_parallel import Vocabulary
from skyrl_train.model.parallel.tiles import Tiles, make_tiles


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
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    """Of which `weight` and `bias` may be a part."""


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """`[rows, len]`, aligned with the tokens; 0 where a token is not scored."""

    logprobs: Tensor
    entropy: Tensor
    """nats; all 0 and without gradient where it was not asked for."""


Foresee = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""`(tile, its logprobs, its entropies) -> (d loss / d logprob, d loss / d entropy)`, each `[tokens of the tile]`; None: the
loss has no entropy in it."""


LossOfTokens = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(places in the flat columns [n], logprobs [n], entropies [n]) -> their weighted share of the loss`, a scalar."""


OfDistribution = Callable[[Tensor], Tensor]
"""`log-probabilities [tokens, vocabulary] -> [tokens]`: a number of the distribution that each token is drawn from."""


def sum_of_squares(log_p: Tensor) -> Tensor:
    """`sum_v p_v^2`: 1 for a certain token, 1 / vocabulary for a uniform one."""
    return (2 * log_p).exp().sum(-1)


@dataclass(frozen=True)
class _TileMaths:
    """The two passes' common ground: constants of the head and of the tiling."""

    scale: float
    softcap: float | None
    compute_dtype: torch.dtype
    tiles: Tiles
    mismatches: list[Tensor] | None
    """Where to note a gradient that is not the foreseen one; None: it is computed anew."""
    vocabulary: Vocabulary

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """`[tokens, vocabulary]` in float32 (float64 for float64), and the derivative of the cap where there is one."""
        z = product(hidden.to(self.compute_dtype).to(weight.dtype), weight)
        z = z.to(_accumulator(z.dtype))
        if bias is not None:
            z += bias
        if self.softcap is None:
            return (z.mul_(self.scale) if self.scale != 1.0 else z), None
        capped = torch.tanh(z / self.softcap)
        slope = 1.0 - capped.square()
        return capped.mul_(self.softcap * self.scale), slope

    def through_head(self, grad_z: Tensor, slope: Tensor | None) -> Tensor:
        """The gradient of what `weight @ hidden + bias` gives, from that of the logits; in place."""
        if self.scale != 1.0:
            grad_z.mul_(self.scale)
        return grad_z if slope is None else grad_z.mul_(slope)


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
        foresee: Foresee | None,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden.shape[0]
        dtype = _accumulator(hidden.dtype)
        logprobs = hidden.new_empty(num_tokens, dtype=dtype)
        entropy = hidden.new_zeros(num_tokens, dtype=dtype)
        log_sum_exp = hidden.new_empty(num_tokens, dtype=dtype)
        differentiated = any(ctx.needs_input_grad)
        foreseen = (
            _Gradients.like(hidden, weight, bias, ctx.needs_input_grad, maths) if foresee and differentiated else None
        )
        expected = hidden.new_zeros(2, num_tokens, dtype=dtype)
        tile_weight = operand(weight, maths.compute_dtype)
        is_own, targets = maths.vocabulary.own(targets, len(weight))
        kept: Tensor | None = None
        kept_slope: Tensor | None = None
        for tile in maths.tiles.of(num_tokens):
            z, slope = maths.logits(hidden[tile], tile_weight, bias)
            log_p, logprobs[tile], log_sum_exp[tile] = maths.vocabulary.log_softmax(z, targets[tile], is_own[tile])
            p = log_p.exp() if with_entropy or foreseen is not None else log_p
            if with_entropy:
                entropy[tile] = -maths.vocabulary.total(torch.linalg.vecdot(p, log_p))
            if foreseen is not None and foresee is not None:
                by_logprob, by_entropy = foresee(tile, logprobs[tile], entropy[tile])
                expected[0, tile] = by_logprob
                if by_entropy is not None:
                    expected[1, tile] = by_entropy
                coefficients = by_logprob, by_entropy, by_logprob * is_own[tile]
                grad_z = _grad_of_logits(log_p, p, targets[tile], coefficients, entropy[tile])
                foreseen.add(tile, maths.through_head(grad_z, slope), hidden, tile_weight)
            elif num_tokens <= maths.tiles.tokens_per_tile and differentiated:
                kept, kept_slope = z, slope
        ctx.save_for_backward(hidden, weight, bias, targets, is_own, log_sum_exp, entropy, expected, kept, kept_slope)
        ctx.maths, ctx.with_entropy, ctx.foreseen = maths, with_entropy, foreseen
        ctx.set_materialize_grads(False)  # None says without a look at the device that the loss has no entropy in it
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, bias, targets, is_own, log_sum_exp, entropy, expected, kept, kept_slope = ctx.saved_tensors
        maths: _TileMaths = ctx.maths
        foreseen: _Gradients | None = ctx.foreseen
        ctx.foreseen = None  # this node lives as long as the loss does; its weight's gradient need not
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_sum_exp)
        if foreseen is not None and _is_as_expected(grad_logprobs, grad_entropy, expected, maths.mismatches):
            return foreseen.result(weight)
        found = _Gradients.like(hidden, weight, bias, ctx.needs_input_grad, maths)
        tile_weight = operand(weight, maths.compute_dtype)
        for tile in maths.tiles.of(hidden.shape[0]):
            z, slope = (kept, kept_slope) if kept is not None else maths.logits(hidden[tile], tile_weight, bias)
            log_p = z - log_sum_exp[tile, None]
            by_entropy = None if grad_entropy is None else grad_entropy[tile]
            coefficients = grad_logprobs[tile], by_entropy, grad_logprobs[tile] * is_own[tile]
            grad_z = _grad_of_logits(log_p, log_p.exp(), targets[tile], coefficients, entropy[tile])
            found.add(tile, maths.through_head(grad_z, slope), hidden, tile_weight)
        return found.result(weight)


def _grad_of_logits(
    log_p: Tensor,
    p: Tensor,
    targets: Tensor,
    by: tuple[Tensor, Tensor | None, Tensor],
    entropy: Tensor,
) -> Tensor:
    """`[tokens, vocabulary]`, from the gradients `by` each token's log-probability and entropy, and by its own logit where
    that is among these. Overwrites its input."""
    by_logprob, by_entropy, at_target = by
    coefficients = by_logprob[:, None]
    if by_entropy is None:
        grad_z = p.mul_(-coefficients)
    else:
        log_p.add_(entropy[:, None]).mul_(by_entropy[:, None]).add_(coefficients)
        grad_z = log_p.mul_(p).neg_()
    return grad_z.scatter_add_(1, targets[:, None], at_target[:, None])


def _is_as_expected(
    grad_logprobs: Tensor, grad_entropy: Tensor | None, expected: Tensor, mismatches: list[Tensor] | None
) -> bool:
    """Whether the loss is as it was declared. With `mismatches`, the answer is yes, and whether it is true is noted
    there, to be read with what else comes back from the device."""
    if not grad_logprobs.numel():
        return True
    given = torch.stack([grad_logprobs, torch.zeros_like(grad_logprobs) if grad_entropy is None else grad_entropy])
    # rounding is compared with the largest coefficient: small ones add nothing that would be seen beside it
    allowed = 64 * torch.finfo(expected.dtype).eps * expected.abs().amax(1)
    as_expected = ((given - expected).abs().amax(1) <= allowed).all()
    if mismatches is None:
        return bool(as_expected)
    mismatches.append(~as_expected)
    return True


@dataclass
class _Gradients:
    """Sums over tiles; None where nobody asks."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    tokens_per_product: int
    """Logits' gradients of neighbouring tiles are kept up to so many tokens for one product."""
    kept: Tensor | None = None
    """`[at most tokens_per_product, vocabulary]` in the compute type."""

    @classmethod
    def like(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool], maths: _TileMaths
    ) -> _Gradients:
        return cls(
            hidden=torch.empty_like(hidden) if needed[0] else None,
            weight=torch.zeros_like(weight, dtype=_accumulator(weight.dtype)) if needed[1] else None,
            bias=torch.zeros_like(bias) if needed[2] and bias is not None else None,
            tokens_per_product=maths.tiles.tokens_per_product,
        )

    def add(self, tile: slice, grad_z: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """The share of one tile of `hidden` `[tokens, hidden]`, of which tiles come in order; `weight` and the products
        are in the compute type."""
        if self.bias is not None:
            self.bias += grad_z.sum(0)
        num_tokens, stop = len(hidden), tile.start + len(grad_z)
        first = tile.start - tile.start % self.tokens_per_product
        if tile.start == first and (stop == num_tokens or len(grad_z) == self.tokens_per_product):
            self._multiply(tile.start, grad_z.to(weight.dtype), hidden, weight)
            return
        if self.kept is None:
            size = min(num_tokens, self.tokens_per_product)
            self.kept = grad_z.new_empty(size, grad_z.shape[1], dtype=weight.dtype)
        self.kept[tile.start - first : stop - first] = grad_z
        if stop - first == self.tokens_per_product or stop == num_tokens:
            self._multiply(first, self.kept[: stop - first], hidden, weight)
        if stop == num_tokens:
            self.kept = None

    def _multiply(self, start: int, grad_z: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """The products of the tokens from `start` on; their sum is in float32 or better."""
        span = slice(start, start + len(grad_z))
        if self.hidden is not None:
            self.hidden[span] = product(grad_z, weight.T)
        if self.weight is not None and self.weight.dtype == weight.dtype:
            self.weight.addmm_(grad_z.T, hidden[span].to(weight.dtype))
        elif self.weight is not None:
            self.weight += grad_z.T @ hidden[span].to(weight.dtype)

    def result(self, weight: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]:
        """Return gradients in the order of the function's inputs."""
        by_weight = None if self.weight is None else self.weight.to(weight.dtype)
        return self.hidden, by_weight, self.bias, None, None, None, None


def token_scores(
    hidden: Tensor,
    targets: Tensor,
    head: OutputHead,
    *,
    temperature: float = 1.0,
    with_entropy: bool = True,
    compute_dtype: torch.dtype | None = None,
    tokens_per_tile: int | None = None,
    tokens_per_product: int | None = None,
    foresee: Foresee | None = None,
    of_distribution: OfDistribution | None = None,
    mismatches: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`(logprobs, entropy)` of `targets`, each `[tokens]`, in float32 (float64 for float64 hidden states).

    `hidden` `[tokens, hidden]` predicts `targets` `[tokens]` (int64), position by position. `compute_dtype` is the type
    of the matrix products (that of `hidden` unless given); sums and exponentials are float32 or better. Without entropy
    the second tensor is 0 and carries no gradient. Not differentiable twice.

    With `foresee`, gradients are computed tile by tile in the forward pass, and none of its work is repeated: for a
    loss that is a sum over tokens, their coefficients are known as soon as a tile is. The backward pass compares them
    with those it is given and computes anew where they differ, so that a wrong guess costs only time. That waits for the
    device: with `mismatches`, a bool scalar is appended there instead, True where they differ and the gradient is wrong.

    With `of_distribution` its numbers stand in place of the log-probabilities, without a gradient.
    """
    maths = _TileMaths(
        scale=head.scale / temperature,
        softcap=head.softcap,
        compute_dtype=compute_dtype or hidden.dtype,
        tiles=make_tiles(hidden.device.type, head.weight.shape[0], tokens_per_tile, tokens_per_product),
        mismatches=mismatches,
        vocabulary=head.vocabulary,
    )
    hidden = head.vocabulary.whole_input(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        if of_distribution is not None:
            numbers = _by_tile(hidden, head, maths, of_distribution)
            return numbers, torch.zeros_like(numbers)
        scores: tuple[Tensor, Tensor] = _TokenScore.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, head.bias, targets, maths, with_entropy, foresee
        )
    return scores


@torch.no_grad()
def _by_tile(hidden: Tensor, head: OutputHead, maths: _TileMaths, of_distribution: OfDistribution) -> Tensor:
    weight = operand(head.weight, maths.compute_dtype)
    tiles = (maths.logits(tile, weight, head.bias)[0] for tile in torch.split(hidden, maths.tiles.tokens_per_tile))
    return torch.cat([of_distribution(torch.log_softmax(maths.vocabulary.joined(z), dim=-1)) for z in tiles])


def score_tokens(
    hidden: Tensor,
    rows: TrainingInputBatch,
    layout: Layout,
    head: OutputHead,
    *,
    temperature: float = 1.0,
    with_entropy: bool = True,
    compute_dtype: torch.dtype | None = None,
    loss_of_tokens: LossOfTokens | None = None,
    of_distribution: OfDistribution | None = None,
) -> TokenScores:
    """Scores the tokens that `loss_mask` marks, once where several rows share them.

    hidden `[positions, hidden]` is the forward of `layout`. A token is predicted by the hidden state of the one before
    it; a row's first token has none. Raises BatchError where `loss_mask` marks one. Ranks that share a forward each score
    what their own hidden states predict, and all have the whole result.

    `loss_of_tokens` is what the loss will be, where it is a sum over tokens: it saves a product; `of_distribution` gives
    other numbers in place of log-probabilities (see `token_scores`).
    """
    scored = layout.scored or find_scored(rows, layout)
    logprobs, entropy = token_scores(
        hidden.index_select(0, scored.states),
        rows["input_ids"][scored.tokens[scored.representatives]].long(),
        head,
        temperature=temperature,
        with_entropy=with_entropy,
        compute_dtype=compute_dtype,
        of_distribution=of_distribution,
        foresee=_foresee(loss_of_tokens, scored) if loss_of_tokens is not None else None,
        mismatches=None if layout.scored is None or hidden.device.type == "cpu" else scored.mismatches,
    )

    def spread(values: Tensor) -> Tensor:
        own = values if scored.copies is None else values.index_select(0, scored.copies)
        flat = own.new_zeros((rows.num_tokens, *own.shape[1:])).index_put((scored.tokens,), own)
        return spread_to_rows(layout.combine(flat), rows)

    return TokenScores(logprobs=spread(logprobs), entropy=spread(entropy))


def _foresee(loss_of_tokens: LossOfTokens, scored: ScoredTokens) -> Foresee:
    """Differentiates the loss of one tile's tokens."""

    def coefficients(tile: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
        leaves = logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()
        with torch.enable_grad():
            if scored.copies is None:
                loss = loss_of_tokens(scored.tokens[tile], *leaves)
            else:
                first = int(scored.ends[tile.start - 1]) if tile.start else 0
                members = scored.by_state[first : int(scored.ends[tile.stop - 1])]
                own = scored.copies[members] - tile.start
                loss = loss_of_tokens(scored.tokens[members], leaves[0][own], leaves[1][own])
            by_logprob, by_entropy = torch.autograd.grad(loss, leaves, allow_unused=True)
        return torch.zeros_like(leaves[0]) if by_logprob is None else by_logprob, by_entropy

    return coefficients
