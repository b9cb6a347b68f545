"""Ranks on Ray that compute micro-batches together: the weights of one process, checkpoints, refusals, a whole run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl_train.cluster.session import RaySession
from skyrl_train.config import Config
from skyrl_train.errors import ModelError
from tests.support.command_runs import RAY, exported, records, relative_difference as distance_of_files, run_command
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


def shared_config(model_folder: Path, *, strategy: str = "fsdp2", size: int = 2, **trainer: object) -> Config:
    config = make_config(model_folder, strategy=strategy)
    return replace(
        config,
        strategy=replace(config.strategy, sequence_parallel_size=size),
        placement=replace(config.placement, policy_num_workers=size, ref_num_workers=size),
        trainer=replace(config.trainer, **trainer),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def inline(model_folder: Path) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Gradient norms and weights after three steps in this process, and the log-probabilities before them."""
    config = make_config(model_folder)
    learner = policy_of(config)
    scores = learner.forward(make_batch(LENGTHS))
    return three_steps(learner), weights_of(learner), scores


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "layout"),
    [
        pytest.param("fsdp2", 2, "padded", marks=pytest.mark.nightly),
        ("fsdp2", 2, "prefix_shared"),
        pytest.param("fsdp2", 4, "packed", marks=pytest.mark.nightly),
        ("ddp", 2, "auto"),
    ],
)
def test_three_steps_give_the_weights_of_one_process(
    session: RaySession,
    model_folder: Path,
    inline: tuple[list[float], dict[str, Tensor], Tensor],
    strategy: str,
    num_ranks: int,
    layout: str,
) -> None:
    norms, weights, scores = inline
    config = shared_config(model_folder, strategy=strategy, layout=layout)
    with ray_learner(session, config, num_ranks) as learner:
        assert torch.allclose(learner.forward(make_batch(LENGTHS)), scores, atol=1e-5)
        assert three_steps(learner) == pytest.approx(norms, rel=1e-5)
        difference = relative_difference(weights_of(learner), weights)
    print(f"\nrelative difference of the weights, {strategy} x {num_ranks}, pairs, {layout}: {difference:.2e}")
    assert difference < 5e-6  # three steps of AdamW, which makes steps of 1e-2 of small gradients' rounding


def test_metrics_count_rows_once(session: RaySession, model_folder: Path) -> None:
    with ray_learner(session, shared_config(model_folder), 2) as learner:
        found = learner.forward_backward(mini_batch(0))
    assert found["layout/policy_tokens"].value == sum(LENGTHS)


@pytest.mark.nightly
def test_a_checkpoint_goes_on_with_ranks_of_their_own_and_back(
    session: RaySession, model_folder: Path, tmp_path: Path
) -> None:
    together, apart = shared_config(model_folder), make_config(model_folder, strategy="fsdp2")
    with ray_learner(session, together, 2) as learner:
        three_steps(learner)
        learner.hold_state(copies=False).write(tmp_path / "together")
        learner.forward_backward(mini_batch(7))
        learner.optim_step()
        expected = weights_of(learner)
    with ray_learner(session, apart, 2) as learner:
        learner.load(tmp_path / "together")
        learner.hold_state(copies=False).write(tmp_path / "apart")
        learner.forward_backward(mini_batch(7))
        learner.optim_step()
        assert relative_difference(weights_of(learner), expected) < 1e-6
    with ray_learner(session, together, 2) as learner:
        learner.load(tmp_path / "apart")
        learner.forward_backward(mini_batch(7))
        learner.optim_step()
        assert relative_difference(weights_of(learner), expected) < 1e-6


@pytest.mark.nightly
def test_a_loss_that_is_not_finite_stops_all_before_a_weight_moves(session: RaySession, model_folder: Path) -> None:
    with ray_learner(session, shared_config(model_folder), 2) as learner:
        require_refusal_of_non_finite_losses(learner)


@pytest.mark.nightly
def test_heads_that_the_ranks_do_not_divide_are_refused(session: RaySession, model_folder: Path) -> None:
    config = shared_config(model_folder, size=3)
    with (
        pytest.raises(ModelError, match=r"sequence_parallel_size=3 must divide its 4 attention heads.*Try 1 or 2 or 4"),
        ray_learner(session, config, 3),
    ):
        pass


@pytest.mark.nightly
def test_the_command_trains_the_same_with_two_ranks_that_share_micro_batches(tmp_path: Path) -> None:
    sizes = ("+experiment=gsm8k_multiturn", "platform=cpu", "data.validation=[]", "trainer.total_steps=2")
    sizes += ("trainer.train_batch_size=8", "trainer.policy_mini_batch_size=4", "trainer.critic_mini_batch_size=4")
    run_command(tmp_path / "alone", *sizes)
    replay = ("generator=replay", f"generator.replay_path={tmp_path / 'alone' / 'rollouts'}")
    ranks = ("strategy=fsdp2", "placement.policy_num_workers=2", "strategy.sequence_parallel_size=2")
    run_command(tmp_path / "together", *sizes, *replay, *RAY, *ranks)
    assert distance_of_files(exported(tmp_path / "together"), exported(tmp_path / "alone")) < 1e-6
    found, expected = (records(tmp_path / name) for name in ("together", "alone"))
    assert [each["layout/policy_tokens"] for each in found] == [each["layout/policy_tokens"] for each in expected]
