from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
import torch

from skyrl_train.batch import SCHEMA
from skyrl_train.batch.layouts import LAYOUTS, shared_layout
from skyrl_train.batch.planner import make_micro_batch_strategy
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import OptimizerConfig, PolicyConfig
from skyrl_train.config.rules import validate_batch_sizes
from skyrl_train.errors import Violation
from skyrl_train.plan import (
    RowLengths,
    estimate as plan_estimate,
    make_plan_report,
    plan_batches,
    recorded_lengths,
    render_text,
    to_json,
)
from skyrl_train.plan.batch_plan import ceil_div
from skyrl_train.plan.memory.device import DeviceMemory, PassMemory
from skyrl_train.plan.notes import environment_notes, percent, plan_notes
from skyrl_train.plan.report import TOKEN_BYTES
from skyrl_train.rollout.envs import parse_answer
from skyrl_train.runs import assembler
from tests.support.batch_builders import failed_trajectory, make_config, make_rollouts, make_trajectory, make_turn

ROWS = ("per_trajectory", "per_turn")


def of_lengths(*lengths):
    return RowLengths(trajectories=tuple(np.array(rows) for rows in lengths), source="of a test")


def notes_of(config, prompts):
    plan = plan_batches(config, num_train_prompts=prompts)
    notes = plan_notes(
        plan,
        trainer=config.trainer,
        generator=config.generator,
        critic_optimizer=config.critic.optimizer,
        num_train_prompts=prompts,
    )
    return [str(note) for note in notes]


def assumed_lengths(config):
    longest = config.data.max_prompt_length
    return plan_estimate.assumed_lengths(config.generator, seed=config.seed, max_prompt_length=longest)


def estimate_passes(config, plan, lengths):
    trainer, generator = config.trainer, config.generator
    return plan_estimate.estimate_passes(plan, lengths, trainer=trainer, generator=generator, seed=config.seed)


def test_recorded_lengths_have_a_row_per_trajectory_or_per_turn():
    turns = make_turn([1, 2], [3]), make_turn([1, 2, 3, 4], [5, 6])
    rollouts = make_rollouts(make_trajectory("a", 0, *turns), failed_trajectory("a", 1, *turns), n_samples=2)
    merged = recorded_lengths([rollouts], step_wise=False, source="x")
    assert [rows.tolist() for rows in merged.trajectories] == [[6]]
    step_wise = recorded_lengths([rollouts], step_wise=True, source="x")
    assert [rows.tolist() for rows in step_wise.trajectories] == [[3, 6]]


def test_recorded_lengths_need_a_trajectory_that_did_not_fail():
    rollouts = make_rollouts(failed_trajectory("a", 0), n_samples=1)
    with pytest.raises(ValueError, match=r"runs.jsonl: every trajectory failed"):
        recorded_lengths([rollouts], step_wise=False, source="runs.jsonl")


@pytest.mark.parametrize("step_wise", [False, True])
def test_assumed_lengths_stay_within_the_context_and_are_the_same_every_time(step_wise):
    config = make_config(prompts=4, mini_batch=2, step_wise=step_wise, max_context_length=300)
    lengths = assumed_lengths(config)
    assert lengths.all_rows.min() >= 128
    assert lengths.all_rows.max() <= 300
    assert (len(lengths.all_rows) > len(lengths.trajectories)) == step_wise
    assert all((np.diff(rows) > 0).all() for rows in lengths.trajectories)
    assert np.array_equal(assumed_lengths(config).all_rows, lengths.all_rows)


def test_an_estimate_counts_padding_dummies_and_micro_batches():
    config = make_config(
        prompts=5,
        mini_batch=5,
        trainer={"micro_train_batch_size_per_gpu": 2, "batch_validation": "relaxed"},
        placement={"policy_num_workers": 2},
    )
    (estimate,) = estimate_passes(config, plan_batches(config, num_train_prompts=5), of_lengths([10]))
    assert (estimate.num_rows, estimate.dummy_rows, estimate.num_tokens) == (5, 1, 50)
    assert estimate.micro_batches_per_rank == 2
    assert estimate.computed_tokens == 20 + 10 + 20 + 2
    assert estimate.padding == pytest.approx(1 - 50 / 52)
    assert estimate.load_max_over_mean == pytest.approx(30 / 26, rel=1e-3)


def test_an_estimate_of_a_token_budget_counts_rows_over_the_cap():
    config = make_config(
        prompts=4, mini_batch=4, trainer={"micro_batching": "token_budget", "max_tokens_per_microbatch": 25}
    )
    (estimate,) = estimate_passes(config, plan_batches(config, num_train_prompts=4), of_lengths([30]))
    assert (estimate.rows_over_cap, estimate.micro_batches_per_rank, estimate.largest_micro_batch_tokens) == (4, 4, 30)


