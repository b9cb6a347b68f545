"""Attention over segments against plain products with a mask."""

from __future__ import annotations

import inspect
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from skyrl_train.batch.layouts import Segment
from skyrl_train.errors import ModelError
from skyrl_train.model.layers import attention
from skyrl_train.model.layers.attention import _attend_on_cuda, flex, masked_attention, segment_attention
from skyrl_train.model.layers.segments import Segments
from tests.support.attention_cases import dense, dense_mask, long_tree, qkv, random_tree

PACKED = Segments((Segment(0, 3, 3), Segment(3, 4, 4), Segment(4, 9, 9)), 5)
TREE = Segments(
    (Segment(0, 2, 9), Segment(2, 3, 3), Segment(3, 5, 8), Segment(5, 6, 6), Segment(6, 8, 8), Segment(8, 9, 9)), 6
)


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, **terms: object) -> Tensor:
    out, _ = segment_attention(
        torch.nn.Identity(),
        query,
        key,
        value,
        None,
        segments=segments,
        scaling=0.3,
        **terms,  # type: ignore[arg-type]
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize("segments", [PACKED, TREE, *map(random_tree, range(4)), *map(long_tree, range(3))])
def test_output_and_gradients_are_those_of_a_dense_mask(segments: Segments) -> None:
    inputs = qkv(segments)
    found, expected = attend(*inputs, segments), dense(*inputs, dense_mask(segments), 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    by_output = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(found, inputs, by_output), torch.autograd.grad(expected, inputs, by_output)
    for left, right in zip(*gradients):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_gradcheck_through_a_tree() -> None:
    assert torch.autograd.gradcheck(lambda *inputs: attend(*inputs, TREE), qkv(TREE))


@pytest.mark.parametrize("window", [1, 2, 4, 100])
def test_a_window_hides_what_is_further_back_in_the_row(window: int) -> None:
    inputs = qkv(TREE)
    depth = torch.tensor([0, 1, 2, 2, 3, 4, 4, 5, 2])
    mask = dense_mask(TREE) & (depth[:, None] - depth < window)
    torch.testing.assert_close(attend(*inputs, TREE, sliding_window=window), dense(*inputs, mask, 0.3))


def test_scores_are_capped() -> None:
    query, key, value = qkv(PACKED)
    found = attend(query, key, value, PACKED, softcap=0.5)
    keys, values = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = 0.5 * torch.tanh(query @ keys.transpose(2, 3) * 0.3 / 0.5)
    expected = scores.masked_fill(~dense_mask(PACKED), -torch.inf).softmax(-1) @ values
    torch.testing.assert_close(found, expected)


def test_bfloat16_is_as_near_as_its_rounding_and_accepts_queries_in_float32() -> None:
    query, key, value = (each.detach() for each in qkv(TREE, torch.bfloat16))
    found = attend(query.float(), key.float(), value, TREE)
    expected = dense(query.double(), key.double(), value.double(), dense_mask(TREE), 0.3)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.03)


@pytest.mark.parametrize(
    "segments", [long_tree(0), Segments((Segment(0, 1600, 1600),), 1600)], ids=["tree", "long row"]
)
def test_gradients_in_bfloat16_are_as_near_as_its_rounding(segments: Segments) -> None:
    inputs = [each.detach().requires_grad_() for each in qkv(segments, torch.bfloat16)]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    found, expected = attend(*inputs, segments), dense(*exact, dense_mask(segments), 0.3)  # type: ignore[call-arg]
    by_output = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    gradients = torch.autograd.grad(found, inputs, by_output), torch.autograd.grad(expected, exact, by_output.double())
    for left, right in zip(*gradients):
        assert left.dtype == torch.bfloat16
        assert (left.double() - right).norm() < 6e-3 * right.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    "terms", [{}, {"window": 2}, {"window": 130}, {"softcap": 0.7}, {"window": 40, "softcap": 2.0}], ids=str
)
@pytest.mark.parametrize("segments", [PACKED, TREE, random_tree(0), long_tree(0), long_tree(1)])
def test_flex_attention_with_the_block_mask_of_a_tree(segments: Segments, terms: dict[str, Any]) -> None:
    """Forward only, uncompiled: what can be checked of it without a device."""
    query, key, value = (each.detach().float() for each in qkv(segments))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = flex(query, key, value, segments, scale=0.3, compiled=False, **terms)
    torch.testing.assert_close(found, masked_attention(query, key, value, segments, scale=0.3, **terms))


