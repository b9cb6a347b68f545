"""Adapters: what is trained, saved, merged and dropped."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.layouts import LAYOUTS, Layout
from skyrl_train.config.models import LoraConfig, ModelConfig
from skyrl_train.errors import CheckpointError, ModelError
from skyrl_train.model.causal_lm import load_causal_lm
from skyrl_train.model.lora.adapter import (
    DropoutKeys,
    KeyedDropout,
    adapter_off,
    adapter_tensors,
    add_adapter,
    as_they_are,
    base_with_adapter,
    has_adapter,
    merged_weights,
    write_adapter,
)
from tests.support.learner_cases import make_batch, save_tiny_model

LORA = LoraConfig(rank=3, alpha=6.0)
IDS = torch.arange(3, 13).unsqueeze(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def adapted(folder: Path, lora: LoraConfig = LORA, *, seed: int = 0, trained: bool = True) -> PreTrainedModel:
    """With random numbers in B, as after training."""
    model = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
    add_adapter(model, lora, seed=seed)
    if trained:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in adapter_tensors(model).items():
                if ".lora_B." in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    found: Tensor = model(input_ids=IDS).logits
    return found


def plain(folder: Path) -> PreTrainedModel:
    return load_causal_lm(ModelConfig(path=str(folder)), "cpu")


def test_a_new_adapter_changes_nothing_and_is_all_that_is_trained(folder: Path) -> None:
    model = adapted(folder, trained=False)
    assert torch.equal(logits(model), logits(plain(folder)))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(adapter_tensors(model))
    assert len(trained) == 2 * 7 * 2  # A and B of seven layers in each of two
    assert type(model) is type(plain(folder))
    assert has_adapter(model)
    assert not has_adapter(plain(folder))


def test_a_new_adapter_is_a_function_of_the_seed_and_leaves_torchs_randomness_alone(folder: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (adapter_tensors(adapted(folder, seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    name = next(name for name in first if ".lora_A." in name)
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_adapters_that_two_threads_make_at_once_are_those_of_their_seeds(folder: Path) -> None:
    seeds = range(8)
    alone = [adapter_tensors(adapted(folder, seed=seed, trained=False)) for seed in seeds]
    models = [plain(folder) for _ in seeds]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda seed: add_adapter(models[seed], LORA, seed=seed), seeds))
    for model, expected in zip(models, alone):
        assert all(torch.equal(value, expected[name]) for name, value in adapter_tensors(model).items())


def test_the_adapter_can_be_switched_off(folder: Path) -> None:
    model = adapted(folder)
    before = logits(model)
    with adapter_off(model):
        assert torch.equal(logits(model), logits(plain(folder)))
        assert all(parameter.requires_grad for parameter in adapter_tensors(model).values())
    assert torch.equal(logits(model), before)
    assert not torch.equal(before, logits(plain(folder)))
    assert all(parameter.requires_grad for parameter in adapter_tensors(model).values())


def test_merged_weights_are_a_plain_model_that_computes_the_same(folder: Path) -> None:
    model, target = adapted(folder), plain(folder)
    merged = dict(merged_weights(model, as_they_are))
    assert list(merged) == [name for name, _ in target.named_parameters()]
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(merged[name])
    torch.testing.assert_close(logits(target), logits(model), rtol=1e-4, atol=1e-5)


def test_without_an_adapter_merged_weights_are_the_parameters(folder: Path) -> None:
    model = plain(folder)
    for (name, tensor), (expected, parameter) in zip(merged_weights(model, as_they_are), model.named_parameters()):
        assert (name, tensor.data_ptr()) == (expected, parameter.data_ptr())


def test_only_the_named_layers_are_adapted(folder: Path) -> None:
    model = adapted(folder, replace(LORA, targets=("q_proj", "v_proj")))
    assert {name.split(".")[-4] for name in adapter_tensors(model)} == {"q_proj", "v_proj"}


def test_layers_that_are_not_there_are_refused_with_those_that_are(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"model.lora.targets=\['query'\] cannot be adapted.*down_proj.*q_proj"):
        adapted(folder, replace(LORA, targets=("query",)))


def test_peft_loads_a_written_adapter(folder: Path, tmp_path: Path) -> None:
    import peft

    model = adapted(folder)
    write_adapter(tmp_path, dict(adapter_tensors(model)), LORA, base=ModelConfig(path=str(folder)))
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-6)


def test_a_checkpointed_adapter_is_put_on_its_base(folder: Path) -> None:
    model = adapted(folder)
    config = ModelConfig(path=str(folder), lora=LORA)
    found = base_with_adapter(config, dict(adapter_tensors(model)))
    merged = dict(merged_weights(found, as_they_are))
    for name, tensor in merged_weights(model, as_they_are):
        assert torch.equal(merged[name], tensor)
    with pytest.raises(CheckpointError, match="as it was in that run"):
        base_with_adapter(replace(config, lora=replace(LORA, rank=4)), dict(adapter_tensors(model)))


def layouts(rows: TrainingInputBatch) -> list[Layout]:
    return [LAYOUTS[name](rows) for name in ("padded", "packed", "prefix_shared")]


def test_what_is_dropped_depends_on_the_tokens_before_and_not_on_the_layout() -> None:
    rows = make_batch([6, 9, 5])
    ids = rows["input_ids"].clone()
    ids[6:10] = ids[:4]  # the second row begins as the first
    rows = rows.with_columns(input_ids=ids)
    by_token = [DropoutKeys(0).of(rows, layout, 3).flatten()[layout.position_of_token] for layout in layouts(rows)]
    assert torch.equal(by_token[0], by_token[1])
    assert torch.equal(by_token[0], by_token[2])
    assert torch.equal(by_token[0][:4], by_token[0][6:10])
    assert len(torch.unique(by_token[0])) == len(by_token[0]) - 4


def test_what_is_dropped_changes_with_step_seed_and_layer() -> None:
    rows = make_batch([6])
    layout = layouts(rows)[0]
    keys = DropoutKeys(0)
    assert not torch.equal(keys.of(rows, layout, 1), keys.of(rows, layout, 2))
    assert not torch.equal(keys.of(rows, layout, 1), DropoutKeys(1).of(rows, layout, 1))
    keys.value = keys.of(rows, layout, 1)
    ones = torch.ones(1, 6, 64)
    assert not torch.equal(KeyedDropout(0.5, keys, 1)(ones), KeyedDropout(0.5, keys, 2)(ones))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_stated_share_is_dropped_and_the_mean_stays(p: float) -> None:
    rows = make_batch([400])
    keys = DropoutKeys(0)
    keys.value = keys.of(rows, layouts(rows)[1], 1)
    out = KeyedDropout(p, keys, 7)(torch.ones(1, 400, 500))
    assert float((out == 0).double().mean()) == pytest.approx(p, abs=0.005)
    assert float(out.double().mean()) == pytest.approx(1.0, abs=0.03)
    by_feature, by_position = (out == 0).double().mean(1), (out == 0).double().mean(2)
    assert float(by_feature.std()) < 0.05
    assert float(by_position.std()) < 0.05


def test_outside_training_nothing_is_dropped() -> None:
    x = torch.rand(2, 3, 4)
    assert KeyedDropout(0.5, DropoutKeys(0), 1)(x) is x
