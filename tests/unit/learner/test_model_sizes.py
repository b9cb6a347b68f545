"""Sizes of models from their configs alone: of well-known ones, of folders, of every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_train.errors import ModelError
from skyrl_train.model.sizes import (
    known_architectures,
    meta_model,
    model_sizes,
    of_depth,
    read_config,
    sizes_of_model,
    weight_bytes,
)

B7 = "Qwen/Qwen2.5-7B-Instruct"
TINY = {
    "model_type": "qwen3_moe",
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 50,
}


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen3-0.6B", "Llama-3.2-1B", "SmolLM2-135M"])
def test_parameters_of_known_models_are_those_their_makers_state(name: str) -> None:
    config = known_architectures()[name]
    assert sizes_of_model(meta_model(config, name=name)).parameters == config["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("name", known_architectures())
def test_parameters_of_all_known_models_are_those_their_makers_state(name: str) -> None:
    config = known_architectures()[name]
    assert sizes_of_model(meta_model(config, name=name)).parameters == config["parameters"]


@pytest.mark.parametrize("path", [B7, "someone/qwen2.5-coder-7b", "Qwen2.5-7B"])
def test_names_of_variants_are_known(path: str) -> None:
    assert model_sizes(path).parameters == 7_615_616_512


@pytest.mark.parametrize("content", ["", "null", "[1]", '{"family": "qwen2"}'])
def test_sizes_that_were_remembered_in_another_form_are_counted_anew(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_TRAIN_CACHE", str(tmp_path))
    found = model_sizes("builtin:tiny_qwen2")
    (file,) = tmp_path.rglob("sizes-*.json")
    file.write_text(content)
    assert model_sizes("builtin:tiny_qwen2") == found


def test_sizes_that_other_code_counted_are_counted_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_TRAIN_CACHE", str(tmp_path))
    found = model_sizes("builtin:tiny_qwen2")
    (file,) = tmp_path.rglob("sizes-*.json")
    file.write_text(file.read_text().replace('"tower_layers": 0', '"tower_layers": 1'))
    assert model_sizes("builtin:tiny_qwen2").tower_layers == 1, "it is remembered"
    monkeypatch.setattr("skyrl_train.model.sizes.counts.source_stamps", lambda _folders: [])
    assert model_sizes("builtin:tiny_qwen2") == found


def test_weights_to_load_are_those_of_the_files_or_else_two_bytes_a_parameter(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "b.safetensors").write_bytes(b"x" * 500)
    assert weight_bytes(str(tmp_path)) == 1500
    assert weight_bytes(B7) == 2 * 7_615_616_512
    assert weight_bytes("nobody/nothing") == 0


def test_a_longer_name_is_another_model() -> None:
    assert model_sizes("meta-llama/Llama-3.2-1B-Instruct").parameters == 1_235_814_400
    with pytest.raises(ModelError, match=r"Set plan\.architecture"):
        read_config("org/Llama-3.2-11B")


def test_a_config_without_a_size_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 1}')
    with pytest.raises(ModelError, match="has no num_attention_heads, vocab_size"):
        model_sizes(str(tmp_path))


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        read_config(str(tmp_path))


def test_a_mixture_of_experts_is_counted_as_any_other_model() -> None:
    found = sizes_of_model(meta_model(TINY, name="tiny"))
    experts = 4 * 3 * 16 * 8 + 4 * 16  # gate, up and down of each, and the router
    attention = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 2 * 4  # queries, keys, values, output, and two norms of a head
    assert found.parameters == 3 * (experts + attention + 2 * 16) + 16 + 2 * 50 * 16
    assert found.layers_alike
    dense_first = sizes_of_model(meta_model({**TINY, "mlp_only_layers": [0]}, name="tiny"))
    assert not dense_first.layers_alike


def test_the_first_layers_are_a_model_of_their_own() -> None:
    cut = of_depth({**TINY, "layer_types": ["full_attention"] * 3}, 2)
    assert (cut["num_hidden_layers"], cut["layer_types"]) == (2, ["full_attention"] * 2)
    assert sizes_of_model(meta_model(of_depth(TINY, 2), name="tiny")).num_layers == 2


def test_a_family_that_transformers_does_not_know_is_named() -> None:
    with pytest.raises(ModelError, match="no model of model_type='no_such_family' can be built"):
        meta_model({**TINY, "model_type": "no_such_family"}, name="x")
