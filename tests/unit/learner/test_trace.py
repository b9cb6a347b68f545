"""A traced step holds, byte for byte, what the counting meter sees of the real one on a CPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import LoraConfig, ModelConfig, OptimizerConfig
from skyrl_train.errors import ModelError
from skyrl_train.learner.critic import CriticLearner
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.learner.memory.meter import CountingMeter
from skyrl_train.learner.memory.probe import Probed, Prober
from skyrl_train.learner.memory.sizing import hold_everything
from skyrl_train.learner.memory.trace import StepTrace
from skyrl_train.learner.policy import PolicyLearner
from skyrl_train.model import load_causal_lm, load_value_model
from skyrl_train.model.layers import flex
from skyrl_train.model.lora import add_adapter
from skyrl_train.parts import POLICY_LOSSES
from tests.support.layout_cases import close
from tests.support.learner_cases import fixed_rows, make_batch, make_learner, save_tiny_model

ALGORITHM = AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def probers(learner: Probed) -> tuple[Prober, Prober]:
    """One that runs, one that traces."""
    meter = CountingMeter(1 << 40)
    hold_everything(learner.engine, meter)
    trace = StepTrace(engine=learner.engine, held_bytes=meter.in_use_bytes())
    return Prober(learner=learner, meter=meter), Prober(learner=learner, meter=meter, trace=trace)


def policy(folder: Path, **settings: object) -> PolicyLearner:
    return make_learner(folder, algorithm=ALGORITHM, **settings)  # type: ignore[arg-type]


def critic(folder: Path) -> CriticLearner:
    config = ModelConfig(path=str(folder))
    engine = ModelEngine(
        load_value_model(config, "cpu"),
        name="critic",
        micro_batching=fixed_rows(4, "padded"),
        optimizer=OptimizerConfig(lr=1e-3),
        total_optimizer_steps=10,
    )
    return CriticLearner(engine, model=config, algorithm=ALGORITHM)


def with_adapter(folder: Path) -> PolicyLearner:
    config = ModelConfig(path=str(folder))
    model = load_causal_lm(config, "cpu")
    add_adapter(model, lora=LoraConfig(rank=4), seed=0)
    engine = ModelEngine(
        model,
        name="policy",
        micro_batching=fixed_rows(4, "packed"),
        dtype=torch.bfloat16,
        optimizer=OptimizerConfig(lr=1e-3),
        total_optimizer_steps=10,
    )
    return PolicyLearner(engine, model=config, algorithm=ALGORITHM, temperature=1.0)


CASES = {
    "padded": lambda folder: policy(folder),
    "padded, bfloat16, checkpointing": lambda folder: policy(folder, dtype=torch.bfloat16, gradient_checkpointing=True),
    "packed adapter, bfloat16": with_adapter,
    "critic": critic,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_traced_step_takes_what_the_real_one_takes(folder: Path, name: str) -> None:
    learner = CASES[name](folder)
    measured, traced = probers(learner)
    for training in (True, False):
        assert traced.probe(5, 24, training=training) == measured.probe(5, 24, training=training)


def test_rows_of_unequal_length_and_trees_are_traced_too(folder: Path) -> None:
    measured, traced = probers(policy(folder, layout="prefix_shared"))
    for shared in (0, 12):
        found = traced.probe_lengths([24, 16, 13], training=False, shared=shared)
        assert found == measured.probe_lengths([24, 16, 13], training=False, shared=shared)


def test_flex_attention_is_traced_too_and_says_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As trees on a CUDA device are. torch hands it to a dispatch mode that says so, as an operation of higher order."""

    def attend(*tensors: Any, read: object, **terms: Any) -> torch.Tensor:
        del read
        return flex(*tensors, compiled=True, **terms)

    measured, traced = probers(policy(folder, layout="prefix_shared"))
    usual = measured.probe_lengths([24, 16, 13], training=False, shared=12)
    monkeypatch.setattr("skyrl_train.model.layers.attention._attend", attend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = traced.probe_lengths([24, 16, 13], training=False, shared=12)
    assert usual is not None
    assert found is not None
    assert found.positions == usual.positions
    assert found.peak_bytes == pytest.approx(usual.peak_bytes, rel=0.2)


@pytest.mark.slow
def test_a_trace_leaves_the_learner_as_it_was(folder: Path) -> None:
    learner, untouched = policy(folder), policy(folder)
    engine = learner.engine
    before = list(engine.model.parameters()), engine.parameters, engine.strategy
    _, traced = probers(learner)
    traced.probe(3, 8, training=True)
    assert all(now is then for now, then in zip(engine.model.parameters(), before[0]))
    assert (engine.parameters, engine.strategy) == before[1:]
    engine.oom_retry.use(meter=None, micro_batching=fixed_rows(4, "padded"))
    for each in (learner, untouched):
        each.forward_backward(close(make_batch([9, 14, 7])))
        each.optim_step()
    for mine, other in zip(engine.model.parameters(), untouched.engine.model.parameters()):
        assert torch.equal(mine, other)


def test_a_loss_that_cannot_be_traced_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = policy(folder)

    def reads_back(inputs: object, config: object) -> object:
        return torch.ones(3).cumsum(0).numpy() / inputs.logprobs.detach().numpy()  # type: ignore[attr-defined]

    monkeypatch.setattr(POLICY_LOSSES.builtins["regular"].target.replace(":", "."), reads_back)
    _, traced = probers(learner)
    with pytest.raises(ModelError, match=r"policy: its step cannot be traced.*Set trainer\.memory_probe=measure"):
        traced.probe(2, 8, training=True)
