"""Which models ranks can compute with parts of each matrix, as told before any weight is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyrl_train.errors import ModelError
from skyrl_train.model.parallel.tensor_parallel import TensorGroup, check_divisible, cut_matrices
from skyrl_train.model.sizes.counts import meta_model

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def of_family(name: str, **changes: Any) -> Any:
    return meta_model({**SIZES, **changes, "model_type": name}, name="some/model")


BY_ROWS = {"embed_tokens", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"}
BY_COLUMNS = {"o_proj", "down_proj"}
WITH_BIASES = {"qwen2": {"q_proj", "k_proj", "v_proj"}}
"""Families whose products have biases: those of outputs that are cut are cut with them."""


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "granite"])
def test_each_matrix_of_a_family_is_cut_by_rows_or_by_columns_and_the_rest_is_whole(family: str) -> None:
    whole = {name: each.shape for name, each in of_family(family).named_parameters()}
    model = of_family(family)
    check_divisible(model, 2, name="some/model")
    cut_matrices(model, TensorGroup(None, size=2), name="some/model")
    cuts: dict[str, set[str]] = {"rows": set(), "columns": set(), "biases": set()}
    for name, parameter in model.named_parameters():
        *_, module, kind = name.split(".")
        shape = list(whole[name])
        if list(parameter.shape) == [shape[0] // 2, *shape[1:]]:
            cuts["rows" if kind == "weight" else "biases"].add(module)
        elif len(shape) > 1 and list(parameter.shape) == [shape[0], shape[1] // 2]:
            cuts["columns"].add(module)
        else:
            assert list(parameter.shape) == shape
            assert "norm" in module, "all but norms is cut"
    tied = model.config.tie_word_embeddings
    assert cuts["rows"] == (BY_ROWS - {"lm_head"} if tied else BY_ROWS)
    assert cuts["columns"] == BY_COLUMNS
    assert cuts["biases"] == WITH_BIASES.get(family, set())
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("phi3", "transformers plans 'rowwise_split_input' for its model.layers.0.self_attn.o_proj"),
        ("olmo2", "transformers plans 'colwise_gather_output' for its model.layers.0.self_attn.q_proj"),
        ("bloom", "transformers has no plan for its layers"),
        ("qwen3_moe", "transformers plans 'moe_tp_experts' for its model.layers.0.mlp.experts"),
    ],
)
def test_others_are_refused_by_what_their_plan_says(family: str, reason: str) -> None:
    with pytest.raises(ModelError, match="ranks cannot compute") as told:
        check_divisible(of_family(family), 2, name="some/model")
    assert reason in str(told.value)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, "its 6 attention heads"),
        ({}, "its 2 key and value heads"),
        ({"num_key_value_heads": 4, "vocab_size": 50}, "its 50 entries of the vocabulary"),
        ({"num_key_value_heads": 4, "intermediate_size": 66}, "its 66 features of model.layers.0.mlp.gate_proj"),
    ],
)
def test_what_ranks_do_not_divide_is_named(changes: dict[str, int], what: str) -> None:
    with pytest.raises(ModelError, match="=4 must divide") as told:
        check_divisible(of_family("qwen2", **changes), 4, name="some/model")
    assert what in str(told.value)


def test_a_rank_has_its_part_of_each_matrix_and_the_whole_of_each_norm() -> None:
    model = of_family("qwen3", tie_word_embeddings=True)
    cut_matrices(model, TensorGroup(None, size=2), name="some/model")
    shapes = {name.removeprefix("model."): list(each.shape) for name, each in model.named_parameters()}
    assert shapes["embed_tokens.weight"] == [24, 32]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert shapes["layers.0.self_attn.q_proj.weight"] == [16, 32]
    assert shapes["layers.0.self_attn.k_proj.weight"] == [8, 32]
    assert shapes["layers.0.self_attn.o_proj.weight"] == [32, 16]
    assert shapes["layers.0.mlp.down_proj.weight"] == [32, 32]
    assert shapes["layers.0.self_attn.q_norm.weight"] == [8]
    assert shapes["norm.weight"] == [32]


def test_token_ids_of_other_ranks_are_told_from_own_ones() -> None:
    is_own, local = TensorGroup(None, size=2, rank=1).own(torch.tensor([0, 5, 6, 11]), 6)
    assert is_own.tolist() == [False, False, True, True]
    assert local.tolist() == [0, 0, 0, 5]
