"""Predicted memory: figures by hand, and against what the meter counts of the real engine."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skyrl_train.learner.memory import (
    MemorySettings,
    memory_facts,
    predict,
    predicted_peak_bytes,
    predicted_token_budget,
    resident_bytes,
)
from skyrl_train.learner.memory_facts import facts_from_config, facts_of_model

import skyrl_train.model.logprobs as logprobs
from skyrl_train.errors import MemoryLimitError, ModelError
from skyrl_train.learner import memory
from skyrl_train.memory.model_sizes import known_architectures, model_facts, read_config, weight_bytes

SMALL = {
    "model_type": "llama",
    "hidden_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "intermediate_size": 30,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}
B7 = "Qwen/Qwen2.5-7B-Instruct"


def facts(config=None, **settings):
    return memory_facts(facts_from_config(config or SMALL, name="small"), MemorySettings(**settings))


# Facts


@pytest.mark.parametrize("name", known_architectures())
def test_parameters_of_known_models_are_those_their_makers_state(name):
    config = known_architectures()[name]
    assert facts_from_config(config, name=name).parameters == config["parameters"]


@pytest.mark.parametrize("path", [B7, "someone/qwen2.5-coder-7b", "Qwen2.5-7B"])
def test_names_of_variants_are_known(path):
    assert model_facts(path).parameters == 7_615_616_512


def test_weights_to_load_are_those_of_the_files_or_else_two_bytes_a_parameter(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "b.safetensors").write_bytes(b"x" * 500)
    assert weight_bytes(str(tmp_path)) == 1500
    assert weight_bytes(B7) == 2 * 7_615_616_512
    assert weight_bytes("nobody/nothing") == 0


def test_a_longer_name_is_another_model():
    assert model_facts("meta-llama/Llama-3.2-1B-Instruct").parameters == 1_235_814_400
    with pytest.raises(ModelError, match=r"Set plan\.architecture"):
        read_config("org/Llama-3.2-11B")


def test_a_folder_with_a_config_needs_no_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 1}')
    with pytest.raises(ModelError, match="has no num_attention_heads, vocab_size"):
        model_facts(str(tmp_path))


def test_a_damaged_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        read_config(str(tmp_path))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_counts_from_a_config_are_those_of_the_model(family):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**SMALL, "model_type": family, "head_dim": 4})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert facts_from_config(config.to_dict(), name=family) == facts_of_model(model)


# Figures by hand


def test_what_lies_there_all_the_time():
    # a block: q, o 10 x 10, k, v 10 x 2, three products 10 x 30, two norms of 10; embedding 100 x 10, last norm 10
    parameters = 2 * (2 * 100 + 2 * 20 + 900 + 20) + 1000 + 10
    assert resident_bytes(facts(), training=True) == {
        "parameters": 4 * parameters,
        "gradients": 4 * parameters,
        "optimizer state": 8 * parameters,
    }
    assert resident_bytes(facts(optimizer="none"), training=False) == {"parameters": 4 * parameters}
    assert resident_bytes(facts(optimizer="sgd"), training=False) == {"parameters": 4 * parameters}


def test_shards_are_equal_parts_and_may_lie_in_host_memory():
    whole, part = (resident_bytes(facts(strategy=s, num_ranks=4), training=True) for s in ("ddp", "fsdp2"))
    assert part == {kind: -(-count // 4) for kind, count in whole.items()}
    assert resident_bytes(facts(strategy="fsdp2", num_ranks=4, cpu_offload=True), training=True) == {}


def test_an_adapter_alone_has_gradients_and_state():
    # ranks times inputs and outputs: q 10 + 10, k and v 10 + 2, o 10 + 10, gate and up 10 + 30, down 30 + 10
    adapter = 8 * 2 * (20 + 12 + 12 + 20 + 40 + 40 + 40)
    found = resident_bytes(facts(lora_rank=8), training=True)
    assert found["gradients"] == 4 * adapter
    assert found["optimizer state"] == 8 * adapter


def test_activations_of_a_layer_in_float32():
    # per position: norms 2 x (10 + 10), their inputs to linear layers 2 x 10, q 10, k 2, v 2, output 10, four times 30,
    # log-sum-exps 5 and two inverse norms; once more a norm at the end, and cosines and sines of 2
    per_layer = 4 * (40 + 20 + 10 + 2 + 2 + 10 + 120 + 5 + 2)
    saved = facts().backbone.saved
    assert saved.per_position == 2 * per_layer + 4 * (10 + 10 + 1) + 4 * 2 * 2
    assert (saved.constant, saved.per_pair) == (0, 0)


def test_probabilities_of_eager_attention_grow_with_the_square():
    assert facts(eager=True).backbone.saved.per_pair == 2 * 5 * 4
    assert facts(eager=True, dtype="bfloat16").backbone.saved.per_pair == 2 * 5 * (4 + 2)


def test_checkpointing_keeps_one_hidden_state_a_layer():
    assert facts(checkpointing=True).backbone.saved.per_position == 2 * 4 * 10 + 4 * 21 + 4 * 4


def test_qwen_7b_sharded_over_eight_devices():
    sharded = MemorySettings(strategy="fsdp2", num_ranks=8, dtype="bfloat16", checkpointing=True)
    found = predict(memory_facts(model_facts(B7), sharded), "training", 8, 8192, 65_536)
    assert found.kinds["parameters"] == pytest.approx(4 * 7_615_616_512 / 8, abs=1)
    assert found.kinds["optimizer state"] == pytest.approx(8 * 7_615_616_512 / 8, abs=1)
    # embedding and head of 152,064 x 3,584, in bfloat16, and up to two layers of 233,057,792
    assert found.kinds["gathered parameters"] == 2 * (2 * 152_064 * 3584 + 3584 + 2 * 233_057_792)
    assert found.moment == "in the topmost layer's backward"
    assert 40e9 < found.peak_bytes < 60e9


def test_kinds_add_up_to_the_peak():
    found = predict(facts(dtype="bfloat16"), "training", 3, 50, 150)
    assert found.peak_bytes == sum(found.kinds.values())
    assert all(count > 0 for count in found.kinds.values())
    assert predicted_peak_bytes(facts(dtype="bfloat16"), 3, 50, 150, training=True) == found.peak_bytes


def test_constants_are_those_of_the_modules_that_have_them():
    assert memory.TOKENS_PER_TILE == logprobs.TOKENS_PER_TILE
    assert memory.ELEMENTS_PER_TILE == logprobs.ELEMENTS_PER_TILE
    assert memory.ELEMENTS_PER_TILE_ACCELERATOR == logprobs.ELEMENTS_PER_TILE_ACCELERATOR
    assert memory.TOKENS_PER_PRODUCT == logprobs.TOKENS_PER_PRODUCT


@pytest.mark.parametrize("module", ["memory", "memory_blocks", "memory_facts", "architectures"])
def test_nothing_imports_torch_before_it_is_needed(module):
    tree = ast.parse(Path(memory.__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    imported = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not any("torch" in ast.unparse(node) or "transformers" in ast.unparse(node) for node in imported)


# The budget

settings_of_any_kind = st.builds(
    MemorySettings,
    strategy=st.sampled_from(["single", "ddp", "fsdp2"]),
    num_ranks=st.integers(1, 8),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    checkpointing=st.booleans(),
    eager=st.booleans(),
    lora_rank=st.sampled_from([0, 4]),
    head=st.sampled_from(["logprobs", "values"]),
    accelerator=st.booleans(),
)


@given(settings_of_any_kind, st.sampled_from(["training", "scoring"]), st.data())
def test_micro_batches_under_the_predicted_budget_fit(settings, phase, data):
    found = memory_facts(facts_from_config(SMALL, name="small"), settings)
    longest = 100
    limit = int(predict(found, phase, 1, longest, longest).peak_bytes * data.draw(st.floats(1.0, 5.0)))
    budget = predicted_token_budget(found, phase, limit, longest)
    length = data.draw(st.integers(1, longest))
    rows = max(1, budget // length)
    assert predict(found, phase, rows, length, rows * length).peak_bytes <= limit
    over = budget + 1
    assert predict(found, phase, -(-over // longest), longest, over).peak_bytes > limit


def test_a_row_that_cannot_fit_is_named():
    with pytest.raises(MemoryLimitError, match=r"one row of 64 tokens takes \d+ bytes in training"):
        predicted_token_budget(facts(), "training", 1000, 64)


# Against the engine


def test_predictions_are_within_a_few_percent_of_what_the_engine_holds(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "scripts" / "bench"))
    from memory_predict import VARIANTS, measure

    tiny = {"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "inner": 176, "vocabulary": 500}
    for case in VARIANTS:
        for found in measure(replace(case, size=replace(case.size, **tiny), lengths=(60, 60, 60))):
            assert abs(found.error) < 0.1, (case.name, found)


def test_a_traced_model_keeps_what_was_counted():
    from skyrl_train.learner.memory_trace import trace_backbone

    config = {**SMALL, "head_dim": 8, "hidden_size": 40}
    for settings in (MemorySettings(), MemorySettings(dtype="bfloat16", strategy="fsdp2", num_ranks=2)):
        traced = trace_backbone(config, settings, name="small")
        counted = memory_facts(facts_from_config(config, name="small"), settings).backbone
        assert traced.saved.per_position == pytest.approx(counted.saved.per_position, abs=16)
        assert traced.saved.per_pair == pytest.approx(0, abs=1e-6)
        assert traced.scoring[0].per_position == pytest.approx(
            max(moment.per_position for moment in counted.scoring), rel=0.1
        )


def test_a_model_that_cannot_be_traced_is_named():
    from skyrl_train.learner.memory_trace import trace_backbone

    with pytest.raises(ModelError, match=r"model path 'x': its memory cannot be predicted.*Set plan.architecture"):
        trace_backbone({**SMALL, "model_type": "no_such_family"}, MemorySettings(), name="x")
