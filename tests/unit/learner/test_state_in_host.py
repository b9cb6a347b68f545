"""An optimizer's state that is in the host between its steps: the same numbers, bit for bit, and room on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from skyrl_train.config.models import OptimizerConfig
from skyrl_train.errors import NonFiniteError
from skyrl_train.learner import optimizer as optimizers
from skyrl_train.learner.memory.meter import CountingMeter
from skyrl_train.learner.memory.share import DeviceShare
from skyrl_train.learner.memory.trace import count_parameters
from skyrl_train.learner.optimizer import optimizer_tensors, step_from_host
from skyrl_train.learner.policy import PolicyLearner
from skyrl_train.learner.shared_device import LearnerOnSharedDevice
from skyrl_train.telemetry import to_values
from skyrl_train.weight_sync import DeviceSharing
from tests.support.learner_cases import LENGTHS, close, make_batch, make_learner, save_tiny_model
from tests.support.shared_engines import engines

OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=2, schedule="cosine", max_grad_norm=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tied=False)


def learner_of(folder: Path, *, state_in_host: bool, **options: Any) -> PolicyLearner:
    return make_learner(folder, optimizer=OPTIMIZER, state_in_host=state_in_host, rows_per_micro_batch=2, **options)


def train(learner: PolicyLearner, seeds: range, dtype: torch.dtype = torch.float32) -> list[dict[str, float]]:
    """Metrics of steps of several micro-batches."""
    metrics = []
    for seed in seeds:
        done = to_values(learner.forward_backward(close(make_batch(LENGTHS, seed=seed, dtype=dtype))))
        metrics.append({**done, **to_values(learner.optim_step())})
    return metrics


def files_of(learner: PolicyLearner, folder: Path) -> dict[str, bytes]:
    """What a checkpoint has of weights, averages and counts."""
    learner.save(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(("bucket_bytes", "double"), [(1, False), (20_000, True), (1 << 30, False)])
def test_steps_and_checkpoints_are_bit_for_bit_those_of_state_on_the_device(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket_bytes: int, double: bool
) -> None:
    monkeypatch.setattr(optimizers, "STATE_BUCKET_BYTES", bucket_bytes)
    stays, moves = (learner_of(folder, state_in_host=each, double=double) for each in (False, True))
    dtype = torch.float64 if double else torch.float32
    assert train(moves, range(3), dtype) == train(stays, range(3), dtype)
    assert files_of(moves, tmp_path / "moves") == files_of(stays, tmp_path / "stays")


@pytest.mark.parametrize("first", [False, True])
def test_a_checkpoint_of_either_form_goes_on_in_the_other(folder: Path, tmp_path: Path, first: bool) -> None:
    whole = learner_of(folder, state_in_host=first)
    train(whole, range(2))
    whole.save(tmp_path / "half")
    resumed = learner_of(folder, state_in_host=not first)
    train(resumed, range(7, 8))
    resumed.load(tmp_path / "half")
    assert train(resumed, range(2, 4)) == train(whole, range(2, 4))
    assert files_of(resumed, tmp_path / "resumed") == files_of(whole, tmp_path / "whole")


def test_a_step_that_is_refused_moves_nothing_and_the_next_one_goes_on(folder: Path, tmp_path: Path) -> None:
    learners = [learner_of(folder, state_in_host=each) for each in (False, True)]
    for learner in learners:
        train(learner, range(2))
        before = files_of(learner, tmp_path / "before")
        bad = close(make_batch(LENGTHS, dtype=torch.float32))
        advantages = torch.full_like(bad.batch["advantages"], float("inf"))
        learner.forward_backward(replace(bad, batch=bad.batch.with_columns(advantages=advantages)))
        with pytest.raises(NonFiniteError, match="No weight was changed"):
            learner.optim_step()
        assert files_of(learner, tmp_path / "before") == before
        train(learner, range(2, 3))
    assert files_of(learners[0], tmp_path / "stays") == files_of(learners[1], tmp_path / "moves")


def test_the_model_takes_turns_on_its_device_as_before(folder: Path, tmp_path: Path) -> None:
    turns = DeviceSharing(lambda: engines([]), shared=True)
    policy = LearnerOnSharedDevice(learner_of(folder, state_in_host=True), turns)
    alone = learner_of(folder, state_in_host=False)
    for seed in range(2):
        turns.engines()
        for learner in (policy, alone):
            learner.forward_backward(close(make_batch(LENGTHS, seed=seed, dtype=torch.float32)))
            turns.models("policy")
            learner.optim_step()
    policy.hold_state(copies=True).write(tmp_path / "moved")
    alone.save(tmp_path / "alone")
    for file in (tmp_path / "alone").iterdir():
        assert (tmp_path / "moved" / file.name).read_bytes() == file.read_bytes()


def test_an_optimizer_that_is_not_adamw_has_all_of_its_state_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "STATE_BUCKET_BYTES", 1)
    found = []
    for step in (lambda optimizer: optimizer.step(), step_from_host):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
        momentum = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        calls: list[int] = []
        momentum.register_step_pre_hook(lambda *_: calls.append(1))  # noqa: B023
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = parameter.detach() ** 2
            step(momentum)
        found.append(parameters)
        assert len(calls) == 3
    assert all(torch.equal(*pair) for pair in zip(*found))


def test_averages_are_on_the_device_a_bucket_at_a_time_and_pinned_in_the_host_between_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On tensors of CUDA without memory, which know their device."""
    monkeypatch.setattr(optimizers, "STATE_BUCKET_BYTES", 2 * 4 * 100)
    waits: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            waits.append(self.device)

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    on_device: list[int] = []

    def averages() -> list[Tensor]:
        return [each for each in optimizer_tensors(adamw, named).values() if each.ndim]

    with FakeTensorMode(allow_non_fake_inputs=True):
        named = {str(size): nn.Parameter(torch.empty(size, device="cuda")) for size in (60, 40, 70, 300, 20)}
        adamw = torch.optim.AdamW(named.values(), fused=True)
        adamw.register_step_post_hook(
            lambda *_: on_device.append(sum(each.nbytes for each in averages() if each.is_cuda))
        )
        for _ in range(2):
            for parameter in named.values():
                parameter.grad = torch.empty_like(parameter)
            step_from_host(adamw)
            assert {each.device.type for each in averages()} == {"cpu"}
            assert all(parameter.grad is None for parameter in named.values())
    assert on_device == [8 * size for size in (100, 70, 300, 20)] * 2
    assert [each.type for each in waits] == ["cuda"] * 2
    assert len(averages()) == 10


