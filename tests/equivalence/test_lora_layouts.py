"""With an adapter the laws hold too: one gradient for all layouts, dropout included; what is saved is enough to go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from skyrl_train.batch.steps import MiniBatch, close_mini_batch
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.config.models import LoraConfig, ModelConfig
from skyrl_train.errors import ModelError
from skyrl_train.learner import BaseOfAdapter, PolicyLearner
from skyrl_train.model import load_causal_lm
from skyrl_train.model.lora import adapter_tensors, add_adapter
from tests.support.learner_cases import make_batch, save_tiny_model, supervised_learner

LORA = LoraConfig(rank=4, alpha=8.0, dropout=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True)


def learner_of(
    folder: Path, layout: LayoutChoice = "padded", *, tokens: int = 1000, lora: LoraConfig = LORA, double: bool = True
) -> PolicyLearner:
    model_config = ModelConfig(path=str(folder), lora=lora)
    model = load_causal_lm(model_config, "cpu")
    add_adapter(model, lora, seed=0)
    if double:
        model.double()
    return supervised_learner(model, model_config, layout=layout, tokens=tokens)


def mini_batch() -> MiniBatch:
    batch = make_batch([9, 14, 5, 11, 7, 20])
    return close_mini_batch(batch, loss_reduction="token_mean", max_sequence_length_for_norm=1)


def step(learner: PolicyLearner) -> None:
    learner.forward_backward(mini_batch())
    learner.optim_step()


def gradient(learner: PolicyLearner) -> dict[str, Tensor]:
    learner.forward_backward(mini_batch())
    found = {name: p.grad.clone() for name, p in learner.engine.parameters.items() if p.grad is not None}
    learner.engine.zero_grad()
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("layout", "tokens"), [("padded", 25), ("packed", 1000), ("packed", 30), ("prefix_shared", 40)]
)
def test_every_layout_has_the_same_gradient(folder: Path, layout: LayoutChoice, tokens: int, dropout: float) -> None:
    lora = replace(LORA, dropout=dropout)
    plain, other = learner_of(folder, lora=lora), learner_of(folder, layout, tokens=tokens, lora=lora)
    for learner in (plain, other):
        step(learner)  # B is no longer 0, so that A has a gradient
    expected, found = gradient(plain), gradient(other)
    assert expected.keys() == found.keys() == adapter_tensors(plain.engine.model).keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-8, atol=1e-11)


def test_dropout_is_on_in_training_only(folder: Path) -> None:
    learner = learner_of(folder)
    step(learner)
    batch = mini_batch().batch
    assert torch.equal(learner.forward(batch), learner.forward(batch))
    with_dropout, without = learner_of(folder), learner_of(folder, lora=replace(LORA, dropout=0.0))
    assert any(not torch.equal(a, b) for a, b in zip(gradient(with_dropout).values(), gradient(without).values()))


def test_a_checkpoint_holds_the_adapter_alone_and_training_goes_on_identically(folder: Path, tmp_path: Path) -> None:
    alone = learner_of(folder, double=False)
    for _ in range(2):
        step(alone)
    alone.save(tmp_path / "policy")
    assert load_file(tmp_path / "policy" / "model.safetensors").keys() == adapter_tensors(alone.engine.model).keys()
    resumed = learner_of(folder, double=False)
    resumed.load(tmp_path / "policy")
    for learner in (alone, resumed):
        step(learner)
    for (name, expected), (_, found) in zip(alone.weights(), resumed.weights()):
        assert torch.equal(found, expected), name


def test_the_export_is_the_merged_model_and_the_adapter_beside_it(folder: Path, tmp_path: Path) -> None:
    learner = learner_of(folder, double=False)
    step(learner)
    learner.export_hf(tmp_path)
    merged = load_causal_lm(ModelConfig(path=str(tmp_path)), "cpu")
    expected = dict(learner.weights())
    for name, parameter in merged.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "tokenizer_config.json").is_file()


def test_the_reference_is_the_model_before_training(folder: Path) -> None:
    learner = learner_of(folder, double=False)
    batch = mini_batch().batch
    before = learner.forward(batch)
    reference = BaseOfAdapter(learner.forward_base)
    for _ in range(2):
        step(learner)
    assert torch.equal(reference.forward(batch), before)
    assert not torch.equal(learner.forward(batch), before)
    step(learner)  # the adapter is trained on after the reference was asked
    with pytest.raises(ModelError, match="cannot take other weights"):
        reference.load_weights(learner.weights())
