"""Whole runs by the command whose ranks lie in a grid: after each sync a real engine computes what they do, and they train
what one process does from the same rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.config.models import ModelConfig
from skyrl_train.model import load_tokenizer, quiet_transformers
from tests.support.command_runs import RAY, exported, records, relative_difference, run_command

NIGHTLY = pytest.mark.nightly
NUM_STEPS = 2
SIZES = (
    "+experiment=gsm8k_multiturn",
    "platform=cpu",
    "data.validation=[]",
    "generator.n_samples_per_prompt=4",
    "trainer.train_batch_size=8",
    "trainer.policy_mini_batch_size=4",
    "trainer.critic_mini_batch_size=4",
    f"trainer.total_steps={NUM_STEPS}",
)
MOST_OF_PROBE = 1e-4
"""Ten times what processors differ by."""
VLLM = ("generator=vllm", "generator.verify_weight_sync=true", f"generator.weight_sync_tolerance={MOST_OF_PROBE}")


def grid(ranks: int, **sizes: object) -> tuple[str, ...]:
    stated = (f"strategy.{name}={value}" for name, value in sizes.items())
    return (*RAY, "strategy=fsdp2", f"placement.policy_num_workers={ranks}", *stated)


def save_mixture(folder: Path) -> Path:
    """Qwen3-MoE with the bundled tokenizer: 4 experts of each of 2 layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = load_tokenizer(ModelConfig())
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
    )
    make: Any = AutoModelForCausalLM.from_config
    with quiet_transformers():
        make(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def require_the_run_of_one_process(folder: Path, *overrides: str) -> None:
    """What its ranks trained is what one process trains from the rollouts of `folder`."""
    replayed = folder.with_name(f"{folder.name}-replayed")
    kept = [each for each in overrides if each.startswith(("model.", "trainer."))]
    replay = ("generator=replay", f"generator.replay_path={folder / 'rollouts'}", "placement.backend=inline")
    run_command(replayed, *SIZES, *kept, *replay)
    difference = relative_difference(exported(folder), exported(replayed))
    found = records(folder)
    print(f"\n{folder.name}: weights {difference:.1e} apart from one process's")
    assert difference < 1e-6
    assert [each["step"] for each in found] == [1, 2]
    assert all(each["policy/grad_norm"] > 0 for each in found)
    # of the mean: a token that two experts want alike may be sent to the other one
    apart = max(each["mismatch/logprob_diff_mean"] for each in found)
    print(f"log-probabilities of engine and trainer {apart:.1e} apart on average")
    assert apart < 1e-5


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(grid(2, tensor_parallel_size=2), marks=NIGHTLY, id="tensor"),
        pytest.param(grid(4, fsdp_size=2), marks=NIGHTLY, id="hsdp"),
        pytest.param(
            (*grid(4, fsdp_size=2), "generator.weight_transport=broadcast", "generator.full_sync_every=2"),
            marks=NIGHTLY,
            id="hsdp, changes by broadcast",
        ),
        pytest.param(grid(4, fsdp_size=2, cpu_offload="true"), marks=NIGHTLY, id="hsdp, offload"),
        pytest.param(grid(4, tensor_parallel_size=2, cpu_offload="true"), marks=NIGHTLY, id="shard x tensor, offload"),
    ],
)
def test_vllm_computes_with_what_ranks_of_a_grid_sent(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run_command(tmp_path / "run", *SIZES, *overrides, *VLLM)
    require_right_probes(tmp_path / "run")
    require_the_run_of_one_process(tmp_path / "run", *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(grid(2, expert_parallel_size=2), marks=NIGHTLY, id="experts"),
        pytest.param(grid(4, fsdp_size=2, expert_parallel_size=2), marks=NIGHTLY, id="hsdp, experts"),
    ],
)
def test_vllm_computes_with_the_experts_that_ranks_divide(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    # a random model earns no reward: what it trains on is its entropy
    mixture = (
        f"model.path={save_mixture(tmp_path / 'mixture')}",
        "trainer.algorithm.entropy_coef=0.1",
        "trainer.policy.optimizer.lr=1e-3",
    )
    run_command(tmp_path / "run", *SIZES, *overrides, *VLLM, *mixture)
    require_right_probes(tmp_path / "run")
    require_the_run_of_one_process(tmp_path / "run", *overrides, *mixture)


def require_right_probes(folder: Path) -> None:
    """Of the weights as loaded, and after each step."""
    syncs = records(folder, "weight_sync.jsonl")
    assert [each["version"] for each in syncs] == list(range(NUM_STEPS + 1))
    worst = max(each["probe_difference"] for each in syncs)
    print(f"\nprobes at most {worst:.1e} apart")
    assert worst <= MOST_OF_PROBE


@NIGHTLY
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(grid(4, fsdp_size=2, cpu_offload="true"), id="hsdp, offload"),
        pytest.param(
            (*grid(4, tensor_parallel_size=2), "trainer.algorithm.kl_loss_coef=0.1", "placement.ref_num_workers=2"),
            id="shard x tensor, reference",
        ),
    ],
)
def test_the_engine_of_this_process_computes_with_what_ranks_of_a_grid_sent(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    run_command(tmp_path / "run", *SIZES, *overrides, "generator=hf")
    require_the_run_of_one_process(tmp_path / "run", *overrides)