@pytest.mark.parametrize(("budget", "micro_batches"), [(10, 4), (20, 2), (1000, 1)])
def test_micro_batches_that_size_themselves_are_counted_under_what_fits(budget, micro_batches):
    config = make_config(prompts=4, mini_batch=4, trainer={"micro_batching": "auto"})
    memory = DeviceMemory(
        device_bytes=1 << 30,
        longest=100,
        margin_bytes=0,
        context_bytes=0,
        passes=tuple(pass_memory(phase, budget) for phase in ("training", "scoring")),
        engine_bytes=0,
        resident_bytes=0,
    )
    report = make_plan_report(config, num_train_prompts=4, lengths=of_lengths([10]), memory=memory)
    assert [each.micro_batches_per_rank for each in report.estimates] == [micro_batches]
    assert f"policy {budget:,} in training, {budget:,} in scoring" in render_text(report)
    unknown = make_plan_report(config, num_train_prompts=4, lengths=of_lengths([10]))
    assert "since plan.device_memory_gb is not stated" in render_text(unknown)


def pass_memory(phase, budget):
    return PassMemory(
        role="policy",
        phase=phase,
        budget=budget,
        rows_of_longest=1,
        moment="in the head",
        kinds={"activations": 1},
        limit_bytes=1 << 30,
    )


def test_a_custom_planner_is_estimated_too():
    config = make_config(prompts=3, mini_batch=3, trainer={"micro_batching": "tests.unit.batch.test_microbatch:halves"})
    (estimate,) = estimate_passes(config, plan_batches(config, num_train_prompts=3), of_lengths([10]))
    assert (estimate.micro_batches_per_rank, estimate.computed_tokens) == (2, 30)


def test_padding_is_allowed_at_a_cost_that_is_said():
    config = make_config(
        prompts=8, mini_batch=8, trainer={"batch_validation": "relaxed"}, placement={"policy_num_workers": 11}
    )
    with pytest.raises(Exception, match="a policy rank would have nothing to do"):
        notes_of(config, 8)
    config = make_config(
        prompts=16, mini_batch=8, trainer={"batch_validation": "relaxed"}, placement={"policy_num_workers": 11}
    )
    assert notes_of(config, 16) == [
        "placement.policy_num_workers: 3 dummy rows beside 8 in a policy pass over 11 ranks; 27 % of the pass",
        "trainer.micro_train_batch_size_per_gpu: 32 rows allowed, but a policy rank has 1 in a step; none: one forward "
        "holds them all",
    ]


@pytest.mark.parametrize(
    ("settings", "prompts", "note"),
    [
        ({"n_samples": 10}, 33, "33 training prompts are 8 batches and 1 left over; 3.0 % of the prompts"),
        ({"n_samples": 9, "trainer": {"batch_validation": "relaxed", "micro_train_batch_size_per_gpu": 16}}, 4,
         "18 rows of a policy rank are 2 micro-batches of up to 16; they are 56 % full"),
        ({"step_wise": True, "placement": {"policy_num_workers": 3}}, 4,
         "up to 2 dummy rows in a policy pass of at least 2"),
        ({"trainer": {"micro_batching": "token_budget", "max_tokens_per_microbatch": 100}}, 4,
         "a row may have up to generator.max_context_length=512 tokens, the cap is 100; a longer row goes alone"),
        ({"n_samples": 5, "trainer": {"docs_per_step": 8, "docs_per_step_exact": True}}, 4,
         "20 documents are 2 steps of 8 and one of 4"),
        ({"n_samples": 5, "trainer": {"docs_per_step": 8, "micro_train_batch_size_per_gpu": 3}}, 4,
         "a step overshoots its 8 documents by 1: it closes after a whole micro-batch on each of 1 ranks; 3 steps a batch"),
        ({"n_samples": 5, "step_wise": True, "trainer": {"docs_per_step": 8, "micro_train_batch_size_per_gpu": 4}}, 4,
         "a step overshoots its 8 documents by 0 to 3: it closes after a whole micro-batch on each of 1 ranks; 2 to 3"),
        ({"trainer": {"docs_per_step": 8}}, 4, "8 documents a step, but a batch has 4"),
        ({"trainer": {"policy": PolicyConfig(optimizer=OptimizerConfig(warmup_steps=8))}}, 4,
         "8 steps of warm-up in a run of 2 optimizer steps; the learning rate ends at 25 % of its peak"),
    ],
)  # fmt: skip
def test_notes_say_what_is_allowed_and_what_it_costs(settings, prompts, note):
    config = make_config(prompts=4, mini_batch=2, **{"n_samples": 1, **settings})
    assert any(note in text for text in notes_of(config, prompts)), notes_of(config, prompts)


