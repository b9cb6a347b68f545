from __future__ import annotations

import re
from dataclasses import replace
from functools import reduce
from math import log

import pytest
from hypothesis import given, settings, strategies as st

from skyrl_train.config.algorithm.settings import AlgorithmConfig
from skyrl_train.config.models.engines import GeneratorConfig
from skyrl_train.config.models.models import CriticConfig, CriticModelConfig
from skyrl_train.config.models.placement import PlacementConfig, StrategyConfig
from skyrl_train.config.rules.batch_rules import divisors, exact_quotient, find_repairs, problems
from skyrl_train.config.rules.validate import run_rules
from skyrl_train.config.rules.validate_batch import FIELDS, sizes_of, validate_batch_sizes, with_sound_sizes
from skyrl_train.config.rules.validate_placement import ENGINE_PLACEMENT_RULES, PLACEMENT_RULES, PROCESS_RULES
from skyrl_train.config.schema import Config, TrainerConfig
from skyrl_train.errors import Violation


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
    group=1,
    **more,
):
    """On Ray, where several ranks are allowed."""
    return Config(
        strategy=StrategyConfig(name="fsdp2", sequence_parallel_size=group),
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
            backend="ray",
            policy_num_workers=workers,
            critic_num_workers=critic_workers,
            ref_num_workers=ref_workers or 1,
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
        "got 16. Try trainer.train_batch_size=32, or trainer.policy_mini_batch_size=15, "
        "or trainer.policy_mini_batch_size=30, or trainer.train_batch_size=16"
    ]


def test_sequences_must_divide_over_ranks():
    assert messages(config(32, 4, 3, workers=8)) == [
        "trainer.policy_mini_batch_size: the 12 sequences of a mini-batch (4 prompts x 3 samples) must divide evenly "
        "over the 8 policy ranks; 4 would be left over; got 4. Try placement.policy_num_workers=6, "
        "or placement.policy_num_workers=12, or trainer.policy_mini_batch_size=8, "
        "or trainer.batch_validation=relaxed, which pads what is uneven"
    ]


def test_sequences_of_a_rank_must_divide_into_micro_batches():
    assert messages(config(32, 16, 5, 12, workers=2)) == [
        "trainer.micro_train_batch_size_per_gpu: must divide the 40 sequences of a policy rank, or be no smaller: the "
        "80 sequences of a mini-batch (16 prompts x 5 samples) over 2 ranks; got 12. "
        "Try trainer.micro_train_batch_size_per_gpu=10, or trainer.micro_train_batch_size_per_gpu=20, "
        "or trainer.policy_mini_batch_size=4, or placement.policy_num_workers=8, "
        "or trainer.batch_validation=relaxed, which pads what is uneven"
    ]


def test_a_micro_batch_larger_than_the_share_of_a_rank_is_one_forward():
    assert messages(config(32, 2, 4, 32)) == []


def test_each_model_has_its_own_data_parallel_size():
    found = validate_batch_sizes(config(32, 16, 1, 1, critic=4, workers=16, critic_workers=3, ref_workers=5))
    assert [violation.field for violation in found] == ["trainer.critic_mini_batch_size", "placement.ref_num_workers"]
    assert "3 critic ranks" in str(found[0])
    assert "32 sequences of a training batch (32 prompts x 1 sample) must divide evenly over the 5 ref" in str(found[1])
    assert "placement.critic_num_workers=4 placement.ref_num_workers=4 together" in found[1].remedy
    assert found[0].remedy == found[1].remedy


def test_models_that_are_not_there_are_not_checked():
    assert messages(config(32, 16, critic_workers=7)) == []


def test_a_rank_without_work_is_refused_even_where_padding_is_allowed():
    (found,) = validate_batch_sizes(config(2, 1, 2, workers=6, batch_validation="relaxed"))
    assert found.field == "placement.policy_num_workers"
    assert "at most the 4 sequences of a training batch (2 prompts x 2 samples)" in found.rule
    assert found.remedy == "try trainer.train_batch_size=3, or placement.policy_num_workers=4"


def test_the_data_must_fill_one_batch():
    (found,) = validate_batch_sizes(config(32, 16), num_train_prompts=31)
    assert str(found) == (
        "trainer.train_batch_size: must be at most the number of training prompts, 31: the data fill no batch; got 32. "
        "Try trainer.train_batch_size=16"
    )
    assert validate_batch_sizes(config(32, 16), num_train_prompts=32) == []


