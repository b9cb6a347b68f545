"""The last layer computed where it is read: fewer positions, the same numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from skyrl_train.batch import TrainingInputBatch, batch_of_lengths, loss_tokens
from skyrl_train.batch.layouts import LAYOUTS, Segment, states_before
from skyrl_train.config.models import LoraConfig
from skyrl_train.errors import BatchError
from skyrl_train.model.last_layer import narrow_last_layer, reading
from skyrl_train.model.layers import joined_attention as module
from skyrl_train.model.layers.attention import READ
from skyrl_train.model.layers.joined_attention import joined_attention, parts_of_queries
from skyrl_train.model.layouts import hidden_states
from skyrl_train.model.lora.adapter import add_adapter
from tests.support.attention_cases import dense, dense_mask, long_tree, qkv, random_tree
from tests.support.model_layouts import EXACT, build, tree

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention leaves queries out of rows as short as those of these tests."""
    monkeypatch.setattr(module, "_SHORTEST_RUN", 1)


def partly_marked() -> TrainingInputBatch:
    """Tokens from each row's sixth on are scored."""
    rows = tree()
    starts = torch.repeat_interleave(rows.row_offsets[:-1], rows.lengths)
    return rows.with_columns(loss_mask=torch.arange(rows.num_tokens) - starts >= 5)


def read_states(model: Any, rows: TrainingInputBatch, layout: str, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The states before scored tokens, and the gradient of a sum over them."""
    model.zero_grad()
    computed = LAYOUTS[layout](rows)
    with reading(model, rows, computed):
        states = hidden_states(model, computed)[states_before(loss_tokens(rows), computed)[1]]
        (states * weights).sum().backward()
    found = [p.grad.flatten() for p in model.base_model.parameters() if p.grad is not None]
    return states.detach(), torch.cat(found)


def require_equal(model: Any, layout: str) -> None:
    rows = partly_marked()
    weights = torch.randn(int(rows["loss_mask"].sum()), 32, generator=torch.Generator().manual_seed(1))
    expected, expected_gradient = read_states(model, rows, layout, weights)
    narrow_last_layer(model)
    found, gradient = read_states(model, rows, layout, weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert float((gradient - expected_gradient).norm() / expected_gradient.norm()) < 1e-5


@contextmanager
def counted(block: nn.Module) -> Iterator[dict[str, list[int]]]:
    """How many positions each linear layer of `block` computes, call by call."""
    names = {part.weight: name for name, part in block.named_modules() if isinstance(part, nn.Linear)}
    counts: dict[str, list[int]] = defaultdict(list)
    linear = functional.linear

    def counting(inputs: Tensor, weight: nn.Parameter, bias: Tensor | None = None) -> Tensor:
        if weight in names:
            counts[names[weight]].append(inputs.numel() // inputs.shape[-1])
        return linear(inputs, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "linear", counting)
        yield counts


@pytest.mark.parametrize("layout", ["padded", "packed", "prefix_shared"])
@pytest.mark.parametrize(
    ("kind", "extra"),
    [*EXACT, ("qwen3_moe", MOE), ("mixtral", {"num_local_experts": 4})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_family_reads_the_same(kind: str, extra: dict[str, Any], layout: str) -> None:
    require_equal(build(kind, extra), layout)


def test_layers_recomputed_in_the_backward_read_the_same_positions() -> None:
    model = build("qwen3", {})
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    require_equal(model.train(), "prefix_shared")


def test_the_last_layer_alone_computes_fewer_positions() -> None:
    model, rows = build("qwen2", {}), partly_marked()
    narrow_last_layer(model)
    narrow_last_layer(model)
    computed = LAYOUTS["prefix_shared"](rows)
    num_read = len(torch.unique(states_before(loss_tokens(rows), computed)[1]))
    assert 0 < num_read < computed.num_positions
    with counted(model.model) as counts:
        with reading(model, rows, computed):
            hidden_states(model, computed)
        hidden_states(model, computed)
    for name, found in counts.items():
        narrowed = name.startswith("layers.1.") and name not in (
            "layers.1.self_attn.k_proj",
            "layers.1.self_attn.v_proj",
        )
        assert found == [num_read if narrowed else computed.num_positions, computed.num_positions], name
    assert len(counts) == 14


def test_where_nearly_all_positions_are_read_all_are_computed() -> None:
    model, place = build("qwen2", {}), torch.arange(40)
    narrow_last_layer(model)
    rows = batch_of_lengths([40]).with_columns(input_ids=place.int())
    for first, leaves_out in [(1, False), (15, False), (16, True)]:
        marked = rows.with_columns(loss_mask=place >= first)
        with reading(model, marked, LAYOUTS["packed"](marked)):
            assert (getattr(model, READ).value is not None) == leaves_out
    marked = rows.with_columns(loss_mask=place >= 0)
    with pytest.raises(BatchError, match="first token"), reading(model, marked, LAYOUTS["packed"](marked)):
        pass


def test_blocks_that_drop_by_position_see_all_of_them() -> None:
    model = build("qwen2", {})
    add_adapter(model, LoraConfig(rank=2, dropout=0.5, targets=("q_proj", "down_proj")), seed=0)
    narrow_last_layer(model)
    rows = partly_marked()
    computed = LAYOUTS["packed"](rows)
    with counted(model.model.layers[-1]) as counts, reading(model, rows, computed):
        hidden_states(model, computed)
    whole = [computed.num_positions]
    assert all(found == whole for name, found in counts.items() if "o_proj" not in name)
    assert counts["self_attn.o_proj"] != whole


@pytest.mark.slow
def test_a_compiled_layer_is_left_alone() -> None:
    model = build("qwen2", {})
    model.model.layers[-1].compile(dynamic=True)
    narrow_last_layer(model)
    assert not hasattr(model, READ)


@pytest.mark.parametrize("longest_causal", [2, 96])
@pytest.mark.parametrize("seed", range(6))
def test_attention_of_some_queries(seed: int, longest_causal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_CAUSAL", longest_causal)
    segments = long_tree(seed) if seed > 3 else random_tree(seed)
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(segments.num_positions, generator=generator) < (0.3, 0.7)[seed % 2]
    positions = kept.nonzero().squeeze(1)
    inputs = qkv(segments)
    parts = parts_of_queries(segments.segments, positions.tolist())
    assert parts is not None
    assert sum(part.high - part.low for part in parts.calls if not part.joins) == len(positions)
    found = joined_attention(inputs[0].index_select(2, positions), inputs[1], inputs[2], parts, scale=0.3)
    expected = dense(*inputs, dense_mask(segments), 0.3).index_select(2, positions)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    by_output = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad(found, inputs, by_output), torch.autograd.grad(expected, inputs, by_output)
    for left, right in zip(*gradients):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12)


def test_runs_too_short_to_be_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHORTEST_RUN", 4)
    row = (Segment(0, 12, 12),)
    assert parts_of_queries(row, range(2, 12)) is not None
    assert parts_of_queries(row, range(0, 12, 2)) is None