@pytest.mark.parametrize("env_class", ["gsm8k", "gsm8k_multi_turn"])
def test_an_environment_that_misreads_answers_is_named(env_class):
    (note,) = environment_notes(env_class)
    assert str(note).startswith(f"environment.env_class: skyrl-gym's {env_class} compares the first `#### ` answer")
    assert "environment=word_problems accepts them" in note.cost
    assert not environment_notes("word_problems") + environment_notes(None)


@pytest.mark.parametrize("answer", ["#### 42.", "#### 42.0", "#### $42", "#### 41\n#### 42"])
def test_what_the_note_says_of_that_environment_is_so(answer):
    score = importlib.import_module("skyrl_gym.envs.gsm8k.utils").compute_score
    assert score("#### 42", "42") == 1.0
    assert score(answer, "42") == 0
    assert parse_answer(answer) == 42


def test_percent():
    assert [percent(share) for share in (0, 0.004, 0.27, 1)] == ["0 %", "0.4 %", "27 %", "100 %"]


def full_report(**kwargs):
    config = make_config(
        prompts=4,
        mini_batch=2,
        critic_mini_batch=4,
        n_samples=16,
        trainer={
            "total_steps": 10,
            "policy": PolicyConfig(optimizer=OptimizerConfig(lr=0.5, warmup_steps=2, schedule="linear")),
            "algorithm": AlgorithmConfig(kl_loss_coef=0.1),
        },
    )
    return make_plan_report(config, num_train_prompts=9, **kwargs)


def test_the_report_says_everything():
    report = full_report(lengths=of_lengths([100], [50]), num_parameters=1000)
    assert [(point.step, point.rate) for point in report.learning_rates if point.role == "policy"] == [
        (0, 0.25),
        (1, 0.5),
        (5, pytest.approx(0.5 * 15 / 18)),
        (10, pytest.approx(0.5 * 10 / 18)),
        (15, pytest.approx(0.5 * 5 / 18)),
        (19, pytest.approx(0.5 * 1 / 18)),
    ]
    sizes = {item.what: item.num_bytes for item in report.storage}
    assert sizes["training batch on the controller"] == 64 * 75 * (25 + 8)
    assert sizes["weights to the inference engine"] == 4000
    text = render_text(report)
    for expected in (
        "samples per optimizer step  32",
        "optimizer steps per batch   2",
        "optimizer steps in all      20",
        "fixed: 32 rows in training, 64 in scoring",
        "critic's optimizer steps    1 per batch, 10 in all",
        "policy     1 rank, 32 rows each (32 sequences, 0 dummy rows), accumulates 1 micro-batch\n",
        "reference  1 rank, 64 rows each (64 sequences, 0 dummy rows), scores in 1 micro-batch\n",
        "One pass, with lengths of a test",
        "9 training prompts are 2 batches and 1 left over; 11 % of the prompts",
    ):
        assert expected in text


def test_the_report_as_json():
    record = json.loads(to_json(full_report(lengths=of_lengths([100]))))
    assert record["plan"]["total_optimizer_steps"] == 20
    assert record["plan"]["learners"][0]["rows_per_rank"] == 32
    assert record["estimates"][0]["padding"] == 0
    assert record["violations"] == []
    assert record["notes"][0]["field"] == "trainer.train_batch_size"


def test_a_report_without_a_plan_lists_every_violation():
    report = make_plan_report(make_config(prompts=8, mini_batch=3), num_train_prompts=4)
    assert render_text(report).splitlines()[0] == "2 problems, no plan:"
    assert "trainer.policy_mini_batch_size: must divide trainer.train_batch_size=8" in render_text(report)
    assert json.loads(to_json(report))["plan"] is None


def test_violations_found_before_are_listed_once():
    config = make_config(prompts=8, mini_batch=3)
    before = [Violation(field="seed", rule="must be 0", value="1", remedy="try 0"), *validate_batch_sizes(config)]
    report = make_plan_report(config, num_train_prompts=4, violations=before)
    assert [violation.field for violation in report.violations] == [
        "seed",
        "trainer.policy_mini_batch_size",
        "trainer.train_batch_size",
    ]


def test_lengths_are_assumed_where_none_were_recorded():
    assert full_report().lengths_source.startswith("assumed: long-tailed")