def test_everything_wrong_is_said_at_once():
    found = validate_batch_sizes(config(30, 16, 1, 5, critic=7, workers=31, ref_workers=4), num_train_prompts=10)
    assert [(violation.field, violation.rule.partition(";")[0].partition(":")[0]) for violation in found] == [
        ("trainer.train_batch_size", "must be at most the number of training prompts, 10"),
        (
            "placement.policy_num_workers",
            "must be at most the 30 sequences of a training batch (30 prompts x 1 sample)",
        ),
        ("trainer.policy_mini_batch_size", "must divide trainer.train_batch_size=30 (prompts)"),
        (
            "trainer.policy_mini_batch_size",
            "the 16 sequences of a mini-batch (16 prompts x 1 sample) must divide evenly over the 31 policy ranks",
        ),
        ("trainer.critic_mini_batch_size", "must divide trainer.train_batch_size=30 (prompts)"),
        ("trainer.micro_train_batch_size_per_gpu", "must divide the 7 sequences of a critic rank, or be no smaller"),
        (
            "placement.ref_num_workers",
            "the 30 sequences of a training batch (30 prompts x 1 sample) must divide evenly over the 4 reference ranks",
        ),
    ]


def test_a_wrong_group_of_ranks_hides_no_other_rule():
    found = validate_batch_sizes(config(30, 16, 1, workers=3, group=2, batch_validation="relaxed"))
    assert [violation.field for violation in found] == [
        "placement.policy_num_workers",
        "trainer.policy_mini_batch_size",
    ]


def test_where_no_single_size_is_enough_the_fewest_are_changed_together():
    found = validate_batch_sizes(config(8, 3, 2, critic=5, batch_validation="relaxed"), num_train_prompts=8)
    assert [violation.field for violation in found] == [
        "trainer.policy_mini_batch_size",
        "trainer.critic_mini_batch_size",
    ]
    assert {violation.remedy for violation in found} == {
        "try trainer.train_batch_size=6 trainer.critic_mini_batch_size=6 together, "
        "or trainer.policy_mini_batch_size=4 trainer.critic_mini_batch_size=4 together"
    }


def test_ranks_are_offered_only_where_the_placement_has_room_for_them():
    alone = config(7, 7, 1, ref_workers=2)
    inline = replace(alone, placement=replace(alone.placement, backend="inline"), strategy=StrategyConfig())
    (found,) = validate_batch_sizes(inline)
    assert "placement.ref_num_workers=1" in found.remedy
    assert "placement.ref_num_workers=7" not in found.remedy
    assert "placement.ref_num_workers=7" in validate_batch_sizes(alone)[0].remedy


def test_sizes_that_the_placement_leaves_no_room_for_say_so():
    stated = config(2, 2, 1, workers=8)
    stated = replace(stated, placement=replace(stated.placement, policy_num_gpus_per_node=8))
    (ranks, _) = validate_batch_sizes(stated, num_train_prompts=4)
    assert ranks.remedy.endswith("with the placement and strategy as they are: change those first")


def test_sizes_that_are_not_positive_hide_no_rule_that_reads_others():
    both = "Try trainer.train_batch_size=32 trainer.policy_mini_batch_size=16 together"
    assert messages(config(0, -3)) == [
        f"trainer.train_batch_size: must be a positive whole number; got 0. {both}",
        f"trainer.policy_mini_batch_size: must be a positive whole number; got -3. {both}",
    ]
    found = validate_batch_sizes(config(30, 16, 1, 0, workers=31))
    assert [violation.field for violation in found] == [
        "trainer.micro_train_batch_size_per_gpu",
        "placement.policy_num_workers",
        "trainer.policy_mini_batch_size",
        "trainer.policy_mini_batch_size",
    ]


def test_a_size_that_is_not_positive_is_set_to_what_goes_with_the_others():
    assert messages(config(30, 0)) == [
        "trainer.policy_mini_batch_size: must be a positive whole number; got 0. Try trainer.policy_mini_batch_size=3"
    ]


