from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.generation import GeneratorConfig
from skyrl_train.config.schema import Config, CriticConfig, CriticModelConfig, PlacementConfig, TrainerConfig
from skyrl_train.config.validate_batch import divisors, exact_quotient, problems, sizes_of, validate_batch_sizes


def config(
    prompts=32,
    mini=16,
    samples=8,
    micro=32,
    *,
    critic=0,
    workers=1,
    critic_workers=1,
    ref_workers=0,
    step_wise=False,
    **more,
):
    return Config(
        trainer=TrainerConfig(
            train_batch_size=prompts,
            policy_mini_batch_size=mini,
            critic_mini_batch_size=critic or 16,
            micro_train_batch_size_per_gpu=micro,
            algorithm=AlgorithmConfig(kl_loss_coef=0.1 if ref_workers else 0.0),
            **more,
        ),
        critic=CriticConfig(model=CriticModelConfig(path="policy" if critic else "")),
        generator=GeneratorConfig(n_samples_per_prompt=samples, step_wise_trajectories=step_wise),
        placement=PlacementConfig(
            policy_num_workers=workers, critic_num_workers=critic_workers, ref_num_workers=ref_workers or 1
        ),
    )


def messages(configuration, **kwargs):
    return [str(violation) for violation in validate_batch_sizes(configuration, **kwargs)]


def test_the_defaults_are_valid():
    assert validate_batch_sizes(Config(), num_train_prompts=32) == []


def test_the_worked_example_is_valid():
    assert messages(config(1024, 256, 5, 40, workers=8)) == []


def test_a_mini_batch_that_does_not_divide_the_batch_says_what_would():
    assert messages(config(30, 16, 1)) == [
        "trainer.policy_mini_batch_size: must divide trainer.train_batch_size=30 (prompts); 14 would be left over; "
        "got 16. Try trainer.policy_mini_batch_size=15 or trainer.policy_mini_batch_size=30; "
        "or trainer.train_batch_size=16 or trainer.train_batch_size=32"
    ]


def test_sequences_must_divide_over_ranks():
    assert messages(config(32, 4, 3, workers=8)) == [
        "trainer.policy_mini_batch_size: the 12 sequences of a mini-batch (4 prompts x 3 samples) must divide evenly "
        "over the 8 policy ranks; 4 would be left over (trainer.batch_validation=relaxed pads them); got 4. "
        "Try trainer.policy_mini_batch_size=8; or placement.policy_num_workers=6 or placement.policy_num_workers=12"
    ]


def test_sequences_of_a_rank_must_divide_into_micro_batches():
    assert messages(config(32, 16, 5, 12, workers=2)) == [
        "trainer.micro_train_batch_size_per_gpu: must divide the 40 sequences of a policy rank, or be no smaller: the "
        "80 sequences of a mini-batch (16 prompts x 5 samples) over 2 ranks; got 12. "
        "Try trainer.micro_train_batch_size_per_gpu=10 or trainer.micro_train_batch_size_per_gpu=20; "
        "or trainer.policy_mini_batch_size=4"
    ]


def test_a_micro_batch_larger_than_the_share_of_a_rank_is_one_forward():
    assert messages(config(32, 2, 4, 32)) == []


def test_each_model_has_its_own_data_parallel_size():
    found = validate_batch_sizes(config(32, 16, 1, 1, critic=4, workers=16, critic_workers=3, ref_workers=5))
    assert [violation.field for violation in found] == ["trainer.critic_mini_batch_size", "placement.ref_num_workers"]
    assert "3 critic ranks" in str(found[0])
    assert "32 sequences of a training batch (32 prompts x 1 samples) must divide evenly over the 5 ref" in str(
        found[1]
    )
    assert "placement.ref_num_workers=4 or placement.ref_num_workers=8" in str(found[1])


def test_models_that_are_not_there_are_not_checked():
    assert messages(config(32, 16, critic_workers=7)) == []


def test_a_rank_without_work_is_refused_even_where_padding_is_allowed():
    (found,) = validate_batch_sizes(config(2, 1, 2, workers=6, batch_validation="relaxed"))
    assert found.field == "placement.policy_num_workers"
    assert "at most the 4 sequences of a training batch (2 prompts x 2 samples)" in found.rule
    assert found.remedy == "try placement.policy_num_workers=4; or trainer.train_batch_size=3"


def test_the_data_must_fill_one_batch():
    (found,) = validate_batch_sizes(config(32, 16), num_train_prompts=31)
    assert str(found) == (
        "trainer.train_batch_size: must be at most the number of training prompts, 31: the data fill no batch; got 32. "
        "Try trainer.train_batch_size=16"
    )
    assert validate_batch_sizes(config(32, 16), num_train_prompts=32) == []


def test_everything_wrong_is_said_at_once():
    found = validate_batch_sizes(config(30, 16, 1, critic=7, workers=31, ref_workers=4), num_train_prompts=10)
    assert [violation.field for violation in found] == [
        "trainer.train_batch_size",
        "placement.policy_num_workers",
        "trainer.policy_mini_batch_size",
        "trainer.critic_mini_batch_size",
        "placement.ref_num_workers",
    ]


