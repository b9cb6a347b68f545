"""Supervised steps on Ray actors: the weights of one process, on two ranks, packed, with a tail and with an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from skyrl_train.batch.steps import MiniBatch
from skyrl_train.cluster.learners import start_learner
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.session import RaySession
from skyrl_train.config import SFTConfig
from skyrl_train.config.derived import sft_learner_settings
from skyrl_train.config.models import LoraConfig, ModelConfig, OptimizerConfig, StrategyConfig
from skyrl_train.data.sft import ExampleSet, PackedDataCollator, SourcePart, store_of
from skyrl_train.interfaces import Learner
from skyrl_train.learner import build_learner
from tests.support.learner_cases import VOCABULARY

pytestmark = pytest.mark.cluster

LENGTHS = (9, 4, 12, 7, 5, 16, 8)
ADAPTER = LoraConfig(rank=3, dropout=0.2)
SLOT = Slot(options={"num_cpus": 1})


def make_config(model_folder: Path, strategy: str, lora: LoraConfig) -> SFTConfig:
    sft = SFTConfig(model=ModelConfig(path=str(model_folder), lora=lora), strategy=StrategyConfig(name=strategy))  # type: ignore[arg-type]
    optimizer = OptimizerConfig(lr=1e-2, max_grad_norm=0.5)
    trainer = replace(sft.trainer, layout="packed", max_tokens_per_microbatch=24, optimizer=optimizer, batch_size=7)
    placement = replace(sft.placement, backend="ray", policy_num_workers=2, start_timeout_s=180.0, call_timeout_s=120.0)
    return replace(sft, trainer=trainer, placement=placement)


def mini_batches() -> list[MiniBatch]:
    """Seven examples, then a tail of one, which is smaller than the ranks."""
    rng = np.random.default_rng(0)
    rows = [(rng.integers(3, VOCABULARY, n).tolist(), [False] + [True] * (n - 1)) for n in LENGTHS]
    examples = ExampleSet([SourcePart(name="x", store=store_of(rows), rows=np.arange(len(rows)), max_length=24)])
    collate = PackedDataCollator(examples, max_tokens_per_row=24, num_ranks=2)
    return [collate(np.arange(7), step=1), collate(np.array([3]), step=2)]


def train(learner: Learner) -> tuple[dict[str, Tensor], Sequence[float]]:
    losses = []
    for mini_batch in mini_batches():
        losses.append(learner.forward_backward(mini_batch)["loss/total"].value)
        learner.optim_step()
    return {name: tensor.clone() for name, tensor in learner.weights()}, losses


@pytest.mark.parametrize(
    ("strategy", "lora"),
    [
        pytest.param("ddp", LoraConfig(), id="ddp-whole", marks=pytest.mark.nightly),
        pytest.param("ddp", ADAPTER, id="ddp-adapter", marks=pytest.mark.nightly),
        pytest.param("fsdp2", LoraConfig(), id="fsdp2-whole"),
        pytest.param("fsdp2", ADAPTER, id="fsdp2-adapter", marks=pytest.mark.nightly),
    ],
)
def test_two_ranks_train_as_one_process_does(
    session: RaySession, model_folder: Path, strategy: str, lora: LoraConfig
) -> None:
    config = make_config(model_folder, strategy, lora)
    settings = sft_learner_settings(config, total_steps=3)
    expected, expected_losses = train(build_learner(settings))
    learner = start_learner(settings, config.placement, session, [SLOT, SLOT])()
    try:
        found, losses = train(learner)
    finally:
        learner.close()
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert list(found) == list(expected)
    difference = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    size = sum(float(tensor.double().square().sum()) for tensor in expected.values())
    assert (difference / size) ** 0.5 < 1e-6
