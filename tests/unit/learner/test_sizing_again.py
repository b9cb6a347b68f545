"""Budgets of micro-batches that outlive a run: found once, kept in `memory.json`, lowered in checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.config import Config
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import OptimizerConfig
from skyrl_train.learner.memory.probe import Prober
from skyrl_train.learner.memory.sizing import (
    SizingLimits,
    SizingReport,
    make_meter,
    read_reports,
    size_micro_batches as size_alone,
    size_run,
)
from skyrl_train.learner.policy import PolicyLearner
from skyrl_train.learner.reference import BaseOfAdapter
from skyrl_train.plan import plan_memory
from skyrl_train.plan.memory import memory_lines
from tests.support.layout_cases import close
from tests.support.learner_cases import make_batch, make_learner, policy_of, save_tiny_model
from tests.support.memory_cases import FailingMeter, size_itself

LENGTHS = [9, 14, 7, 12, 16, 8]
TRAINER = replace(Config().trainer, micro_batching="auto", memory_budget_gb=0.002)
CONFIG = replace(Config(), trainer=TRAINER)


def learner_of(folder: Path) -> PolicyLearner:
    optimizer = OptimizerConfig(lr=1e-2)
    return make_learner(folder, role="policy", algorithm=AlgorithmConfig(), double=False, optimizer=optimizer)


def start(folder: Path, file: Path, *, longest: int) -> str:
    return size_run(CONFIG.trainer, [learner_of(folder)], file, longest=longest, max_rows=16)[0]


@pytest.mark.slow
def test_a_second_start_does_not_probe_and_another_context_length_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = save_tiny_model(tmp_path / "model"), tmp_path / "memory.json"
    probed: list[int] = []
    probe = Prober.probe_lengths
    monkeypatch.setattr(
        Prober,
        "probe_lengths",
        lambda self, lengths, *, training: (probed.append(max(lengths)), probe(self, lengths, training=training))[1],
    )
    start(model, file, longest=16)
    assert max(probed) == 16
    first = read_reports(file)["policy"][0]
    probed.clear()
    assert "of the run that is resumed" in start(model, file, longest=16)
    assert not probed
    assert read_reports(file)["policy"][0] == replace(first, is_reused=True)
    assert "probes" in start(model, file, longest=24)
    assert max(probed) == 24


class OnOneRank:
    """A learner of Ray with one rank, which is in this process."""

    def __init__(self, learner: PolicyLearner) -> None:
        self._learner = learner

    def forward_base(self, batch: TrainingInputBatch) -> Tensor:
        return self._learner.forward_base(batch)

    def size_micro_batches(self, limits: SizingLimits, _stored: object) -> tuple[SizingReport, ...]:
        return (size_alone(self._learner, make_meter(torch.device("cpu"), limits), limits),)


def test_on_ray_a_reference_that_is_the_policy_without_its_adapter_needs_no_budget(tmp_path: Path) -> None:
    policy = OnOneRank(learner_of(save_tiny_model(tmp_path / "model")))
    config = replace(CONFIG, placement=replace(CONFIG.placement, backend="ray"))
    file = tmp_path / "memory.json"
    lines = size_run(config.trainer, [policy, BaseOfAdapter(policy.forward_base)], file, longest=16, max_rows=16)
    assert len(lines) == 1
    assert set(read_reports(file)) == {"policy"}


def test_a_file_that_cannot_be_read_is_made_again(tmp_path: Path) -> None:
    model, file = save_tiny_model(tmp_path / "model"), tmp_path / "memory.json"
    file.write_text('{"policy": [{"name": "policy"}]}', encoding="utf-8")
    assert "probes" in start(model, file, longest=16)
    assert read_reports(file)["policy"][0].name == "policy"


@pytest.mark.parametrize(("found_again", "expected_lower"), [(64, True), (48, False)])
def test_a_lowered_budget_is_part_of_a_checkpoint(tmp_path: Path, found_again: int, expected_lower: bool) -> None:
    model = save_tiny_model(tmp_path / "model")
    learner, meter = learner_of(model), FailingMeter()
    batches = size_itself(learner.engine, meter, tokens=64)
    meter.refuse(60)
    learner.forward_backward(close(make_batch(LENGTHS)))
    learner.optim_step()
    lowered = batches.budgets
    assert lowered.training < 64
    learner.save(tmp_path / "checkpoint")
    again = learner_of(model)
    restored = size_itself(again.engine, FailingMeter(), tokens=found_again)
    again.load(tmp_path / "checkpoint")
    assert (restored.budgets == lowered) is expected_lower
    assert expected_lower or restored.budgets.training == found_again


@pytest.mark.nightly
def test_a_plan_compares_its_prediction_with_what_a_run_of_the_same_configuration_measured(tmp_path: Path) -> None:
    generator = replace(Config().generator, max_context_length=32)
    trainer = replace(TRAINER, memory_budget_gb=0.03)
    config = Config(output_dir=str(tmp_path), trainer=trainer, generator=generator)
    policy = policy_of(config)
    size_run(config.trainer, [policy], tmp_path / "memory.json", longest=32, max_rows=1024)
    measured = read_reports(tmp_path / "memory.json")["policy"][0]
    memory = plan_memory(config)
    assert memory is not None
    training, scoring = memory.passes
    assert measured.training is not None
    assert (training.measured_tokens, scoring.measured_tokens) == (measured.training.tokens, measured.forward.tokens)
    for each in (training, scoring):
        assert each.predicted_tokens == pytest.approx(each.measured_tokens, rel=0.05)
    assert any(f"{training.measured_tokens:,} positions; predicted" in line for line in memory_lines(memory))
    longer = plan_memory(replace(config, generator=replace(generator, max_context_length=64)))
    assert longer is not None
    assert [each.measured_tokens for each in longer.passes] == [0, 0]