class OnCuda:
    """Stands for attention's inputs on a device, where there is none."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.dtype, self.shape = tensor, tensor.dtype, tensor.shape
        self.device = torch.device("cuda")


@pytest.mark.parametrize(
    ("segments", "dtype", "window", "softcap", "backend"),
    [
        (PACKED, torch.bfloat16, None, None, "varlen"),
        (PACKED, torch.float16, None, None, "varlen"),
        (PACKED, torch.bfloat16, 3, None, "varlen, window 3"),
        (PACKED, torch.bfloat16, 5, None, "varlen"),  # no row is longer
        (PACKED, torch.bfloat16, 3, 30.0, "flex, window 3, cap 30.0"),
        (PACKED, torch.float32, None, None, "flex"),
        (PACKED, torch.float32, 3, None, "flex, window 3"),
        (TREE, torch.bfloat16, None, None, "flex"),
        (TREE, torch.bfloat16, 3, None, "flex, window 3"),
        (TREE, torch.float32, None, 30.0, "flex, cap 30.0"),
    ],
)
def test_what_runs_on_cuda(
    segments: Segments,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never the plain products, which multiply everything with everything."""

    def named(name: str, window: int | None = None, softcap: float | None = None, **_: object) -> str:
        terms = [f"window {window}"] * (window is not None) + [f"cap {softcap}"] * (softcap is not None)
        return ", ".join([name, *terms])

    monkeypatch.setattr(attention, "varlen", lambda *_, **terms: named("varlen", **terms))
    monkeypatch.setattr(attention, "flex", lambda *_, **terms: named("flex", **terms))
    inputs = [OnCuda(each.detach()) for each in qkv(segments, dtype, size=16)]
    found = attention._attend(*inputs, segments, scale=0.3, window=window, softcap=softcap, read=None)  # type: ignore[arg-type]
    assert found == backend


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "options", [frozenset(("enable_gqa", "num_splits")), frozenset()], ids=["torch 2.12", "torch 2.11"]
)
def test_packed_rows_are_handed_to_the_variable_length_kernel(
    options: frozenset[str], deterministic: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself runs on CUDA alone: here a function of its signature computes what it promises."""
    signature = inspect.signature(attention.varlen_attn)

    def computed(*args: Any, **kwargs: Any) -> Tensor:
        assert not {"enable_gqa", "num_splits"} & kwargs.keys() - options  # a torch without them raises TypeError
        given = signature.bind(
            *args, **{name: kwargs[name] for name in kwargs if name in signature.parameters}
        ).arguments
        assert (given["max_q"], given["max_k"]) == (5, 5)
        assert ("num_splits" in kwargs) == ("num_splits" in options)
        assert kwargs.get("num_splits") == (1 if deterministic and options else None)
        left, right = given["window_size"]
        assert right == 0
        assert given["cu_seq_q"].tolist() == given["cu_seq_k"].tolist() == [0, 3, 4, 9]
        assert given["cu_seq_q"].dtype == torch.int32
        query, key, value = (given[name].transpose(0, 1)[None] for name in ("query", "key", "value"))
        back = torch.arange(5)[:, None] - torch.arange(5)
        seen = (back >= 0) & (back <= left) if left >= 0 else back >= 0
        rows = [
            functional.scaled_dot_product_attention(
                *(each[:, :, start:stop] for each in (query, key, value)),
                attn_mask=seen[: stop - start, : stop - start],
                scale=given["scale"],
                enable_gqa=kwargs.get("enable_gqa", False),
            )
            for start, stop in pairwise(given["cu_seq_q"].tolist())
        ]
        return torch.cat(rows, dim=2)[0].transpose(0, 1)

    monkeypatch.setattr(attention, "varlen_attn", computed)
    monkeypatch.setattr(attention, "VARLEN_OPTIONS", options)
    monkeypatch.setattr(attention, "is_deterministic", lambda: deterministic)
    query, key, value = (each.detach().float() for each in qkv(PACKED))
    found = attention.varlen(query, key, value, PACKED, scale=0.3, window=window)
    torch.testing.assert_close(found, masked_attention(query, key, value, PACKED, scale=0.3, window=window))


def test_a_model_that_drops_the_layout_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Identity does not hand the layout.*trainer.layout=padded"):
        segment_attention(torch.nn.Identity(), *qkv(TREE), None)


@pytest.mark.parametrize("terms", [{"s_aux": torch.zeros(4)}, {"dropout": 0.1}])
def test_attention_with_another_term_is_refused(terms: dict[str, object]) -> None:
    with pytest.raises(ModelError, match="not known to merged layouts"):
        attend(*qkv(TREE), TREE, **terms)


def test_several_rows_of_one_segment_attend_each_to_itself() -> None:
    """Padded rows of which several ranks have heads; the accelerator's way is taken on the CPU here."""
    segments = Segments((Segment(0, 9, 9),), 9)
    rows = [tuple(each.detach() for each in qkv(segments)), tuple(each.detach() + 0.5 for each in qkv(segments))]
    together = [torch.cat(pair) for pair in zip(*rows)]
    expected = torch.cat([dense(*row, dense_mask(segments), 0.3) for row in rows])
    torch.testing.assert_close(attend(*together, segments), expected)
    torch.testing.assert_close(_attend_on_cuda(*together, segments, scale=0.3), expected)
    half = _attend_on_cuda(*(each.bfloat16() for each in together), segments, scale=0.3)
    torch.testing.assert_close(half.double(), expected, rtol=0, atol=0.03)
