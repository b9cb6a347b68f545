"""Runs with a stream of rollouts: their settings, and what must hold of their folders."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_train.config import Config
from skyrl_train.runs import load_data
from skyrl_train.telemetry.records import read_rollouts
from skyrl_train.types import RolloutBatch

BATCH, SAMPLES = 4, 2


def make_config(root: Path, **trainer: Any) -> Config:
    """3 steps of 4 prompts, 2 samples each, of 16 prompts; the held-out ones are 4."""
    config = Config(output_dir=str(root))
    sizes = {
        "total_steps": 3,
        "train_batch_size": BATCH,
        "policy_mini_batch_size": BATCH,
        "critic_mini_batch_size": BATCH,
        "ckpt_interval": 0,
        "eval_before_train": False,
        "max_staleness": 1,
        "export_hf": False,
        "max_ckpts_to_keep": 9,
        **trainer,
    }
    sampling = replace(config.generator.sampling, max_generate_length=8)
    return replace(
        config,
        data=replace(config.data, max_train_prompts=4 * BATCH, max_validation_prompts=4),
        environment=replace(config.environment, isolation="thread"),
        generator=replace(config.generator, n_samples_per_prompt=SAMPLES, sampling=sampling, eval_sampling=sampling),
        trainer=replace(config.trainer, **sizes),
    )


def trained(root: Path) -> list[RolloutBatch]:
    """The batches of all steps."""
    files = sorted((root / "rollouts").glob("train_step_*.parquet"))
    return [batch for file in files for batch in read_rollouts(file).values()]


def check_each_prompt_once(root: Path, config: Config, *, num_steps: int) -> None:
    batches = trained(root)
    assert len(batches) == num_steps
    found = [prompt.uid for batch in batches for prompt in batch.prompts]
    source = load_data(config).train
    expected = [prompt.uid for position in range(num_steps) for prompt in source(position)]
    assert Counter(found) == Counter(expected)
    assert all(len(batch.trajectories) == BATCH * SAMPLES for batch in batches)


def check_versions(root: Path, *, max_staleness: int) -> set[int]:
    """Return the ages of all tokens."""
    ages = {
        version - run.version
        for version, batch in enumerate(trained(root))
        for trajectory in batch.trajectories
        for turn in trajectory.turns
        for run in turn.weight_versions
    }
    assert ages <= set(range(max_staleness + 1))
    return ages


def exported(root: Path) -> bytes:
    return (root / "export" / "model.safetensors").read_bytes()


def agent_config(root: Path, **trainer: Any) -> Config:
    config = make_config(root, **trainer)
    sampling = replace(config.generator.sampling, max_generate_length=12)
    generator = replace(
        config.generator,
        agent_loop={"_target_": "agent", "run": "test_agent_streams:play"},
        step_wise_trajectories=True,
        max_turns=2,
        max_batch_size=4,
        sampling=sampling,
        eval_sampling=sampling,
    )
    data = replace(config.data, validation=())
    return replace(
        config, data=data, generator=generator, environment=replace(config.environment, env_class="reported")
    )