def test_a_size_that_was_refused_is_reported_once_and_set_to_what_goes_with_the_others():
    alone = Violation(field="trainer.train_batch_size", rule="must be an integer", value="'x'", remedy="try 32")
    other = Violation(field="seed", rule="must be an integer", value="'x'", remedy="try seed=0")
    carried, refused = config(32, 12, critic=5, workers=4, micro=8), {"trainer.train_batch_size", "seed"}
    assert messages(carried, refused=refused) == []
    assert with_sound_sizes([alone, other], carried, refused=refused) == [
        replace(alone, remedy="try trainer.train_batch_size=60"),
        other,
    ]


@pytest.mark.parametrize(
    ("refused", "hidden"),
    [
        ("trainer.policy.optimizer.lr", set()),
        ("trainer.micro_train_batch_size_per_gpu", {"trainer.micro_train_batch_size_per_gpu"}),
        ("trainer.batch_validation", {"trainer.micro_train_batch_size_per_gpu", "placement.ref_num_workers"}),
        ("trainer.algorithm.gamma", set()),
        ("trainer.algorithm.kl_loss_coef", {"placement.ref_num_workers"}),
        ("strategy.sequence_parallel_size", {"trainer.micro_train_batch_size_per_gpu", "placement.ref_num_workers"}),
        ("placement", {"trainer.micro_train_batch_size_per_gpu", "placement.ref_num_workers"}),
    ],
)
def test_a_refused_setting_hides_the_rules_that_read_it_and_no_others(refused, hidden):
    broken = config(30, 16, 1, 5, workers=2, ref_workers=4)
    everything = {violation.field for violation in validate_batch_sizes(broken)}
    assert everything == {
        "trainer.policy_mini_batch_size",
        "trainer.micro_train_batch_size_per_gpu",
        "placement.ref_num_workers",
    }
    assert {violation.field for violation in validate_batch_sizes(broken, refused={refused})} == everything - hidden


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
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(1) == (1,)
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
        if role.num_ranks % sizes.ranks_per_share:
            broken.add(("groups", role.name))
        ranks = dealt(size * samples, role.data_parallel_size)
        if sizes.equal_ranks and len(set(ranks)) > 1:
            broken.add(("even_ranks", role.name))
        if sizes.equal_micro_batches and role.mini_batch_size is not None:
            micro, rows = sizes.micro_train_batch_size_per_gpu, max(ranks)  # the others are padded to the fullest
            if len({min(micro, rows - start) for start in range(0, rows, micro)}) > 1:
                broken.add(("even_micro_batches", role.name))
    return broken


SIZE = st.one_of(st.integers(1, 14), st.sampled_from([1, 2, 4, 8, 16, 32, 64]), st.integers(1, 96))
RANKS = st.one_of(st.sampled_from([1, 2, 4, 8]), st.integers(1, 12))


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, derandomize=True)
@given(
    prompts=SIZE,
    mini=SIZE,
    samples=st.integers(1, 8),
    micro=SIZE,
    critic=st.one_of(st.just(0), SIZE),
    workers=RANKS,
    critic_workers=RANKS,
    ref_workers=st.one_of(st.just(0), RANKS),
    group=st.sampled_from([1, 1, 1, 2]),
    data=st.one_of(st.none(), st.integers(1, 2000)),
    more=st.sampled_from([{}, {}, {"batch_validation": "relaxed"}, {"micro_batching": "token_budget"}]),
    negative=st.one_of(
        st.just({}), st.dictionaries(st.sampled_from(sorted(FIELDS.values())), st.integers(-3, 0), max_size=3)
    ),
)
def test_all_broken_rules_are_said_and_every_suggestion_gives_a_valid_configuration(
    prompts, mini, samples, micro, critic, workers, critic_workers, ref_workers, group, data, more, negative
):
    known_config = config(
        prompts,
        mini,
        samples,
        micro,
        critic=critic,
        workers=workers,
        critic_workers=critic_workers,
        ref_workers=ref_workers,
        group=group,
        **more,
    )
    given_config = typed(known_config, " ".join(f"{field}={value}" for field, value in negative.items()))
    known_config = typed(known_config, " ".join(f"{field}={POSITIVE[field]}" for field in negative))
    sizes = sizes_of(known_config, num_train_prompts=data)
    found = problems(sizes)
    assert [problem.key for problem in found] == sorted({problem.key for problem in found}, key=rank_of)
    assert {problem.key for problem in found} == simulated(sizes)
    said = [FIELDS[problem.field] for problem in found if not read_by(problem.key) & set(negative)]
    violations = validate_batch_sizes(given_config, num_train_prompts=data)
    fields = [violation.field for violation in violations]
    assert (sorted(fields[: len(negative)]), fields[len(negative) :]) == (sorted(negative), said)
    for remedy in {violation.remedy for violation in violations}:
        check_remedy(known_config, given_config, remedy, data)


