"""Learners on Ray actors: the same weights as in one process, whatever the strategy and the number of ranks."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl_train.cluster.learners import RayLearner
from skyrl_train.cluster.session import RaySession
from skyrl_train.config import Config
from skyrl_train.config.models import ModelConfig
from skyrl_train.errors import ActorLostError, SaveError
from skyrl_train.interfaces import Learner
from skyrl_train.learner import PolicyLearner
from skyrl_train.plan import BatchPlan, plan_batches
from skyrl_train.trainers.checkpoints import sha256_of
from tests.support.learner_cases import make_batch, policy_of
from tests.support.ray_learners import (
    LENGTHS,
    make_config,
    mini_batch,
    ray_learner,
    relative_difference,
    require_refusal_of_non_finite_losses,
    three_steps,
    weights_of,
)

pytestmark = pytest.mark.cluster


def make_plan(config: Config) -> BatchPlan:
    return plan_batches(config, num_train_prompts=64)


def scores_of(learner: PolicyLearner | RayLearner) -> dict[str, Tensor]:
    """What the learner says of each token: log-probabilities, entropies and sums of squared probabilities."""
    batch = make_batch(LENGTHS)
    return {
        "logprobs": learner.forward(batch),
        "entropy": learner.forward_with_entropy(batch)[:, 1],
        "sum_pi_squared": learner.forward_sum_pi_squared(batch),
    }


@pytest.fixture(scope="module")
def inline(model_folder: Path) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Gradient norms and weights after three steps in this process, and the scores of tokens before them."""
    config = make_config(model_folder)
    learner = policy_of(config)
    scores = scores_of(learner)
    return three_steps(learner), weights_of(learner), scores


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        pytest.param("single", 1, marks=pytest.mark.nightly),
        pytest.param("fsdp2", 1, marks=pytest.mark.nightly),
        ("fsdp2", 2),
        ("ddp", 2),
    ],
)
def test_three_steps_give_the_weights_of_one_process(
    session: RaySession,
    model_folder: Path,
    inline: tuple[list[float], dict[str, Tensor], dict[str, Tensor]],
    strategy: str,
    num_ranks: int,
) -> None:
    norms, weights, scores = inline
    with ray_learner(session, make_config(model_folder, strategy=strategy), num_ranks) as learner:
        for name, found in scores_of(learner).items():
            assert float(scores[name].abs().max()) > 0.01, name
            assert torch.allclose(found, scores[name], atol=1e-5), name
        assert three_steps(learner) == pytest.approx(norms, rel=1e-5)
        difference = relative_difference(weights_of(learner), weights)
    print(f"\nrelative difference of the weights, {strategy} x {num_ranks}: {difference:.2e}")
    # AdamW moves an entry whose gradient is rounding alone, as that of a key's bias is, as far as any other.
    assert difference < 3e-6


def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_in_this_process(
    session: RaySession, model_folder: Path, tmp_path: Path
) -> None:
    config = make_config(model_folder, strategy="fsdp2")
    with ray_learner(session, config, 2) as learner:
        three_steps(learner)
        learner.hold_state(copies=False).write(tmp_path / "two")
        learner.forward_backward(mini_batch(7))
        learner.optim_step()
        expected = weights_of(learner)
        learner.export_hf(tmp_path / "export")

    def goes_on(other: Learner, folder: Path) -> float:
        other.load(folder)
        other.forward_backward(mini_batch(7))
        other.optim_step()
        return relative_difference(weights_of(other), expected)

    alone = policy_of(config)
    assert goes_on(alone, tmp_path / "two") < 1e-6
    with ray_learner(session, config, 1) as learner:
        learner.load(tmp_path / "two")
        learner.hold_state(copies=False).write(tmp_path / "one")
        assert goes_on(learner, tmp_path / "two") < 1e-6
    alone.load(tmp_path / "one")
    alone.save(tmp_path / "whole")
    with ray_learner(session, config, 2) as learner:
        assert goes_on(learner, tmp_path / "one") < 1e-6
        assert goes_on(learner, tmp_path / "whole") < 1e-6
    exported = policy_of(replace(config, model=ModelConfig(path=str(tmp_path / "export"))))
    assert relative_difference(weights_of(exported), expected) == 0.0
    assert '"Qwen2ForCausalLM"' in (tmp_path / "export" / "config.json").read_text(encoding="utf-8")


def test_ranks_write_and_hash_a_copy_while_they_train(session: RaySession, model_folder: Path, tmp_path: Path) -> None:
    with ray_learner(session, make_config(model_folder, strategy="fsdp2"), 2) as learner:
        three_steps(learner)
        now = learner.hold_state(copies=False).write(tmp_path / "now")
        held = learner.hold_state(copies=True)
        assert held.is_copied
        with ThreadPoolExecutor(1) as thread:
            pending = thread.submit(held.write, tmp_path / "copy")
            norms = three_steps(learner)
            assert pending.result(60) == now
        assert held.write(tmp_path / "later") == now
        assert len(norms) == 3
        found = {path.name: sha256_of(path) for path in (tmp_path / "copy").iterdir()}
        assert found == {name: sha256 for name, (_, sha256) in now.items()}
        assert sorted(found) == ["shard-00000.safetensors", "shard-00001.safetensors", "state.json"]
        assert learner.hold_state(copies=True).write(tmp_path / "next") != now
        (tmp_path / "taken").write_text("a file where the folder should be")
        with pytest.raises(SaveError, match=r"taken: the policy model could not be written"):
            learner.hold_state(copies=True).write(tmp_path / "taken")


def test_one_rank_with_a_gradient_that_is_not_finite_stops_all_before_a_weight_moves(
    session: RaySession, model_folder: Path
) -> None:
    with ray_learner(session, make_config(model_folder, strategy="fsdp2"), 2) as learner:
        require_refusal_of_non_finite_losses(learner)


@pytest.mark.parametrize(
    ("send", "error", "says"),
    [
        (signal.SIGKILL, ActorLostError, "policy worker rank 1 .* died in phase score"),
        pytest.param(signal.SIGSTOP, ActorLostError, "policy worker rank 1 .* sign of life", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_call_with_its_name(
    session: RaySession, model_folder: Path, send: signal.Signals, error: type[Exception], says: str
) -> None:
    config = make_config(model_folder, strategy="fsdp2", silence_timeout_s=5.0)
    with ray_learner(session, config, 2) as learner:
        identity = learner.group.actors[1].identity
        assert identity is not None
        os.kill(identity.pid, send)
        started = time.monotonic()
        with pytest.raises(error, match=says):
            learner.forward(make_batch(LENGTHS))
        assert time.monotonic() - started < 20.0
