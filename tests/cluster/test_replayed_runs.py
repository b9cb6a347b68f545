"""Whole runs from the same recorded rollouts, by the command line: in this process or on Ray, by any number of ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from tests.support.command_runs import RAY, exported, records, relative_difference, run_command, unaccounted_share

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

NUM_STEPS = 3
SIZES = (
    "+experiment=gsm8k_multiturn",
    "platform=cpu",
    "data.validation=[]",
    "generator.n_samples_per_prompt=4",
    "trainer.train_batch_size=16",
    "trainer.policy_mini_batch_size=8",
    "trainer.critic_mini_batch_size=8",
    "trainer.ckpt_interval=1",
)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Three steps of rollouts, and where replaying them in one process led."""

    overrides: tuple[str, ...]
    """What replays them."""
    weights: dict[str, Tensor]
    reward: list[float]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    root = tmp_path_factory.mktemp("replayed")
    run_command(root / "recorded", *SIZES, f"trainer.total_steps={NUM_STEPS}")
    overrides = (*SIZES, "generator=replay", f"generator.replay_path={root / 'recorded' / 'rollouts'}")
    run_command(root / "inline", *overrides, f"trainer.total_steps={NUM_STEPS}")
    recorded, inline = exported(root / "recorded"), exported(root / "inline")
    assert relative_difference(inline, recorded) == 0.0, "a replay is the run again"
    reward = [record["reward/mean"] for record in records(root / "inline")]
    return Recording(overrides=overrides, weights=inline, reward=reward)


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        ("single", 1),
        ("fsdp2", 1),
        ("fsdp2", 2),
        ("ddp", 2),
    ],
)
def test_ray_trains_the_weights_of_one_process_on_any_number_of_ranks(
    recording: Recording, tmp_path: Path, strategy: str, num_ranks: int
) -> None:
    ranks = (f"strategy={strategy}", f"placement.policy_num_workers={num_ranks}")
    run_command(tmp_path, *recording.overrides, *RAY, *ranks, f"trainer.total_steps={NUM_STEPS}")
    difference = relative_difference(exported(tmp_path), recording.weights)
    print(f"\nreplayed, {strategy} x {num_ranks}: relative difference of the weights {difference:.2e}")
    assert difference < 1e-6
    found = records(tmp_path)
    assert [record["reward/mean"] for record in found] == recording.reward
    assert unaccounted_share(found) < 0.05


def test_two_workers_then_one_then_two_go_on_from_each_others_checkpoints(recording: Recording, tmp_path: Path) -> None:
    for step, num_ranks in enumerate((2, 1, 2), start=1):
        ranks = ("strategy=fsdp2", f"placement.policy_num_workers={num_ranks}", f"trainer.total_steps={step}")
        said = run_command(tmp_path, *recording.overrides, *RAY, *ranks)
        if step > 1:
            assert f"after step {step - 1}" in said
            assert "placement.policy_num_workers was" in said
    difference = relative_difference(exported(tmp_path), recording.weights)
    print(f"\n2, 1, 2 workers, one step each: relative difference of the weights {difference:.2e}")
    assert difference < 1e-6
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]


def test_a_checkpoint_of_two_workers_goes_on_without_ray(recording: Recording, tmp_path: Path) -> None:
    two = (*RAY, "strategy=fsdp2", "placement.policy_num_workers=2")
    run_command(tmp_path, *recording.overrides, *two, "trainer.total_steps=2")
    run_command(tmp_path, *recording.overrides, f"trainer.total_steps={NUM_STEPS}")
    assert relative_difference(exported(tmp_path), recording.weights) < 1e-6


def test_a_fork_on_two_ranks_takes_the_new_rate_and_trains_as_one_in_this_process(
    recording: Recording, tmp_path: Path
) -> None:
    parent = tmp_path / "parent"
    run_command(parent, *recording.overrides, "trainer.total_steps=2")
    lr = 10 * records(parent)[-1]["policy/lr"]
    fork = (
        *recording.overrides,
        "trainer.resume_mode=fork",
        f"trainer.resume_path={parent}",
        f"trainer.total_steps={NUM_STEPS}",
        f"trainer.policy.optimizer.lr={lr}",
        "trainer.policy.optimizer.betas=[0.8,0.9]",
    )
    run_command(tmp_path / "inline", *fork)
    run_command(tmp_path / "ray", *fork, *RAY, "strategy=fsdp2", "placement.policy_num_workers=2")
    fork_record = json.loads((tmp_path / "ray" / "fork.json").read_text())
    changed = {change["setting"]: change["is"] for change in fork_record["changed"]}
    assert (changed["trainer.policy.optimizer.lr"], changed["strategy.name"]) == (lr, "fsdp2")
    assert [(record["step"], record["policy/lr"]) for record in records(tmp_path / "ray")] == [(3, lr)]
    assert relative_difference(exported(tmp_path / "ray"), exported(tmp_path / "inline")) < 1e-6
    assert relative_difference(exported(tmp_path / "inline"), recording.weights) > 1e-4


def test_supervised_training_forks_from_this_process_onto_two_ranks(tmp_path: Path) -> None:
    sft = ("+experiment=sft_gsm8k", "sft_platform=cpu", "trainer.batch_size=8", "data.max_train_rows=64")
    alone = ("data.validation=[]", "trainer.eval_samples=0", f"data.cache_dir={tmp_path / 'cache'}")
    constant = ("trainer.optimizer.schedule=constant", "trainer.optimizer.warmup_steps=0")
    small = (*sft, *alone, *constant)
    parent, module = tmp_path / "parent", "skyrl_train.main_sft"
    run_command(parent, *small, "trainer.num_steps=2", module=module)
    fork = (
        *small,
        "trainer.resume_mode=fork",
        f"trainer.resume_path={parent}",
        "trainer.num_steps=3",
        "trainer.optimizer.lr=5e-4",
    )
    run_command(tmp_path / "inline", *fork, module=module)
    ranks = (*RAY, "strategy=fsdp2", "placement.policy_num_workers=2")
    run_command(tmp_path / "ray", *fork, *ranks, module=module)
    assert [(record["step"], record["policy/lr"]) for record in records(tmp_path / "ray")] == [(3, 5e-4)]
    assert relative_difference(exported(tmp_path / "ray"), exported(tmp_path / "inline")) < 1e-6