def test_what_a_step_holds_is_what_a_plan_predicts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = 20_000
    monkeypatch.setattr(optimizers, "STATE_BUCKET_BYTES", at_once)
    held = {}
    for state_in_host in (False, True):
        learner = learner_of(folder, state_in_host=state_in_host)
        train(learner, range(1))  # the host's memory is taken in the first step
        meter = CountingMeter(1 << 40)
        meter.adopt(learner.engine.held_tensors())
        resident = meter.in_use_bytes()
        learner.forward_backward(close(make_batch(LENGTHS, seed=1, dtype=torch.float32)))
        meter.adopt(learner.engine.held_tensors())
        in_host = [
            each
            for each in optimizer_tensors(learner.engine.optimizer, learner.engine.parameters).values()
            if state_in_host and each.ndim
        ]
        meter.adopt(in_host)  # the meter of a CPU takes all memory for the device's
        with meter.counting():
            learner.optim_step()
        peak = meter.peak_bytes() - sum(each.nbytes for each in in_host)
        counts = count_parameters(learner.engine)
        share = DeviceShare(state_at_once=at_once if state_in_host else None)
        assert resident == pytest.approx(sum(share.resident(counts, training=False).values()), abs=4 * 60)
        predicted = share.stepping(counts) or share.resident(counts, training=True)
        assert peak == pytest.approx(sum(predicted.values()), rel=0.05)
        held[state_in_host] = resident, peak
    assert held[True][0] < 0.4 * held[False][0]
    assert held[True][1] < 0.8 * held[False][1]
