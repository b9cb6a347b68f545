"""Chunked token scores against the plain computation with full logits."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.batch import TrainingInputBatch, batch_of_lengths
from skyrl_train.batch.layouts import packed_layout, shared_layout
from skyrl_train.errors import BatchError
from skyrl_train.model.layers.logprobs import OutputHead, _TileMaths, score_tokens, token_scores

VOCABULARY, HIDDEN, TOKENS = 11, 5, 7


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(hidden: Tensor, targets: Tensor, head: OutputHead, temperature: float) -> tuple[Tensor, Tensor]:
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    log_p = torch.log_softmax(logits * head.scale / temperature, dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def leaves() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    targets = torch.tensor([0, 3, 10, 3, 7, 1, 0])
    return (
        draw(TOKENS, HIDDEN, seed=1).requires_grad_(),
        draw(VOCABULARY, HIDDEN, seed=2).requires_grad_(),
        draw(VOCABULARY, seed=3).requires_grad_(),
        targets,
    )


VARIANTS = [
    pytest.param({}, 1.0, id="plain"),
    pytest.param({}, 0.7, id="temperature"),
    pytest.param({"scale": 0.25}, 1.3, id="scaled"),
    pytest.param({"softcap": 2.0, "scale": 3.0}, 0.7, id="capped"),
]


@pytest.mark.parametrize("tokens_per_tile", [1, 3, 100])
@pytest.mark.parametrize(("extras", "temperature"), VARIANTS)
def test_scores_and_gradients_equal_those_of_full_logits(extras, temperature, tokens_per_tile) -> None:
    hidden, weight, bias, targets = leaves()
    head = OutputHead(weight=weight, bias=bias, **extras)
    by_token = (draw(TOKENS, seed=4), draw(TOKENS, seed=5))

    found = token_scores(hidden, targets, head, temperature=temperature, tokens_per_tile=tokens_per_tile)
    expected = plain(hidden, targets, head, temperature)

    gradients = torch.autograd.grad(found, (hidden, weight, bias), by_token)
    expected_gradients = torch.autograd.grad(expected, (hidden, weight, bias), by_token)
    for left, right in zip((*found, *gradients), (*expected, *expected_gradients)):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("tokens_per_tile", [2, 100])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_gradcheck(with_entropy, tokens_per_tile) -> None:
    hidden, weight, bias, targets = leaves()

    def scores(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        head = OutputHead(weight=weight, bias=bias, softcap=3.0)
        found = token_scores(
            hidden, targets, head, temperature=0.8, with_entropy=with_entropy, tokens_per_tile=tokens_per_tile
        )
        return found if with_entropy else found[:1]

    assert torch.autograd.gradcheck(scores, (hidden, weight, bias))


def test_without_entropy_only_the_logprob_has_a_gradient() -> None:
    hidden, weight, _, targets = leaves()
    logprobs, entropy = token_scores(hidden, targets, OutputHead(weight=weight), with_entropy=False)
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    assert entropy.tolist() == [0.0] * TOKENS


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _, targets = leaves()
    logprobs, _ = token_scores(hidden, targets, OutputHead(weight=weight.detach()))
    logprobs.sum().backward()
    assert hidden.grad is not None


def test_no_tokens_give_empty_scores_and_zero_gradients() -> None:
    _, weight, _, targets = leaves()
    hidden = torch.zeros(0, HIDDEN, dtype=torch.float64, requires_grad=True)
    logprobs, entropy = token_scores(hidden, targets[:0], OutputHead(weight=weight))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_bfloat16_products_accumulate_in_float32() -> None:
    hidden, weight, _, targets = leaves()
    hidden32, weight32 = hidden.detach().float(), weight.detach().float()
    logprobs, entropy = token_scores(hidden32, targets, OutputHead(weight=weight32), compute_dtype=torch.bfloat16)
    expected, expected_entropy = plain(hidden.detach(), targets, OutputHead(weight=weight.detach()), 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=0.05)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=0.05)


def test_nothing_of_size_tokens_times_vocabulary_outlives_the_forward_pass() -> None:
    tokens, vocabulary = 64, 100
    hidden, weight = draw(tokens, 4).requires_grad_(), draw(vocabulary, 4).requires_grad_()
    kept: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        token_scores(hidden, torch.zeros(tokens, dtype=torch.int64), OutputHead(weight=weight), tokens_per_tile=8)
    assert max(kept) == vocabulary * 4


class LiveElements(TorchDispatchMode):
    """The most elements that tensors made under it had at one time; views count once, with what they look into."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, Tensor) and tensor.numel() == tensor.untyped_storage().nbytes() // tensor.itemsize:
                self._live[id(tensor)] = tensor.numel()
                weakref.finalize(tensor, self._live.pop, id(tensor), None)
        self.most = max(self.most, sum(self._live.values()))
        return found


