"""How long a run takes, from the rates of another: by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from skyrl_train.config import Config, PlanConfig, RolloutsConfig, TrainerConfig
from skyrl_train.errors import DataError
from skyrl_train.plan.dry_run import plan_batches
from skyrl_train.plan.estimate import PassEstimate, RowLengths
from skyrl_train.plan.time import Rates, disk_bytes, measured_rates, rates_of, run_time, time_lines, work_of_step

STEP = {
    "batch/tokens": 2000.0,
    "batch/trained_tokens": 500.0,
    "layout/policy_positions": 1000.0,
    "layout/policy_tokens": 2000.0,
    "layout/policy_forwards_packed": 3.0,
    "timing/generate": 2.0,
    "timing/score": 0.5,
    "timing/update": 4.0,
    "timing/log": 0.25,
    "timing/tokens_per_s": 300.0,
    "timing/step": 6.75,
}
LENGTHS = RowLengths(
    trajectories=(np.array([60]), np.array([40])), source="test", shared=(np.array([20]), np.array([20]))
)


def run_folder(folder: Path, *records: dict[str, float], ranks: int = 1) -> Path:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    learners = [{"role": "policy", "num_ranks": ranks}]
    (folder / "plan.json").write_text(json.dumps({"learners": learners}), encoding="utf-8")
    return folder


def estimate(**changes: object) -> PassEstimate:
    made = PassEstimate(
        role="policy",
        training=True,
        num_rows=8,
        dummy_rows=0,
        num_tokens=400,
        layout="padded",
        distinct_tokens=400,
        computed_tokens=600,
        micro_batches_per_rank=1,
        largest_micro_batch_tokens=600,
        load_max_over_mean=1.0,
        rows_over_cap=0,
        first_come_padding=0.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def config(**trainer: object) -> Config:
    base = Config()
    sizes = {"train_batch_size": 4, "policy_mini_batch_size": 2, "total_steps": 10, "eval_interval": 5}
    made = replace(base.trainer, **{**sizes, **trainer})  # type: ignore[arg-type]
    return replace(base, trainer=made, generator=replace(base.generator, n_samples_per_prompt=2))


def test_rates_are_work_a_second_and_rank_without_the_first_step(tmp_path: Path) -> None:
    slow = {**STEP, "timing/generate": 99.0, "timing/step": 200.0}
    found = measured_rates(run_folder(tmp_path, slow, STEP, {**STEP, "timing/evaluate": 8.0}, ranks=2))
    assert (found.generated, found.trained) == (500 / 2 / 2, 1000 / 4 / 2)
    assert found.scored == 1000 / 0.5 / 2, "one model, at as many positions as were trained"
    assert (found.layout, found.positions_per_token, found.sampled_share) == ("packed", 0.5, 0.25)
    assert found.every_step_s == 0.25
    assert found.each_time_s == (0.0, 8.0)


def test_a_reference_and_a_critic_are_scored_too(tmp_path: Path) -> None:
    both = {**STEP, "loss/kl": 0.1, "critic/explained_variance": 0.5, "score/policy_pass_skipped": 1.0}
    assert measured_rates(run_folder(tmp_path, both)).scored == 2 * 1000 / 0.5


def test_of_a_batch_of_two_optimizer_steps_half_is_scored(tmp_path: Path) -> None:
    half = {**STEP, "score/policy_pass_skipped": 0.5}
    assert measured_rates(run_folder(tmp_path, half)).scored == 1000 / 2 / 0.5


def test_the_time_of_a_step_follows_from_its_work() -> None:
    settings = config()
    plan = plan_batches(settings, num_train_prompts=40)
    rates = Rates(source="stated", generated=10.0, scored=0.0, trained=100.0, every_step_s=1.0, each_time_s=(6.0, 20.0))
    work = work_of_step(plan, LENGTHS, [estimate()], rates, models_scored=1)
    assert work.sampled_tokens == 8 * 30, "what follows the prompts, of eight samples of 50 tokens"
    assert work.scored_positions == 8 * 50 * 1.5, "padding is scored too"
    assert work.trained_positions == 2 * 600, "in two optimizer steps"
    found = run_time(rates, work, settings.trainer, total_steps=10, num_devices=4)
    assert {phase.name: phase.seconds for phase in found.phases} == {
        "generate": 24.0,
        "score": 2.0,
        "update": 12.0,
        "all else": 1.0,
        "checkpoint": 0.6,
        "evaluate": 6.0,
    }
    assert found.step_s == pytest.approx(45.6)
    assert found.device_hours == pytest.approx(45.6 * 10 * 4 / 3600)
    printed = "\n".join(time_lines(found, {}))
    assert "a step     45.6 s: generate 24 s" in printed
    assert "7.6 min for 10 steps on 4 devices" in printed


def test_with_a_stream_the_learner_waits_for_what_is_left_of_the_rollouts() -> None:
    settings = config(max_staleness=1)
    plan = plan_batches(settings, num_train_prompts=40)
    rates = Rates(source="", generated=10.0, scored=0.0, trained=100.0, every_step_s=1.0, sync_s=0.5, engine_share=0.5)
    work = work_of_step(plan, LENGTHS, [estimate()], rates, models_scored=1)
    found = run_time(rates, work, settings.trainer, total_steps=10, num_devices=4)
    assert found.pipeline.rollouts_s == (24.0,)
    assert (found.pipeline.engine_s, found.pipeline.learner_s, found.pipeline.sync_s) == (12.0, 14.5, 0.5)
    assert found.step_s == pytest.approx((24.0 + 15.0) / 2)
    assert found.phases[0].seconds == pytest.approx(4.5), "the step less what the learner does itself"
    assert "0: 39 s, 1: 19.5 s, 2: 15 s" in "\n".join(time_lines(found, {}))


def test_rates_of_a_stream_are_not_those_of_what_its_learner_waited_for(tmp_path: Path) -> None:
    step = {**STEP, "timing/generate": 0.5, "timing/wait/rollouts": 0.4, "timing/group/max": 2.0, "timing/step": 5.25}
    steps = [{**step, "timing/engine/busy": 1.5}, {**step, "timing/engine/busy": 1.5, "timing/group/max": 6.0}]
    none_ended = {name: value for name, value in steps[0].items() if name != "timing/group/max"}
    found = measured_rates(run_folder(tmp_path, step, *steps, none_ended))
    assert (found.generated, found.engine_share, found.lengths) == (3 * 500 / 12.0, 1.5 / 4.0, (0.5, 1.5))


def test_a_layout_that_was_measured_computes_what_it_computed() -> None:
    plan = plan_batches(config(), num_train_prompts=40)
    rates = Rates(source="", generated=1.0, scored=1.0, trained=1.0, layout="padded", positions_per_token=0.5)
    assert work_of_step(plan, LENGTHS, [estimate()], rates, models_scored=0).trained_positions == 2 * 200
    other = work_of_step(plan, LENGTHS, [estimate(layout="packed")], rates, models_scored=0)
    assert other.trained_positions == 2 * 600


def test_stated_rates_replace_measured_ones(tmp_path: Path) -> None:
    assert rates_of(PlanConfig()) is None
    assert rates_of(PlanConfig(generated_tokens_per_second=5.0)) is None, "nothing is known of training"
    stated = rates_of(PlanConfig(generated_tokens_per_second=5.0, trained_tokens_per_second=7.0))
    assert stated is not None
    assert (stated.generated, stated.trained, stated.source) == (5.0, 7.0, "stated")
    folder = str(run_folder(tmp_path, STEP))
    mixed = rates_of(PlanConfig(rates=folder, generated_tokens_per_second=5.0))
    assert mixed is not None
    assert (mixed.generated, mixed.trained) == (5.0, 250.0)
    assert mixed.source.endswith("some stated")


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"plan\.rates=.*no metrics\.jsonl and plan\.json of a run"):
        measured_rates(tmp_path)
    with pytest.raises(DataError, match="has no step whose time was taken"):
        measured_rates(run_folder(tmp_path, {"step": 1}))


def test_a_plan_without_rates_says_how_to_have_them() -> None:
    (line,) = time_lines(None, {})
    assert "plan.rates=FOLDER" in line


def test_disk_holds_checkpoints_rollouts_and_the_export() -> None:
    settings = config(ckpt_interval=2, max_ckpts_to_keep=2)
    plan = plan_batches(settings, num_train_prompts=40)
    found = disk_bytes(plan, LENGTHS, settings.trainer, settings.rollouts, num_parameters=100)
    assert found["checkpoints"] == 3 * 12 * 100, "two that are kept, and one that is written before the oldest goes"
    assert found["export"] == 400
    assert found["rollouts"] == 8 * 10 * 50 * (8 + 2 * 3.5)
    few = RolloutsConfig(columns=("policy_logprobs",), columns_dtype="bfloat16", keep_last=4, sample_fraction=0.5)
    assert disk_bytes(plan, LENGTHS, settings.trainer, few, num_parameters=None) == {"rollouts": 8 * 2 * 50 * 9.5}
    sgd = replace(settings.trainer.policy.optimizer, name="skyrl_train.learner.optimizer:sgd")
    trainer = replace(settings.trainer, policy=replace(settings.trainer.policy, optimizer=sgd))
    found = disk_bytes(plan, LENGTHS, trainer, settings.rollouts, num_parameters=100)
    assert found["checkpoints"] == 3 * 4 * 100, "which keeps nothing of a parameter but itself, however it is named"
    none = replace(TrainerConfig(), dump_rollouts=False)
    assert list(disk_bytes(plan, LENGTHS, none, RolloutsConfig(), num_parameters=None)) == []
