"""Models of this process that share their device with an engine: what they compute in turns is what they compute alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl_train.batch.steps import MiniBatch, close_mini_batch
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.learner.reference import BaseOfAdapter
from skyrl_train.learner.shared_device import LearnerOnSharedDevice
from skyrl_train.weight_sync import DeviceSharing
from tests.support.learner_cases import make_batch, make_learner, save_tiny_model
from tests.support.shared_engines import engines

LENGTHS = [9, 4, 12, 7]


def closed(seed: int) -> MiniBatch:
    return close_mini_batch(
        make_batch(LENGTHS, seed=seed, dtype=torch.float32),
        loss_reduction="token_mean",
        max_sequence_length_for_norm=16,
    )


def test_steps_in_turns_are_bit_for_bit_those_of_a_model_that_stays(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    alone, moves = make_learner(folder), list[str]()
    turns = DeviceSharing(lambda: engines(moves), shared=True, record_file=tmp_path / "turns.jsonl")
    turns.models()
    inside = make_learner(folder)
    policy = LearnerOnSharedDevice(inside, turns)
    reference = LearnerOnSharedDevice(make_learner(folder, role="reference"), turns)
    assert policy.role == "policy"
    for seed in range(2):
        turns.engines()
        batch = make_batch(LENGTHS)
        with pytest.raises(SkyrlTrainError, match="in the host's memory"):
            inside.forward(batch)
        assert torch.equal(policy.forward(batch), alone.forward(batch))
        reference.forward(batch)
        for learner in (policy, alone):
            learner.forward_backward(closed(seed))
            learner.optim_step()
        with turns.syncing():
            found = {name: tensor.clone() for name, tensor in policy.weights()}
        assert all(torch.equal(found[name], tensor) for name, tensor in alone.weights())
    policy.hold_state(copies=False).write(tmp_path / "saved")
    policy.load(tmp_path / "saved")
    assert moves == ["sleep", *["wake_up weights", "wake_up kv_cache", "sleep"] * 3]


def test_a_reference_takes_the_policys_weights_while_both_are_there(tmp_path: Path) -> None:
    turns = DeviceSharing(lambda: engines([]), shared=True, record_file=tmp_path / "turns.jsonl")
    policy = LearnerOnSharedDevice(make_learner(save_tiny_model(tmp_path / "policy")), turns)
    other = save_tiny_model(tmp_path / "other", seed=1)
    reference = LearnerOnSharedDevice(make_learner(other, role="reference"), turns)
    batch = make_batch(LENGTHS)
    assert not torch.equal(reference.forward(batch), policy.forward(batch))
    reference.load_weights(policy.weights())
    assert torch.equal(reference.forward(batch), policy.forward(batch))


def test_the_base_of_an_adapter_takes_the_policys_turn(tmp_path: Path) -> None:
    turns = DeviceSharing(lambda: engines([]), shared=True, record_file=tmp_path / "turns.jsonl")
    learner = make_learner(save_tiny_model(tmp_path / "model"))
    policy = LearnerOnSharedDevice(learner, turns)
    with pytest.raises(SkyrlTrainError, match="in the host's memory"):
        learner.forward(make_batch(LENGTHS))
    found = BaseOfAdapter(policy.forward_base).forward(make_batch(LENGTHS))
    assert torch.equal(found, learner.forward(make_batch(LENGTHS)))
