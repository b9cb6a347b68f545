"""What a step takes by what a machine does in a second: by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from skyrl_train.batch.layouts import ModelShape
from skyrl_train.config import Config
from skyrl_train.config.models import PlatformConfig
from skyrl_train.plan.dry_run import expected_step_seconds, plan_batches
from skyrl_train.plan.estimate import RowLengths
from skyrl_train.plan.forms.scale import MachineRates
from skyrl_train.plan.machine import machine_rates, stated_rates

SHAPE = ModelShape(
    num_layers=2,
    linear_flops_per_token=2e6,
    attention_flops_per_pair=100.0,
    head_flops_per_token=1e6,
    hidden_size=100,
    kv_numbers_per_token=50,
)
MACHINE = MachineRates(
    source="by hand",
    widths=(10.0, 1000.0),
    trained_flops=(1e9, 3e9),
    decoded_flops=1e9,
    head_flops=4e9,
    attention_flops=1e9,
    pass_s=5e-3,
    layer_s=3e-3,
    decoded_step_s=4e-2,
    decoded_layer_s=1e-2,
    token_s=1e-3,
    read_bytes=1e8,
    parameter_s=1e-9,
)


def test_products_take_what_models_of_about_the_width_took() -> None:
    cost = MACHINE.cost(SHAPE)
    assert cost.per_position == pytest.approx(3 * 2e6 / 2e9), "halfway between the two widths, by factors"
    assert cost.per_loss_token == pytest.approx(3 * 1e6 / 4e9)
    assert cost.per_call == pytest.approx(5e-3 + 2 * 3e-3)


def test_a_step_of_decoding_starts_each_layer_and_reads_all_weights() -> None:
    engine = MACHINE.engine(SHAPE, number_bytes=4, slots=8)
    assert engine.step_s == pytest.approx(4e-2 + 2 * 1e-2 + 4 * 1.5e6 / 1e8)
    assert engine.sequence_s == pytest.approx(1e-3 + 3e6 / 1e9)
    assert engine.context_token_s == pytest.approx(4 * 50 / 1e8)
    assert engine.prompt_token_s == pytest.approx(1e-3), "a third of what is trained"


def test_more_threads_compute_more() -> None:
    assert stated_rates("cpu", num_threads=2).head_flops == 2 * stated_rates("cpu").head_flops
    assert "reckoned" in stated_rates("H100").source


def test_the_plan_of_a_gpu_says_whose_rates_it_reckons_with() -> None:
    names = ("linear_flops", "attention_flops", "flex_flops", "kernel_s", "read_bytes")
    rates = {**dict.fromkeys(names, 2e12), "device": "H100", "measured_on": "2026-01-02"}
    gpu = PlatformConfig(name="gpu", device="cuda:0", rates=rates)
    found = machine_rates(gpu, "bfloat16")
    assert found.source == "reckoned from rates of H100 measured on 2026-01-02"
    assert found.head_flops == 2e12
    assert machine_rates(replace(gpu, rates=None), "bfloat16").source == "reckoned from stated rates of a GPU"


def test_a_step_is_expected_of_the_settings_alone() -> None:
    base = Config()
    sizes = {"train_batch_size": 4, "policy_mini_batch_size": 2, "total_steps": 10}
    config = replace(base, trainer=replace(base.trainer, **sizes))  # type: ignore[arg-type]
    plan = plan_batches(config, num_train_prompts=40)
    lengths = RowLengths(trajectories=(np.array([60]),), shared=(np.array([20]),), source="test")
    found = expected_step_seconds(config, plan, lengths=lengths, num_eval_prompts=4)
    twice = expected_step_seconds(config, plan, lengths=lengths, num_eval_prompts=8)
    assert found is not None
    assert twice is not None
    assert min(found.generate_s, found.score_s, found.update_s, found.sync_s) > 0
    assert found.step_s == found.generate_s + found.score_s + found.update_s + found.sync_s
    assert found.evaluate_s < twice.evaluate_s < 2 * found.evaluate_s, "steps of decoding are as many for more rows"
    elsewhere = replace(config, model=replace(config.model, path="/nowhere"))
    assert expected_step_seconds(elsewhere, plan) is None


def test_recomputing_makes_an_update_longer_and_nothing_else() -> None:
    base = Config()
    plan = plan_batches(base, num_train_prompts=64)
    lengths = RowLengths(trajectories=(np.array([60]),), shared=(np.array([20]),), source="test")
    plain = expected_step_seconds(base, plan, lengths=lengths)
    recomputes = replace(base.model, gradient_checkpointing=True)
    longer = expected_step_seconds(replace(base, model=recomputes), plan, lengths=lengths)
    assert plain is not None
    assert longer is not None
    assert 1.1 < longer.update_s / plain.update_s < 4 / 3
    assert longer.score_s == pytest.approx(plain.score_s, rel=0.2)
    assert longer.generate_s == pytest.approx(plain.generate_s)
