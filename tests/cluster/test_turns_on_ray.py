"""Real FSDP2 ranks that take turns with engines: the engines are pretended, what the models do is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl_train.cluster.learners import RayLearner, start_learner
from skyrl_train.cluster.session import RaySession
from skyrl_train.weight_sync import DeviceSharing
from tests.support.learner_cases import make_batch, settings_of
from tests.support.ray_learners import LENGTHS, SLOT, make_config, mini_batch, relative_difference, weights_of
from tests.support.shared_engines import engines

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]


@dataclass(frozen=True, kw_only=True)
class Colocated:
    """A policy and a reference on the engines' devices."""

    policy: RayLearner
    reference: RayLearner
    sharing: DeviceSharing
    record: Path


@pytest.fixture(scope="module")
def apart(session: RaySession, model_folder: Path) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Scores before and weights after each of two steps, of a policy that has its devices for itself."""
    config = make_config(model_folder, strategy="fsdp2")
    learner = start_learner(settings_of(config, "policy"), config.placement, session, [SLOT] * 2)()
    found = [step(learner, seed) for seed in range(2)]
    learner.close()
    return found


@pytest.fixture(scope="module")
def colocated(
    session: RaySession,
    model_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    apart: list[tuple[Tensor, dict[str, Tensor]]],  # its actors have the same names and must be gone
) -> Iterator[Colocated]:
    record = tmp_path_factory.mktemp("turns") / "device_turns.jsonl"
    turns = DeviceSharing(lambda: engines([]), shared=True, record_file=record)
    turns.models()
    config = make_config(model_folder, strategy="fsdp2")
    policy = start_learner(settings_of(config, "policy"), config.placement, session, [SLOT] * 2, sharing=turns)()
    reference = start_learner(settings_of(config, "reference"), config.placement, session, [SLOT], sharing=turns)()
    yield Colocated(policy=policy, reference=reference, sharing=turns, record=record)
    policy.close()
    reference.close()


def step(policy: RayLearner, seed: int, *, reference: RayLearner | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    scores = policy.forward(make_batch(LENGTHS))
    if reference is not None:
        reference.forward(make_batch(LENGTHS))
    policy.forward_backward(mini_batch(seed))
    policy.optim_step()
    return scores, weights_of(policy)


def test_models_that_share_devices_in_turns_train_bit_for_bit_as_one_that_has_its_own(
    colocated: Colocated, apart: list[tuple[Tensor, dict[str, Tensor]]], tmp_path: Path
) -> None:
    for seed in range(2):
        colocated.sharing.engines()
        scores, weights = step(colocated.policy, seed, reference=colocated.reference)
        assert torch.equal(scores, apart[seed][0])
        assert relative_difference(weights, apart[seed][1]) == 0.0
        colocated.policy.hold_state(copies=False).write(tmp_path / f"step{seed}")
        with colocated.sharing.syncing():
            assert relative_difference(weights_of(colocated.policy), weights) == 0.0
    moves = [json.loads(line)["move"] for line in colocated.record.read_text(encoding="utf-8").splitlines()]
    one_step = [
        "engines wake: kv_cache",
        "engines sleep",
        "policy on",
        "policy off",
        "reference on",
        "reference off",
        "policy on, with optimizer",
        "engines wake: weights",
    ]
    assert moves[:4] == ["engines sleep", "policy off", "reference off", "engines wake: weights"]
    assert moves[4:] == [*one_step, "policy off", *one_step]


def test_the_reference_takes_the_policys_weights_while_both_are_there(colocated: Colocated) -> None:
    batch = make_batch(LENGTHS)
    colocated.reference.load_weights(colocated.policy.weights())
    assert torch.allclose(colocated.reference.forward(batch), colocated.policy.forward(batch), atol=1e-5)
