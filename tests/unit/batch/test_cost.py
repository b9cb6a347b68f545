"""What forwards cost, from a model's configuration and its device's rates."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_train.batch.layouts.cost import CPU, CostModel, DeviceRates, Measured, ModelShape, rates_file, rates_of

EQUAL = DeviceRates(linear_flops=1e12, attention_flops=1e12, kernel_s=0.0, read_bytes=1e12)
DENSE_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
EXPERTS = {
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 6,
    "intermediate_size": 20,
    "moe_intermediate_size": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 10,
}


def test_a_dense_model_computes_its_parameters_twice_for_each_token() -> None:
    shape = ModelShape.of_config(DENSE_7B)
    assert shape.linear_flops_per_token / 2 == 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert shape.attention_flops_per_pair == 4 * 28 * 3584
    assert shape.head_flops_per_token == 2 * 3584 * 152064


@pytest.mark.parametrize(
    ("others", "width"),
    [
        ({}, 3 * 2 * 4),
        ({"shared_expert_intermediate_size": 5}, 3 * (2 * 4 + 5)),
        ({"n_shared_experts": 2}, 3 * (2 * 4 + 2 * 4)),
        ({"first_k_dense_replace": 1}, 20 + 2 * 2 * 4),
        ({"mlp_only_layers": [0, 2]}, 20 + 2 * 4 + 20),
        ({"decoder_sparse_step": 2}, 20 + 2 * 4 + 20),
    ],
)
def test_of_experts_those_count_that_a_token_passes(others: dict[str, Any], width: int) -> None:
    projections = 3 * 8 * 6 * (2 * 2 + 2 * 2)
    assert ModelShape.of_config(EXPERTS | others).linear_flops_per_token == 2 * (projections + 3 * 8 * width)


def test_of_several_models_in_one_the_text_model_counts() -> None:
    assert ModelShape.of_config({"text_config": DENSE_7B, "hidden_size": 1}) == ModelShape.of_config(DENSE_7B)


def attention_over_linear(cost: CostModel) -> float:
    """Of a row of 32,768 tokens."""
    return 32768 / 2 * cost.per_pair / cost.per_position


def test_attention_over_linear_layers_is_that_of_the_model() -> None:
    """Of operations, forward and backward: 0.50 in a forward, where attention's backward computes its scores again."""
    cost = CostModel.of_model(ModelShape.of_config(DENSE_7B), EQUAL)
    assert attention_over_linear(cost) == pytest.approx(0.504 * 3.5 / 3, rel=1e-3)
    # The rule of thumb `1 / (12 h)` for a token and its row's length, of hidden sizes 3584 and 2048.
    assert pytest.approx(0.762, rel=1e-3) == 32768 / (12 * 3584)
    assert attention_over_linear(CostModel()) == pytest.approx(32768 / (12 * 2048))


def test_slower_attention_costs_more_and_a_mixture_of_experts_has_more_of_it() -> None:
    slow = DeviceRates(linear_flops=1e12, attention_flops=5e11, kernel_s=0.0, read_bytes=1e12)
    shape = ModelShape.of_config(DENSE_7B)
    assert CostModel.of_model(shape, slow).per_pair == 2 * CostModel.of_model(shape, EQUAL).per_pair
    few_active = ModelShape.of_config(DENSE_7B | {"num_experts_per_tok": 8, "moe_intermediate_size": 768})
    assert few_active.attention_flops_per_pair == shape.attention_flops_per_pair
    assert few_active.linear_flops_per_token < shape.linear_flops_per_token


def test_a_device_is_known_by_its_name() -> None:
    assert rates_of("cpu") is CPU
    assert rates_of("NVIDIA H100 80GB HBM3") is not rates_of("NVIDIA A100-SXM4-80GB")
    assert rates_of("another accelerator") is rates_of("")


def test_each_attention_kernel_has_its_own_rate_and_on_a_cpu_they_are_one() -> None:
    """`auto` prices a prefix tree by flex attention, whose backward is stated as half as fast as flash attention's."""
    shape = ModelShape.of_config(DENSE_7B)
    pairs = np.array([1e9])
    for name, times in (("cpu", 1.0), ("NVIDIA H200", 6 / 3.5)):
        cost = CostModel.of_model(shape, rates_of(name))
        packed, tree = (cost.of(pairs * 0, pairs, pairs * 0, layout=each) for each in ("packed", "prefix_shared"))
        assert tree / packed == pytest.approx(times)
        assert cost.of_rows(np.array([10**6]), in_tree=True) >= cost.of_rows(np.array([10**6]))
    assert CostModel.of_model(shape, rates_of("cpu")).tree_pair == 1.0, "what is planned on a CPU is as before"
    slower = CostModel.of_model(shape, replace(EQUAL, flex_flops=1e11))
    assert slower.tree_pair == 10.0


def test_rates_that_a_run_recorded_come_before_those_of_its_device() -> None:
    recorded = {**asdict(EQUAL), "flex_flops": 2e12, "measured_on": "2026-01-01"}
    assert rates_of("NVIDIA H200", recorded) == replace(EQUAL, flex_flops=2e12)
    assert CostModel.of_config(DENSE_7B, device="cpu", recorded=recorded).tree_pair == 0.5


def updates(**rates: float) -> Measured:
    """Of `layout_size_form`, in tokens a second."""
    found = []
    for name, rate in rates.items():
        layout, size, form = name.rsplit("_", 2)
        key = {"layout": layout, "hidden_size": int(size), "checkpointing": True, "positions": 16384}
        found.append({**key, "compiled": form == "compiled", "tokens_per_s": rate})
    return Measured(updates=tuple(found))


def test_what_compiling_gains_is_read_at_the_nearest_size_that_was_measured_both_ways() -> None:
    measured = updates(
        packed_896_eager=100.0,
        packed_896_compiled=120.0,
        packed_3584_eager=10.0,
        packed_3584_compiled=9.0,
        prefix_shared_896_eager=100.0,
    )
    assert measured.compiled_gain(1024, "packed") == pytest.approx(1.2)
    assert measured.compiled_gain(4096, "packed") == pytest.approx(0.9)
    assert measured.compiled_gain(1024, "prefix_shared") == 0.0
    assert Measured().compiled_gain(1024, "packed") == 0.0


@pytest.mark.parametrize("content", ["", "{}", '{"pieces": [], "rates": 3', "[]"])
def test_a_damaged_file_of_rates_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setenv("SKYRL_TRAIN_CACHE", str(tmp_path))
    file = rates_file("NVIDIA H100 80GB HBM3")
    assert file == tmp_path / "rates" / "NVIDIA-H100-80GB-HBM3.json"
    file.parent.mkdir()
    file.write_text(content)
    assert Measured.of_device("NVIDIA H100 80GB HBM3") == Measured()


def test_a_configuration_in_other_words_has_the_default() -> None:
    assert CostModel.of_config({"n_embd": 768}, device="cpu") == CostModel()


def test_rows_cost_their_tokens_and_their_square() -> None:
    cost = CostModel(per_position=2.0, per_pair=3.0, per_call=100.0)
    assert cost.of_rows(np.array([0, 4])).tolist() == [0, 2 * 4 + 3 * 4 * 4 / 2]
