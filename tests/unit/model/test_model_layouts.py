"""Layouts on unmodified models of several families: exact, or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyrl_train.batch.layouts import LAYOUTS
from skyrl_train.errors import ModelError
from skyrl_train.model.layouts import check_layouts, supported_layout
from tests.support.model_layouts import EXACT, build, states_and_gradient, tree

REFUSED = [
    ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}, "longest row"),
    ("mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, "expand": 2}, "layers, which mix rows"),
    ("qwen3_next", {"num_experts": 2, "num_experts_per_tok": 1, "layer_types": None}, "layers, which mix rows"),
]


@pytest.mark.parametrize(
    ("kind", "extra"), EXACT, ids=lambda value: value if isinstance(value, str) else ",".join(value)
)
def test_every_layout_is_exact(kind: str, extra: dict[str, Any]) -> None:
    model, rows = build(kind, extra), tree()
    check_layouts(model, name=kind)
    expected, expected_gradient = states_and_gradient(model, LAYOUTS["padded"](rows))
    for name in ("packed", "prefix_shared"):
        states, gradient = states_and_gradient(model, LAYOUTS[name](rows))
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)
        assert float((gradient - expected_gradient).norm() / expected_gradient.norm()) < 1e-5


@pytest.mark.parametrize(
    ("kind", "extra", "reason"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_model_that_would_mix_rows_is_refused(kind: str, extra: dict[str, Any], reason: str) -> None:
    model = build(kind, extra)
    with pytest.raises(ModelError, match=reason) as refusal:
        supported_layout(model, "packed", name="some/model")
    assert "Set trainer.layout=padded" in str(refusal.value)
    assert supported_layout(model, "auto", name="some/model") == "padded"
    assert supported_layout(model, "padded", name="some/model") == "padded"


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    model, layout = build("qwen2", {}), LAYOUTS["prefix_shared"](tree())
    expected = states_and_gradient(model, layout)[1]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    torch.testing.assert_close(states_and_gradient(model, layout)[1], expected)


def test_the_model_may_change_between_layouts() -> None:
    model, rows = build("mistral", {"sliding_window": 4}), tree()
    first = states_and_gradient(model, LAYOUTS["padded"](rows))[0]
    states_and_gradient(model, LAYOUTS["prefix_shared"](rows))
    assert torch.equal(states_and_gradient(model, LAYOUTS["padded"](rows))[0], first)


def test_ranks_that_share_forwards_ask_of_a_model_what_packed_rows_do() -> None:
    assert supported_layout(build("qwen2", {}), "padded", name="some/model", sequence_parallel_size=4) == "padded"
    with pytest.raises(ModelError, match=r"=3 must divide its 4 attention heads.*Try 1 or 2 or 4"):
        supported_layout(build("qwen2", {}), "auto", name="some/model", sequence_parallel_size=3)
    kind, extra, reason = REFUSED[0]
    for layout in ("padded", "auto"):
        with pytest.raises(ModelError, match=f"{reason}.*strategy.sequence_parallel_size=1 in place of 2"):
            supported_layout(build(kind, extra), layout, name="some/model", sequence_parallel_size=2)


def test_attention_over_chunks_is_refused() -> None:
    model = build("qwen3", {})
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ModelError, match="chunked_attention"):
        check_layouts(model, name="some/model")
