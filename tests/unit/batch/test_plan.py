from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import ConfigError
from skyrl_train.plan import plan_batches
from skyrl_train.runs import assembler
from skyrl_train.trainers import document_metrics
from tests.support.batch_builders import make_config, make_rollouts, make_trajectory, make_turn

ROWS = ("per_trajectory", "per_turn")


def test_every_size_of_a_run():
    plan = plan_batches(make_config(prompts=8, mini_batch=4, n_samples=5), num_train_prompts=35)
    assert plan.num_samples_per_batch == 40
    assert plan.num_samples_per_step == 20
    assert plan.batches_per_epoch == 4
    assert plan.total_steps == 4
    assert plan.optimizer_steps_per_batch == 2
    assert plan.total_optimizer_steps == 8
    assert plan.critic_optimizer_steps_per_batch == 0
    assert plan.total_documents == 160


def test_the_worked_example():
    """1,024 prompts x 5 samples, mini-batches of 256 prompts: 5,120 sequences, 4 optimizer steps of 1,280 each."""
    config = make_config(prompts=1024, mini_batch=256, n_samples=5, placement={"policy_num_workers": 8})
    plan = plan_batches(config, num_train_prompts=1024)
    assert (plan.num_samples_per_batch, plan.optimizer_steps_per_batch, plan.num_samples_per_step) == (5120, 4, 1280)
    assert plan.learners[0].rows_per_rank == 160


def test_epochs_and_total_steps():
    config = make_config(prompts=8, mini_batch=4, trainer={"epochs": 3, "update_epochs_per_batch": 2})
    plan = plan_batches(config, num_train_prompts=17)
    assert (plan.total_steps, plan.optimizer_steps_per_batch, plan.total_optimizer_steps) == (6, 4, 24)
    config = make_config(prompts=8, mini_batch=4, trainer={"epochs": 3, "total_steps": 5})
    assert plan_batches(config, num_train_prompts=17).total_steps == 5


def test_the_critic_counts_its_own_steps():
    plan = plan_batches(make_config(prompts=8, mini_batch=4, critic_mini_batch=2), num_train_prompts=8)
    assert (plan.optimizer_steps_per_batch, plan.critic_optimizer_steps_per_batch) == (2, 4)
    assert [learner.role for learner in plan.learners] == ["policy", "critic"]


def test_the_policy_takes_no_steps_while_only_the_critic_is_trained():
    trainer = {"total_steps": 5, "algorithm": AlgorithmConfig(critic_warmup_steps=2)}
    plan = plan_batches(make_config(prompts=4, mini_batch=2, critic_mini_batch=4, trainer=trainer), num_train_prompts=4)
    assert (plan.total_optimizer_steps, plan.critic_total_optimizer_steps) == (6, 5)
    alone = plan_batches(make_config(prompts=4, mini_batch=2, trainer=trainer), num_train_prompts=4)
    assert alone.total_optimizer_steps == 10


def test_each_model_has_its_own_share():
    config = make_config(
        prompts=8,
        mini_batch=4,
        n_samples=3,
        trainer={
            "batch_validation": "relaxed",
            "micro_train_batch_size_per_gpu": 2,
            "micro_forward_batch_size_per_gpu": 4,
            "algorithm": AlgorithmConfig(kl_loss_coef=0.1),
        },
        placement={"policy_num_workers": 5, "ref_num_workers": 7},
    )
    policy, reference = plan_batches(config, num_train_prompts=8).learners
    assert (policy.sequences_per_pass, policy.dummy_rows_per_pass, policy.rows_per_rank) == (12, 3, 3)
    assert (policy.train_micro_batches, policy.forward_micro_batches) == (2, 2)
    assert (reference.sequences_per_pass, reference.dummy_rows_per_pass, reference.rows_per_rank) == (24, 4, 4)
    assert (reference.train_micro_batches, reference.forward_micro_batches) == (None, 1)


def test_documents_close_at_most_so_many_steps():
    config = make_config(
        prompts=8, mini_batch=8, n_samples=3, trainer={"docs_per_step": 10, "update_epochs_per_batch": 2}
    )
    plan = plan_batches(config, num_train_prompts=8)
    assert (plan.num_samples_per_step, plan.optimizer_steps_per_batch, plan.total_documents) == (24, 2, 48)
    assert plan.learners[0].train_micro_batches is None