@pytest.mark.parametrize("is_foreseen", [False, True])
def test_peak_memory_is_flat_in_the_number_of_tokens(is_foreseen) -> None:
    vocabulary, size, few, many = 400, 4, 32, 256

    def most(tokens: int, tokens_per_tile: int) -> int:
        hidden, weight = draw(tokens, size).requires_grad_(), draw(vocabulary, size).requires_grad_()
        targets, ones = torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens, dtype=torch.float64)
        foresee = (lambda tile, *_: (ones[tile], ones[tile])) if is_foreseen else None
        with LiveElements() as live:
            found = token_scores(
                hidden, targets, OutputHead(weight=weight), tokens_per_tile=tokens_per_tile, foresee=foresee
            )
            torch.autograd.grad(found, (hidden, weight), (ones, ones))
        return live.most

    columns_per_token = 4 * size  # the gradient of the hidden states, the scores, and little else
    assert most(many, tokens_per_tile=16) - most(few, tokens_per_tile=16) < (many - few) * columns_per_token
    assert most(many, tokens_per_tile=many) - most(few, tokens_per_tile=few) > (many - few) * vocabulary


def test_huge_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]])
    logprobs, entropy = token_scores(hidden, torch.tensor([0, 0]), OutputHead(weight=weight))
    assert logprobs.tolist() == [0.0, -1e4]
    assert entropy.tolist() == [0.0, 0.0]
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [[0.0], [1.0]]


def rows_of(*rows: list[tuple[int, bool]]) -> TrainingInputBatch:
    """Rows of (token, whether it is scored)."""
    flat = [token for row in rows for token in row]
    return batch_of_lengths([len(row) for row in rows]).with_columns(
        input_ids=torch.tensor([token for token, _ in flat], dtype=torch.int32),
        loss_mask=torch.tensor([scored for _, scored in flat]),
    )


def test_the_token_at_t_is_predicted_by_the_hidden_state_before_it() -> None:
    head = OutputHead(weight=torch.eye(2))
    rows = rows_of([(1, False), (0, True), (1, False)], [(0, False), (0, True), (1, True)])
    hidden = torch.tensor(
        [[[math.log(3.0), 0.0], [0.0, 0.0], [9.0, 9.0]], [[0.0, 0.0], [0.0, math.log(4.0)], [9.0, 9.0]]]
    )
    scores = score_tokens(hidden.flatten(0, 1), rows, packed_layout(rows), head)
    torch.testing.assert_close(
        scores.logprobs, torch.tensor([[0.0, math.log(0.75), 0.0], [0.0, math.log(0.5), math.log(0.8)]])
    )
    torch.testing.assert_close(scores.entropy[1, 1], torch.tensor(math.log(2.0)))
    assert scores.entropy[0].tolist()[::2] == [0.0, 0.0]


