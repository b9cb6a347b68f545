from __future__ import annotations

import subprocess
import sys

import pytest
from batch_builders import make_config

from skyrl_train.batch.plan import plan_batches
from skyrl_train.errors import ConfigError


def test_every_size_of_a_run():
    plan = plan_batches(make_config(prompts=8, mini_batch=4, n_samples=5), num_train_prompts=35)
    assert plan.num_samples_per_batch == 40
    assert plan.num_samples_per_step == 20
    assert plan.batches_per_epoch == 4
    assert plan.total_steps == 4
    assert plan.optimizer_steps_per_batch == 2
    assert plan.total_optimizer_steps == 8
    assert plan.critic_optimizer_steps_per_batch == 0


def test_the_critic_counts_its_own_steps():
    plan = plan_batches(make_config(prompts=8, mini_batch=4, critic_mini_batch=2), num_train_prompts=8)
    assert (plan.optimizer_steps_per_batch, plan.critic_optimizer_steps_per_batch) == (2, 4)


def test_all_violations_are_raised_at_once():
    with pytest.raises(ConfigError) as error:
        plan_batches(make_config(prompts=8, mini_batch=3, critic_mini_batch=5), num_train_prompts=7)
    fields = [violation.field for violation in error.value.violations]
    assert fields == ["trainer.train_batch_size", "trainer.policy_mini_batch_size", "trainer.critic_mini_batch_size"]


def test_a_plan_is_made_without_torch():
    code = "import sys, skyrl_train.batch.plan, skyrl_train.batch.microbatch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
