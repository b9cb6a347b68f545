"""What a run leaves as a model: types, modes of files, and an adapter that PEFT finds the base of."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import LoraConfig, ModelConfig
from skyrl_train.learner import ModelEngine, PolicyLearner
from skyrl_train.model.causal_lm import load_causal_lm, quiet_transformers
from skyrl_train.model.files.export import export_model, source_types
from skyrl_train.model.lora.adapter import adapter_tensors, add_adapter
from tests.support.learner_cases import fixed_rows, save_tiny_model

NORM = "model.norm.weight"


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """A tiny model whose files hold bfloat16, but for one norm."""
    folder = save_tiny_model(tmp_path / "half", tokenizer=True)
    weights = load_file(folder / "model.safetensors")
    stored = {name: value if name == NORM else value.bfloat16() for name, value in weights.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def shared_umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def learner_of(model: ModelConfig) -> PolicyLearner:
    engine = ModelEngine(load_causal_lm(model, "cpu"), name="policy", micro_batching=fixed_rows(1))
    return PolicyLearner(engine, model=model, algorithm=AlgorithmConfig(), temperature=1.0)


@pytest.mark.usefixtures("shared_umask")
def test_an_export_has_the_types_of_its_source_and_the_modes_of_other_files(half: Path, tmp_path: Path) -> None:
    learner_of(ModelConfig(path=str(half))).export_hf(tmp_path / "export")
    before, after = load_file(half / "model.safetensors"), load_file(tmp_path / "export" / "model.safetensors")
    assert {name: value.dtype for name, value in after.items()} == {name: value.dtype for name, value in before.items()}
    assert after[NORM].dtype == torch.float32
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"
    with quiet_transformers():
        assert (
            AutoModelForCausalLM.from_pretrained(tmp_path / "export").model.embed_tokens.weight.dtype == torch.bfloat16
        )
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in (tmp_path / "export").rglob("*") if file.is_file()}
    assert set(modes.values()) == {"0o640"}, modes


def test_an_export_can_stay_in_float32(half: Path, tmp_path: Path) -> None:
    learner = learner_of(ModelConfig(path=str(half), export_dtype="float32"))
    learner.export_hf(tmp_path / "export")
    assert {value.dtype for value in load_file(tmp_path / "export" / "model.safetensors").values()} == {torch.float32}
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "float32"


def test_types_that_are_no_floating_numbers_of_ours_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    stored = {"packed": torch.zeros(900, dtype=torch.uint8), "scale": torch.zeros(3, dtype=torch.float16)}
    save_file(stored, tmp_path / "model.safetensors")
    assert source_types(ModelConfig(path=str(tmp_path))) == ({"scale": torch.float16}, torch.float16)


def test_the_adapter_of_the_builtin_model_loads_by_itself(tmp_path: Path) -> None:
    config = ModelConfig(lora=LoraConfig(rank=4, targets=("q_proj", "down_proj")))
    model = load_causal_lm(config, "cpu").eval()
    base = {name: value.clone() for name, value in model.state_dict().items()}
    add_adapter(model, config.lora, seed=0)
    with torch.no_grad():
        for tensor in adapter_tensors(model).values():
            tensor.normal_(std=0.1)
    export_model(
        tmp_path, load_causal_lm(replace(config, lora=LoraConfig()), "cpu"), base, config, adapter_tensors(model)
    )
    with quiet_transformers():
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    stated = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
    assert set(stated.target_modules) == {"q_proj", "down_proj"}
    assert (stated.task_type, stated.r, stated.peft_version) == ("CAUSAL_LM", 4, peft.__version__)