@pytest.mark.parametrize(
    ("trainer", "step_wise", "samples", "steps"),
    [
        ({"micro_train_batch_size_per_gpu": 4}, False, (12, 12), (4, 4)),
        ({"micro_train_batch_size_per_gpu": 4}, True, (10, 13), (4, 5)),
        ({"micro_train_batch_size_per_gpu": 4, "docs_per_step_exact": True}, True, (10, 10), (5, 5)),
        ({"micro_batching": "token_budget", "max_tokens_per_microbatch": 12}, False, (10, 15), (4, 5)),
        ({"micro_batching": "mine:strategy"}, False, (10, 48), (1, 5)),
        ({"docs_per_step": 100}, True, (48, 48), (1, 1)),
    ],
)
def test_steps_that_documents_close_are_announced_as_a_range(trainer, step_wise, samples, steps):
    config = make_config(
        prompts=8, mini_batch=8, n_samples=6, step_wise=step_wise, trainer={"docs_per_step": 10, **trainer}
    )
    plan = plan_batches(config, num_train_prompts=16)
    assert (plan.num_samples_per_step, plan.most_samples_per_step) == samples
    assert (plan.fewest_optimizer_steps_per_batch, plan.optimizer_steps_per_batch) == steps
    assert (plan.fewest_total_optimizer_steps, plan.total_optimizer_steps) == tuple(2 * count for count in steps)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    turns=st.lists(st.integers(1, 4), min_size=12, max_size=12),
    target=st.integers(1, 14),
    micro=st.integers(1, 5),
    ranks=st.integers(1, 3),
    step_wise=st.booleans(),
    exact=st.booleans(),
    by_tokens=st.booleans(),
)
def test_what_a_batch_does_lies_within_what_was_announced(turns, target, micro, ranks, step_wise, exact, by_tokens):
    sizes = {"micro_train_batch_size_per_gpu": micro}
    if by_tokens:
        sizes = {"micro_batching": "token_budget", "max_tokens_per_microbatch": 10 * micro}
    config = make_config(
        prompts=6,
        mini_batch=6,
        n_samples=2,
        step_wise=step_wise,
        placement={"policy_num_workers": ranks},
        trainer={"docs_per_step": target, "docs_per_step_exact": exact, **sizes},
    )
    trajectories = [
        make_trajectory(f"p{index // 2}", index % 2, *conversation(count)) for index, count in enumerate(turns)
    ]
    rollouts = make_rollouts(*trajectories, n_samples=2)
    batch = assembler(config, rows=ROWS[step_wise])(rollouts, step=1, weight_version=0)
    plan = plan_batches(config, num_train_prompts=6)
    boundaries = batch.metadata.policy_mini_batch_boundaries
    counts = [len(set(batch["trajectory_index"][start:stop].tolist())) for start, stop in boundaries]
    assert plan.fewest_optimizer_steps_per_batch <= len(counts) <= plan.optimizer_steps_per_batch
    assert all(plan.num_samples_per_step <= count <= plan.most_samples_per_step for count in counts[:-1])
    found = document_metrics(batch, target)
    assert found["batch/documents_per_step/max"] == max(counts)
    assert found["batch/documents_per_step/overshoot"] == sum(max(0, c - target) for c in counts) / len(counts)
    assert document_metrics(batch, 0) == {}


def conversation(num_turns):
    """Each turn continues the one before."""
    prompt, turns = [1], []
    for number in range(num_turns):
        turns.append(make_turn(prompt, [9, number]))
        prompt = [*prompt, 9, number, 3]
    return turns


def test_the_schedule_of_steps_that_documents_close_is_as_long_as_its_documents():
    config = make_config(prompts=8, mini_batch=8, n_samples=3, critic_mini_batch=8, trainer={"docs_per_step": 10})
    plan = plan_batches(config, num_train_prompts=16)
    assert (plan.total_documents, plan.schedule_steps, plan.critic_schedule_steps) == (48, 4.8, 4.8)
    by_prompts = plan_batches(make_config(prompts=8, mini_batch=4, n_samples=3), num_train_prompts=16)
    assert by_prompts.schedule_steps == by_prompts.total_optimizer_steps == 4


@pytest.mark.parametrize("turns", [[1] * 8, [5] * 8, [1, 2, 3, 4, 5, 1, 1, 5]])
def test_step_wise_batches_take_the_steps_that_the_plan_announced(turns):
    config = make_config(prompts=4, mini_batch=2, n_samples=2, step_wise=True)
    trajectories = [
        make_trajectory(f"p{index // 2}", index % 2, *[make_turn(range(1, 2 + k), [9]) for k in range(count)])
        for index, count in enumerate(turns)
    ]
    rollouts = make_rollouts(*trajectories, n_samples=2)
    batch = assembler(config, rows="per_turn")(rollouts, step=1, weight_version=0)
    assert batch.num_rows == sum(turns)
    announced = plan_batches(config, num_train_prompts=4).optimizer_steps_per_batch
    assert len(batch.metadata.policy_mini_batch_boundaries) == announced == 2


def test_all_violations_are_raised_at_once():
    with pytest.raises(ConfigError) as error:
        plan_batches(make_config(prompts=8, mini_batch=3, critic_mini_batch=5), num_train_prompts=7)
    fields = [violation.field for violation in error.value.violations]
    assert fields == ["trainer.train_batch_size", "trainer.policy_mini_batch_size", "trainer.critic_mini_batch_size"]


def test_a_plan_is_made_without_torch():
    modules = "plan.batch_plan", "plan.report", "batch.planner.forwards", "batch.steps.schedule"
    imported = ", ".join(f"skyrl_train.{module}" for module in modules)
    code = f"import sys, {imported}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
