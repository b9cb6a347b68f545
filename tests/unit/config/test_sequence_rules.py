"""Rules of ranks that compute micro-batches together."""

from __future__ import annotations

from typing import Any

from skyrl_train.config.door.load import load_config
from skyrl_train.config.rules.batch_rules import data_parallel_size
from skyrl_train.config.rules.validate_batch import validate_config
from skyrl_train.config.schema import Config
from skyrl_train.plan import plan_batches


def config(*, name: str = "fsdp2", size: int = 2, workers: int = 4, attention: str = "auto", **trainer: Any) -> Config:
    return load_config(
        {
            "strategy": {"name": name, "sequence_parallel_size": size},
            "placement": {"backend": "ray", "policy_num_workers": workers},
            "model": {"attention": attention},
            "trainer": trainer,
        }
    )


def test_ranks_of_one_group_are_one_share() -> None:
    assert [data_parallel_size(8, size) for size in (1, 2, 8)] == [8, 4, 1]
    assert validate_config(config()) == []
    (policy,) = plan_batches(config(), num_train_prompts=64).learners
    assert (policy.num_ranks, policy.data_parallel_size, policy.rows_per_rank) == (4, 2, 16 * 8 // 2)


def test_rows_divide_over_shares_not_over_ranks() -> None:
    sizes = {"train_batch_size": 2, "policy_mini_batch_size": 1, "critic_mini_batch_size": 1}
    assert validate_config(config(workers=16, size=2, **sizes)) == []
    (violation,) = validate_config(config(workers=12, size=2, **sizes))
    assert "8 sequences of a mini-batch (1 prompt x 8 samples) must divide evenly over the 6 policy ranks" in str(
        violation
    )
    assert "placement.policy_num_workers=16, or placement.policy_num_workers=8" in violation.remedy


def test_every_problem_is_told_at_once() -> None:
    found = validate_config(
        config(name="single", size=3, workers=1, attention="eager", algorithm={"kl_loss_coef": 0.1})
    )
    assert [violation.field for violation in found] == [
        "strategy.sequence_parallel_size",
        "model.attention",
        "placement.policy_num_workers",
        "placement.ref_num_workers",
    ]
    assert (
        found[2].rule == "must be a multiple of strategy.sequence_parallel_size=3: so many ranks share each micro-batch"
    )
    assert found[2].remedy == "no sizes repair this with the placement and strategy as they are: change those first"