def test_sizes_must_be_positive():
    found = validate_batch_sizes(config(0, -1))
    assert [violation.field for violation in found] == ["trainer.train_batch_size", "trainer.policy_mini_batch_size"]


@pytest.mark.parametrize(
    "more",
    [
        {"batch_validation": "relaxed"},
        {"step_wise": True},
        {"micro_batching": "token_budget"},
        {"micro_batching": "auto"},
        {"docs_per_step": 8},
    ],
)
def test_uneven_shares_are_allowed_where_they_were_asked_for_or_cannot_be_avoided(more):
    uneven = config(32, 4, 3, 5, workers=5)
    assert validate_batch_sizes(uneven) != []
    assert validate_batch_sizes(config(32, 4, 3, 5, workers=5, **more)) == []


def test_a_strategy_of_your_own_cuts_rows_as_it_likes_but_ranks_stay_equal():
    assert messages(config(32, 16, 5, 12, workers=2, micro_batching="mine:strategy")) == []
    assert len(messages(config(32, 4, 3, workers=8, micro_batching="mine:strategy"))) == 1


def test_divisors_and_exact_quotients():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]
    assert exact_quotient(12, 4) == 3
    with pytest.raises(ValueError, match="12 is not a multiple of 5"):
        exact_quotient(12, 5)


def dealt(num_rows, num_ranks):
    return [len(range(rank, num_rows, num_ranks)) for rank in range(num_ranks)]


def simulated(sizes):
    """Which rules a step breaks, found by cutting a batch into mini-batches, ranks and micro-batches."""
    broken = set()
    prompts, samples = list(range(sizes.train_batch_size)), sizes.n_samples_per_prompt
    if sizes.num_train_prompts is not None and len(prompts) > sizes.num_train_prompts:
        broken.add(("data", "policy"))
    for role in sizes.roles():
        if 0 in dealt(len(prompts) * samples, role.data_parallel_size):
            broken.add(("ranks", role.name))
        size = role.mini_batch_size or len(prompts)
        mini_batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        if any(len(mini_batch) != size for mini_batch in mini_batches):
            broken.add(("divides", role.name))
            continue
        ranks = dealt(len(mini_batches[0]) * samples, role.data_parallel_size)
        if sizes.equal_ranks and len(set(ranks)) > 1:
            broken.add(("even_ranks", role.name))
        elif sizes.equal_micro_batches and role.mini_batch_size is not None:
            micro = sizes.micro_train_batch_size_per_gpu
            starts = [(rows, start) for rows in ranks for start in range(0, rows, micro)]
            if len({min(micro, rows - start) for rows, start in starts}) > 1:
                broken.add(("even_micro_batches", role.name))
    return broken


SMALL = st.integers(1, 14)
LIMIT = 80


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.integers(1, 24),
    mini=SMALL,
    samples=st.integers(1, 6),
    micro=SMALL,
    critic=st.integers(0, 12),
    workers=st.integers(1, 9),
    critic_workers=st.integers(1, 5),
    ref_workers=st.integers(0, 9),
    data=st.one_of(st.none(), st.integers(1, 40)),
    relaxed=st.booleans(),
)
def test_rules_and_remedies_agree_with_a_simulated_step(
    prompts, mini, samples, micro, critic, workers, critic_workers, ref_workers, data, relaxed
):
    configuration = config(
        prompts,
        mini,
        samples,
        micro,
        critic=critic,
        workers=workers,
        critic_workers=critic_workers,
        ref_workers=ref_workers,
        batch_validation="relaxed" if relaxed else "strict",
    )
    sizes = sizes_of(configuration, num_train_prompts=data)
    broken = simulated(sizes)
    found = problems(sizes)
    assert {problem.key for problem in found} == broken
    assert len(found) == len(broken)
    for problem, violation in zip(found, validate_batch_sizes(configuration, num_train_prompts=data)):
        check_remedy(sizes, problem, violation.remedy, broken)


def check_remedy(sizes, problem, remedy, broken):
    """Every value that is suggested repairs the rule and breaks no other; where one change makes everything valid, the
    nearest such values on both sides are the ones that are suggested."""
    found = re.findall(r"[a-z]+\.([a-z_]+)=(\d+)", remedy)
    suggested = {(name, int(value)) for name, value in found if int(value) < LIMIT}
    all_valid = {
        (field, value)
        for field in problem.repairs
        for values in (range(getattr(sizes, field) - 1, 0, -1), range(getattr(sizes, field) + 1, LIMIT))
        for value in [next((value for value in values if not simulated(replace(sizes, **{field: value}))), None)]
        if value is not None
    }
    if all_valid:
        assert suggested == all_valid
    for field, value in suggested:
        after = simulated(replace(sizes, **{field: value}))
        assert problem.key not in after
    if not remedy.startswith("no change"):
        assert found