def test_what_the_plan_knows_without_torch_is_true():
    schema = SCHEMA
    assert {name: schema[name].dtype.itemsize for name in TOKEN_BYTES} == TOKEN_BYTES
    assert schema["loss_weights"].dtype == torch.float64


PROMPT = tuple(range(10, 22))


def answered(sample, *, extends=True, turns=3):
    """A conversation of the common prompt, each turn a response of `4 + sample` tokens and an observation of two."""
    context, made = list(PROMPT), []
    for turn in range(turns):
        response = [30 + sample] * (4 + sample)
        made.append(make_turn(context, response))
        context = (context if extends else [*PROMPT, 60 + 4 * sample + turn]) + response + [50, 51]
    return make_trajectory("p", sample, *made)


@pytest.mark.parametrize(("step_wise", "extends", "cap"), [(False, True, 60), (True, True, 60), (True, False, 1000)])
@pytest.mark.parametrize("layout", ["padded", "packed", "prefix_shared", "auto"])
@pytest.mark.parametrize("micro_batching", ["token_budget", "tests.unit.batch.test_planner:greedy"])
def test_recorded_rollouts_are_planned_as_they_will_be_computed(micro_batching, layout, step_wise, extends, cap):
    rollouts = make_rollouts(*(answered(sample, extends=extends) for sample in range(4)), n_samples=4)
    config = make_config(
        prompts=1,
        mini_batch=1,
        n_samples=4,
        step_wise=step_wise,
        trainer={"layout": layout, "micro_batching": micro_batching, "max_tokens_per_microbatch": cap},
    )
    lengths = recorded_lengths([rollouts], step_wise=step_wise, source="x")
    (estimate,) = estimate_passes(config, plan_batches(config, num_train_prompts=1), lengths)

    batch = assembler(config, rows=ROWS[step_wise])(rollouts, step=1, weight_version=0)
    strategy = make_micro_batch_strategy(config.trainer, merge_turns=True)
    parts = strategy.forwards(batch, training=True)
    name = parts[0].layout
    positions = [LAYOUTS[name](batch.take(part.rows), merge=True).num_positions for part in parts]
    assert (estimate.layout, estimate.computed_tokens) == (name, sum(positions))
    assert (estimate.micro_batches_per_rank, estimate.largest_micro_batch_tokens) == (len(parts), max(positions))
    assert estimate.num_tokens == batch.num_tokens
    if layout == "prefix_shared":
        assert estimate.distinct_tokens == shared_layout(batch).num_positions


def test_assumed_samples_share_their_prompt_and_turns_extend_one_another():
    config = make_config(prompts=8, mini_batch=8, n_samples=8, step_wise=True, trainer={"layout": "auto"})
    (estimate,) = estimate_passes(config, plan_batches(config, num_train_prompts=8), assumed_lengths(config))
    assert estimate.layout == "prefix_shared"
    assert estimate.distinct_tokens <= estimate.computed_tokens < 0.6 * estimate.num_tokens
    assert estimate.padding == 0
    text = render_text(make_plan_report(config, num_train_prompts=8))
    assert f"layout prefix_shared computes {percent(estimate.computed_tokens / estimate.num_tokens)} of the" in text


def test_whole_prompts_go_to_ranks_where_prefixes_are_shared():
    settings = {"layout": "prefix_shared", "batch_validation": "relaxed"}
    config = make_config(prompts=16, mini_batch=16, n_samples=8, trainer=settings, placement={"policy_num_workers": 4})
    (estimate,) = estimate_passes(config, plan_batches(config, num_train_prompts=16), assumed_lengths(config))
    assert estimate.computed_tokens < 1.05 * estimate.distinct_tokens
    assert estimate.load_max_over_mean < 1.05


def test_a_run_that_counts_documents_is_told_where_its_steps_close():
    """Ten trajectories of one row, micro-batches of three rows on one rank, four documents wanted."""
    config = make_config(
        prompts=5,
        mini_batch=5,
        n_samples=2,
        trainer={"docs_per_step": 4, "micro_train_batch_size_per_gpu": 3},
    )
    (estimate,) = estimate_passes(config, plan_batches(config, num_train_prompts=5), of_lengths([30]))
    assert [(step.num_documents, step.num_rounds, step.overshoot) for step in estimate.document_steps] == [
        (6, 2, 2),
        (4, 2, 0),
    ]
    text = render_text(make_plan_report(config, num_train_prompts=5, lengths=of_lengths([30])))
    assert (
        "documents close 2 steps a batch, of 4 to 6 over 2 rounds of micro-batches, up to 2 beyond the target" in text
    )


def test_ceil_div() -> None:
    assert [ceil_div(total, 4) for total in (0, 1, 4, 5)] == [0, 1, 1, 2]