POSITIVE = {field: reduce(getattr, field.split("."), Config()) for field in FIELDS.values()}
"""Of the same kind as what a size should be; which one does not matter to rules that do not read it."""


def read_by(key):
    """The sizes that a rule depends on, by hand."""
    kind, role = key
    batch, samples = "trainer.train_batch_size", "generator.n_samples_per_prompt"
    workers = "placement.ref_num_workers" if role == "reference" else f"placement.{role}_num_workers"
    mini = batch if role == "reference" else f"trainer.{role}_mini_batch_size"
    return {
        "data": {batch},
        "groups": {workers},
        "ranks": {batch, samples, workers},
        "divides": {batch, mini},
        "even_ranks": {mini, samples, workers},
        "even_micro_batches": {mini, samples, workers, "trainer.micro_train_batch_size_per_gpu"},
    }[kind]


KINDS = ("data", "groups", "ranks", "divides", "even_ranks", "even_micro_batches")
ROLES = ("policy", "critic", "reference")


def rank_of(key):
    """Where a problem stands: that of the data, then by model, then by rule."""
    return (key[0] != "data", ROLES.index(key[1]), KINDS.index(key[0]))


def typed(configuration, changes):
    """The configuration after `A=1 B=2`, as typed on the command line."""
    for change in changes.split():
        path, _, value = change.partition("=")
        section, name = path.split(".")
        part = replace(getattr(configuration, section), **{name: value if name == "batch_validation" else int(value)})
        configuration = replace(configuration, **{section: part})
    return configuration


def check_remedy(known_config, given_config, remedy, data):
    """Each suggestion, typed in, leaves nothing to say of batch sizes and nothing new of the rest."""
    assert remedy.startswith("try ")
    for option in remedy[4:].split(", or "):
        after = typed(given_config, re.sub(r" together|, which pads what is uneven", "", option))
        assert validate_batch_sizes(after, num_train_prompts=data) == []
        assert placement_fields(after) <= placement_fields(known_config)


def placement_fields(configuration):
    return {
        violation.field
        for violation in run_rules(configuration, (*PROCESS_RULES, *PLACEMENT_RULES, *ENGINE_PLACEMENT_RULES))
    }


SMALL = st.integers(1, 14)
LIMIT = 60


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    prompts=SMALL,
    mini=SMALL,
    samples=st.integers(1, 4),
    micro=SMALL,
    critic=st.integers(0, 9),
    workers=st.integers(1, 6),
    ref_workers=st.integers(0, 6),
    data=st.one_of(st.none(), st.integers(1, 20)),
    strict=st.booleans(),
)
def test_the_nearest_single_sizes_are_offered_or_the_fewest_together(
    prompts, mini, samples, micro, critic, workers, ref_workers, data, strict
):
    more = {} if strict else {"batch_validation": "relaxed"}
    configuration = config(
        prompts, mini, samples, micro, critic=critic, workers=workers, ref_workers=ref_workers, **more
    )
    sizes = sizes_of(configuration, num_train_prompts=data)
    repairs = find_repairs(sizes, lambda field, value: value <= LIMIT)
    singles = {repair.changes[0] for repair in repairs if len(repair.changes) == 1}
    assert singles == nearest_singles(sizes)
    distances = [sum(abs(log(value / getattr(sizes, field))) for field, value in repair.changes) for repair in repairs]
    assert distances == sorted(distances)
    for repair in repairs:
        assert bool(singles) == (len(repair.changes) == 1)
        for left_out in repair.changes:
            assert problems(replace(sizes, **dict(set(repair.changes) - {left_out})))


def nearest_singles(sizes):
    """By trying every value: the nearest on both sides after which nothing is wrong, of each size that could matter."""
    singles = set()
    for field in {field for problem in problems(sizes) for field in problem.repairs}:
        value = getattr(sizes, field)
        for values in (range(value - 1, 0, -1), range(value + 1, LIMIT + 1)):
            clean = (other for other in values if not problems(replace(sizes, **{field: other})))
            singles |= {(field, other) for other in [next(clean, None)] if other is not None}
    return singles
