"""Real FSDP2 ranks that take turns with engines: the engines are pretended, what the models do is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from skyrl_train.cluster.learners import RayLearner, start_learner
from skyrl_train.cluster.session import RaySession
from skyrl_train.cluster.turns import DeviceTurns
from tests.cluster.test_learners import (
    LENGTHS,
    SLOT,
    make_config,
    make_plan,
    mini_batch,
    relative_difference,
    weights_of,
)
from tests.learner_cases import make_batch
from tests.unit.cluster.test_turns import FakeFleet

pytestmark = pytest.mark.cluster


@dataclass(frozen=True, kw_only=True)
class Colocated:
    """A policy and a reference on the engines' devices, and a policy that has its own."""

    policy: RayLearner
    reference: RayLearner
    apart: RayLearner
    turns: DeviceTurns
    record: Path


@pytest.fixture(scope="module")
def colocated(session: RaySession, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Colocated]:
    record = tmp_path_factory.mktemp("turns") / "device_turns.jsonl"
    turns = DeviceTurns(FakeFleet([]), shared=True, record_file=record)  # type: ignore[arg-type]
    turns.models()
    config = make_config(model_folder, strategy="fsdp2")
    policy = start_learner(config, make_plan(config), session, [SLOT] * 2, role="policy", turns=turns)()
    reference = start_learner(config, make_plan(config), session, [SLOT], role="reference", turns=turns)()
    apart = start_learner(config, make_plan(config), session, [SLOT] * 2, role="policy")()
    yield Colocated(policy=policy, reference=reference, apart=apart, turns=turns, record=record)
    for learner in (policy, reference, apart):
        learner.close()


def test_models_that_share_devices_in_turns_train_bit_for_bit_as_one_that_has_its_own(
    colocated: Colocated, tmp_path: Path
) -> None:
    batch = make_batch(LENGTHS)
    for seed in range(2):
        colocated.turns.engines()
        found = [learner.forward(batch) for learner in (colocated.policy, colocated.reference, colocated.apart)]
        assert torch.equal(found[0], found[2])
        for learner in (colocated.policy, colocated.apart):
            learner.forward_backward(mini_batch(seed))
            learner.optim_step()
        colocated.policy.save(tmp_path / f"step{seed}")
        with colocated.turns.syncing():
            ours = weights_of(colocated.policy)
        assert relative_difference(ours, weights_of(colocated.apart)) == 0.0
    moves = [json.loads(line)["move"] for line in colocated.record.read_text(encoding="utf-8").splitlines()]
    step = [
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
    assert moves[4:] == [*step, "policy off", *step]


def test_the_reference_takes_the_policys_weights_while_both_are_there(colocated: Colocated) -> None:
    batch = make_batch(LENGTHS)
    colocated.reference.load_weights(colocated.policy.weights())
    assert torch.allclose(colocated.reference.forward(batch), colocated.policy.forward(batch), atol=1e-5)
