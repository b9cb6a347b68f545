"""Settings that follow from the model, the machine and what is stated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from skyrl_train.config.derived.values import (
    LR,
    MICRO_BATCHING,
    RL_DERIVED,
    SFT_LR,
    THREADS,
    TOKENS,
    VALIDATION,
    Situation,
    context_length,
    derive,
    derive_sft,
    reasons,
)
from skyrl_train.config.rules.batch_rules import Sizes, problems
from skyrl_train.system import usable_cores

TOY, SMOL = 900_000, 134_515_008
BATCH, MINI, CRITIC, ROWS = (
    "trainer.train_batch_size",
    "trainer.policy_mini_batch_size",
    "trainer.critic_mini_batch_size",
    "trainer.micro_train_batch_size_per_gpu",
)


def on(parameters: int, *, gpu: bool = False, cores: int = 4) -> Situation:
    return Situation(parameters=parameters, on_gpu=gpu, num_cores=cores)


@pytest.mark.parametrize(
    ("situation", "batch", "mini", "rate", "threads", "batching"),
    [
        (on(TOY), 32, 16, 5e-5, 1, "fixed"),
        (on(SMOL), 8, 4, 1e-5, 4, "token_budget"),
        (on(500_000_000), 8, 4, 3e-6, 4, "token_budget"),
        (on(0), 8, 4, 1e-6, 4, "token_budget"),
        (on(1_500_000_000, gpu=True), 128, 64, 1e-6, 4, "fixed"),
    ],
)
def test_sizes_follow_from_the_model_and_the_machine(
    situation: Situation, batch: int, mini: int, rate: float, threads: int, batching: str
) -> None:
    found = derive({}, situation)
    assert (found[BATCH], found[MINI], found[CRITIC]) == (batch, mini, mini)
    assert (found[LR], found[THREADS], found[MICRO_BATCHING]) == (rate, threads, batching)


def test_an_adapter_gets_a_larger_rate() -> None:
    assert derive({"model.lora.rank": 32}, on(SMOL))[LR] == pytest.approx(2e-4)
    assert derive_sft({"model.lora.rank": 32}, on(SMOL))[SFT_LR] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({BATCH: 8}, {MINI: 4, CRITIC: 4, ROWS: 32}),
        ({BATCH: 7}, {MINI: 7, CRITIC: 7}),
        ({BATCH: 9}, {MINI: 9}),
        ({MINI: 24}, {BATCH: 48, CRITIC: 24}),
        ({MINI: 64}, {BATCH: 64}),
        ({MINI: 5}, {BATCH: 35}),
        ({ROWS: 24}, {BATCH: 33, MINI: 33}),
    ],
)
def test_a_stated_size_moves_the_others(stated: dict[str, int], expected: dict[str, int]) -> None:
    found = derive(stated, on(TOY))
    assert {name: found[name] for name in expected} == expected
    assert not found.keys() & stated.keys()


def test_sizes_that_nothing_goes_with_stay_as_they_are_for_the_rules_to_refuse() -> None:
    found = derive({BATCH: 10, MINI: 4}, on(TOY))
    assert found[ROWS] == 32


def test_rows_stated_on_a_cpu_are_rows_and_tokens_are_tokens() -> None:
    assert derive({ROWS: 4}, on(SMOL))[MICRO_BATCHING] == "fixed"
    assert derive({TOKENS: 512}, on(TOY))[MICRO_BATCHING] == "token_budget"
    assert derive({"trainer.auto_micro_batch_size": True}, on(SMOL))[MICRO_BATCHING] == "fixed"


def test_ranks_and_engines_of_one_machine_share_its_cores() -> None:
    ranks = {"placement.backend": "ray", "placement.policy_num_workers": 2}
    assert derive(ranks, on(SMOL, cores=8))[THREADS] == 4
    assert derive({**ranks, "placement.policy_num_nodes": 2}, on(SMOL, cores=8))[THREADS] == 8
    assert derive({**ranks, "generator.vllm.num_engines": 16}, on(SMOL, cores=8))[THREADS] == 1


def test_supervised_training_reads_its_longest_example() -> None:
    found = derive_sft({"data.max_length": 2001, "trainer.pad_to_multiple_of": 8}, on(SMOL))
    assert (found["trainer.batch_size"], found[TOKENS]) == (8, 2008)
    assert derive_sft({}, on(TOY))[TOKENS] == 8192


def test_the_context_grows_where_a_prompt_and_a_response_do_not_fit() -> None:
    assert context_length(512, prompt=256, response=64, turns=2) == 512
    assert context_length(512, prompt=256, response=300, turns=2) == 856
    assert context_length(512, prompt=256, response="abc", turns=2) == 512


def test_the_reasons_name_what_was_derived_alone() -> None:
    situation = on(SMOL, cores=2)
    lines = list(reasons(derive({}, situation), {}, situation))
    assert lines == [
        "sizes       8 prompts x 8 samples, mini-batches of 4, lr 1e-05, at most 200 held-out prompts: "
        "for 135M parameters on a CPU; state any to change it",
        "threads     2 of 2 cores: for 135M parameters on a CPU; platform.num_threads states another number",
    ]
    stated: dict[str, Any] = dict.fromkeys((BATCH, MINI, LR, VALIDATION), 1) | {THREADS: 1}
    assert list(reasons(derive(stated, situation), stated, situation)) == []


SIZES = st.integers(min_value=1, max_value=200)


@example(
    stated={"trainer.train_batch_size": 1, "trainer.critic_mini_batch_size": 2},
    samples=3,
    has_critic=True,
    situation=on(TOY),
)
@given(
    stated=st.fixed_dictionaries({}, optional={BATCH: SIZES, CRITIC: SIZES, MINI: SIZES, ROWS: SIZES}),
    samples=st.integers(min_value=1, max_value=16),
    has_critic=st.booleans(),
    situation=st.sampled_from([on(TOY), on(SMOL), on(SMOL, gpu=True)]),
)
def test_what_is_derived_breaks_no_rule_that_what_is_stated_keeps(
    stated: dict[str, int], samples: int, has_critic: bool, situation: Situation
) -> None:
    given_ = {**stated, "generator.n_samples_per_prompt": samples, "critic.model.path": "policy" if has_critic else ""}
    whole = {**derive(given_, situation), **given_}
    assert set(RL_DERIVED) <= set(whole)
    strict = whole[MICRO_BATCHING] == "fixed"
    sizes = Sizes(
        train_batch_size=whole[BATCH],
        policy_mini_batch_size=whole[MINI],
        critic_mini_batch_size=whole[CRITIC] if has_critic else None,
        n_samples_per_prompt=samples,
        policy_num_workers=1,
        critic_num_workers=1 if has_critic else None,
        ref_num_workers=None,
        ranks_per_share=1,
        micro_train_batch_size_per_gpu=whole[ROWS],
        num_train_prompts=None,
        equal_ranks=strict,
        equal_micro_batches=strict,
    )
    broken = problems(sizes)
    # One stated size can always be kept; several may contradict each other, which the rules say.
    assert not broken or len(stated) > 1
    assert not broken or any({f"trainer.{name}" for name in each.repairs} & stated.keys() for each in broken)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu.max": "no numbers"}, None),
    ],
)
def test_cores_are_those_that_the_process_may_use(tmp_path: Path, files: dict[str, str], cores: int | None) -> None:
    for name, text in files.items():
        file = tmp_path / "sys" / "fs" / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")
    assert usable_cores(tmp_path) == (usable_cores(tmp_path / "nothing") if cores is None else cores)