def test_tokens_that_rows_share_are_scored_once_and_their_gradients_add_up() -> None:
    head = OutputHead(weight=torch.eye(2))
    rows = rows_of([(1, False), (0, True)], [(1, False), (0, True), (1, True)])
    hidden = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0], [9.0, 9.0]], requires_grad=True)
    scores = score_tokens(hidden, rows, shared_layout(rows), head)
    torch.testing.assert_close(
        scores.logprobs.detach(), torch.tensor([[0.0, math.log(0.75), 0.0], [0.0, math.log(0.75), math.log(0.5)]])
    )
    scores.logprobs.sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, torch.tensor([[0.5, -0.5], [-0.5, 0.5], [0.0, 0.0]]))


def test_the_first_token_of_a_row_cannot_be_scored() -> None:
    rows = rows_of([(0, False), (0, True)], [(0, True), (0, True)])
    with pytest.raises(BatchError, match="row 1 marks its first token"):
        score_tokens(torch.zeros(4, 3), rows, packed_layout(rows), OutputHead(weight=torch.zeros(4, 3)))


class TestForeseenCoefficients:
    """The gradient is formed in the forward pass, and thrown away where the loss turns out to be another."""

    COEFFICIENTS = (draw(TOKENS, seed=4), draw(TOKENS, seed=5))

    def gradients(self, foreseen: tuple[Tensor, Tensor] | None, monkeypatch) -> tuple[tuple[Tensor, ...], int]:
        """Gradients of the same loss, and how many tiles of logits were computed for them (of 3)."""
        hidden, weight, bias, targets = leaves()
        head = OutputHead(weight=weight, bias=bias, scale=0.5, softcap=4.0)
        tiles: list[int] = []
        inner = _TileMaths.logits
        monkeypatch.setattr(_TileMaths, "logits", lambda *args: tiles.append(1) or inner(*args))
        found = token_scores(
            hidden,
            targets,
            head,
            tokens_per_tile=3,
            foresee=foreseen and (lambda tile, *_: (foreseen[0][tile], foreseen[1][tile])),
        )
        result = torch.autograd.grad(found, (hidden, weight, bias), self.COEFFICIENTS)
        monkeypatch.undo()
        return result, len(tiles)

    def test_give_the_gradient_without_computing_logits_again(self, monkeypatch) -> None:
        expected, plain_tiles = self.gradients(None, monkeypatch)
        found, tiles = self.gradients(self.COEFFICIENTS, monkeypatch)
        assert (tiles, plain_tiles) == (3, 6)
        for left, right in zip(found, expected):
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-13)

    @pytest.mark.parametrize("which", [0, 1])
    def test_that_are_wrong_cost_only_time(self, which, monkeypatch) -> None:
        wrong = [coefficients.clone() for coefficients in self.COEFFICIENTS]
        wrong[which][2] += 1e-9
        expected, _ = self.gradients(None, monkeypatch)
        found, tiles = self.gradients((wrong[0], wrong[1]), monkeypatch)
        assert tiles == 6
        for left, right in zip(found, expected):
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("per_tile", "per_product"), [(2, 6), (3, 3), (3, 4), (2, 100), (5, 10)])
@pytest.mark.parametrize("foreseen", [True, False])
def test_gradients_of_several_tiles_in_one_product(per_tile: int, per_product: int, foreseen: bool) -> None:
    """As on a device with a large vocabulary; 13 tokens, so that last tiles and products are short."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(size, 8, generator=generator, dtype=torch.float64).requires_grad_() for size in (13, 11)
    )
    bias = torch.randn(11, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, 11, (13,), generator=generator)
    factor = torch.randn(2, 13, generator=generator, dtype=torch.float64)
    head = OutputHead(weight=weight, bias=bias)
    found = []
    for sizes in ({"tokens_per_tile": 13}, {"tokens_per_tile": per_tile, "tokens_per_product": per_product}):
        logprobs, entropy = token_scores(
            hidden,
            targets,
            head,
            foresee=(lambda tile, *_: (factor[0, tile], factor[1, tile])) if foreseen else None,
            **sizes,
        )
        loss = (factor[0] * logprobs + factor[1] * entropy).sum()
        found.append(torch.autograd.grad(loss, (hidden, weight, bias)))
    for mine, expected in zip(*found):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-13)
