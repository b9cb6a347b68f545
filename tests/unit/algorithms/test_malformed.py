"""Malformed input: each function raises a BatchError that names what is wrong, or returns the documented value."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from skyrl_train.algorithms.losses.policy import POLICY_LOSSES
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import BatchError
from tests.support.advantage_oracles import Sample, Step, advantage_inputs_of
from tests.support.loss_oracles import columns_of, random_loss_inputs

ESTIMATORS = sorted(ADVANTAGE_ESTIMATORS)
LOSSES = sorted(POLICY_LOSSES)
CONFIG = AlgorithmConfig()


def inputs() -> AdvantageInputs:
    """Two prompts of two trajectories of two turns."""
    zeros = {"old_logprobs": [0.0, 0.0], "ref_logprobs": [0.0, 0.0]}
    steps = [Step(context=1, values=[0.0, 0.0], reward=reward, **zeros) for reward in (1.0, 0.5)]
    samples = [Sample(prompt=number // 2, steps=steps[number % 2 :]) for number in range(4)]
    return advantage_inputs_of(samples, step_wise=True)


def with_value(base: AdvantageInputs, column: str, row: int, position: int, value: float) -> AdvantageInputs:
    changed = getattr(base, column).clone()
    changed[row, position] = value
    return replace(base, **{column: changed})


@pytest.mark.parametrize("name", ESTIMATORS)
class TestEstimators:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_reward_that_is_no_number_names_its_row(self, name: str, value: float) -> None:
        bad = with_value(inputs(), "rewards", 3, 2, value)
        with pytest.raises(
            BatchError, match=r"rewards of row 3 \(prompt 1, trajectory 2, step 0\) is (nan|inf) at position 2"
        ):
            ADVANTAGE_ESTIMATORS[name](bad, CONFIG)

    def test_a_reward_that_is_no_number_on_a_failed_trajectory_is_nobodys(self, name: str) -> None:
        bad = with_value(inputs(), "rewards", 2, 2, math.nan)
        padding = inputs().is_padding.clone()
        padding[2] = True
        output = ADVANTAGE_ESTIMATORS[name](replace(bad, is_padding=padding), CONFIG)
        assert torch.isfinite(output.advantages).all()

    @pytest.mark.parametrize("column", ["values", "old_logprobs", "ref_logprobs"])
    def test_a_number_that_no_trained_token_has_may_be_anything(self, name: str, column: str) -> None:
        junk = with_value(inputs(), column, 3, 0, math.nan)
        assert torch.isfinite(ADVANTAGE_ESTIMATORS[name](junk, CONFIG).advantages).all()

    @pytest.mark.parametrize("column", ["loss_mask", "prompt_index", "trajectory_index", "is_padding", "values"])
    def test_another_number_of_rows_names_the_column(self, name: str, column: str) -> None:
        bad = replace(inputs(), **{column: getattr(inputs(), column)[:2]})
        with pytest.raises(BatchError, match=rf"{column} has shape \[2.*; expected \[6"):
            ADVANTAGE_ESTIMATORS[name](bad, CONFIG)

    @pytest.mark.parametrize(
        ("column", "dtype", "rule"),
        [
            ("rewards", torch.int64, "must be floating point"),
            ("loss_mask", torch.float32, "must be bool"),
            ("is_padding", torch.int64, "must be bool"),
            ("step_index", torch.float32, "must be an integer"),
            ("values", torch.int32, "must be floating point"),
        ],
    )
    def test_another_dtype_names_the_column(self, name: str, column: str, dtype: torch.dtype, rule: str) -> None:
        bad = replace(inputs(), **{column: getattr(inputs(), column).to(dtype)})
        with pytest.raises(BatchError, match=f"{column} {rule}"):
            ADVANTAGE_ESTIMATORS[name](bad, CONFIG)

    def test_something_that_is_no_tensor_is_named(self, name: str) -> None:
        with pytest.raises(BatchError, match="loss_mask must be a tensor; got list"):
            ADVANTAGE_ESTIMATORS[name](replace(inputs(), loss_mask=[[True]]), CONFIG)  # type: ignore[arg-type]
        with pytest.raises(BatchError, match=re.escape("rewards must have shape [rows, len]; got [6]")):
            ADVANTAGE_ESTIMATORS[name](replace(inputs(), rewards=torch.zeros(6)), CONFIG)

    def test_a_trajectory_that_lacks_its_last_step_is_named(self, name: str) -> None:
        bad = replace(inputs(), is_last_step=torch.tensor([False, False, True, False, True, True]))
        with pytest.raises(BatchError, match=r"row 1 \(prompt 0, trajectory 0, step 1\) is the last row .* not marked"):
            ADVANTAGE_ESTIMATORS[name](bad, CONFIG)

    def test_a_step_that_is_there_twice_is_named(self, name: str) -> None:
        bad = replace(inputs(), step_index=torch.zeros(6, dtype=torch.int64))
        with pytest.raises(BatchError, match=r"row 1 \(prompt 0, trajectory 0, step 0\) is in the batch twice"):
            ADVANTAGE_ESTIMATORS[name](bad, CONFIG)

    def test_a_trajectory_of_two_prompts_is_named(self, name: str) -> None:
        bad = replace(inputs(), prompt_index=torch.arange(6))
        with pytest.raises(BatchError, match=r"row 1 \(prompt 1, trajectory 0, step 1\) belongs to another prompt"):
            ADVANTAGE_ESTIMATORS[name](bad, CONFIG)

    def test_rows_without_trained_tokens_get_0(self, name: str) -> None:
        empty = replace(inputs(), loss_mask=torch.zeros_like(inputs().loss_mask))
        output = ADVANTAGE_ESTIMATORS[name](empty, CONFIG)
        assert not output.advantages.any()
        assert not output.returns.any()

    @pytest.mark.parametrize("width", [0, 3])
    def test_no_rows_give_no_rows(self, name: str, width: int) -> None:
        none = AdvantageInputs(**{key: column[:0] for key, column in vars(inputs()).items() if column is not None})
        narrow = {key: c[:, :width] if c.dim() == 2 else c for key, c in vars(none).items() if c is not None}
        assert ADVANTAGE_ESTIMATORS[name](AdvantageInputs(**narrow), CONFIG).advantages.shape == (0, width)


@pytest.mark.parametrize(
    ("name", "column"),
    [("gae", "values"), ("on_policy_distillation", "old_logprobs"), ("on_policy_distillation", "ref_logprobs")],
)
def test_a_column_that_an_estimator_needs_is_named_when_missing_or_not_finite(name: str, column: str) -> None:
    with pytest.raises(BatchError, match=f"needs {column}, which the batch does not have"):
        ADVANTAGE_ESTIMATORS[name](replace(inputs(), **{column: None}), CONFIG)
    with pytest.raises(BatchError, match=f"{column} of row 5"):
        ADVANTAGE_ESTIMATORS[name](with_value(inputs(), column, 5, 1, math.nan), CONFIG)


@pytest.mark.parametrize("name", LOSSES)
class TestLosses:
    @pytest.mark.parametrize("column", ["old_logprobs", "advantages", "loss_mask", "rollout_logprobs"])
    def test_another_shape_names_the_column(self, name: str, column: str) -> None:
        batch = random_loss_inputs(0)
        with pytest.raises(BatchError, match=rf"{column} has shape \[5, 8\]; expected \[5, 9\]"):
            POLICY_LOSSES[name](replace(batch, **{column: getattr(batch, column)[:, :-1]}), CONFIG)

    @pytest.mark.parametrize(
        ("column", "dtype", "rule"),
        [
            ("old_logprobs", torch.int64, "must be floating point"),
            ("advantages", torch.int64, "must be floating point"),
            ("loss_mask", torch.int64, "must be bool"),
        ],
    )
    def test_another_dtype_names_the_column(self, name: str, column: str, dtype: torch.dtype, rule: str) -> None:
        batch = random_loss_inputs(0)
        with pytest.raises(BatchError, match=f"{column} {rule}"):
            POLICY_LOSSES[name](
                replace(batch, **{column: getattr(batch, column).nan_to_num(0, 0, 0).to(dtype)}), CONFIG
            )

    def test_logprobs_that_are_flat_are_refused(self, name: str) -> None:
        batch = random_loss_inputs(0)
        with pytest.raises(BatchError, match=re.escape("logprobs must have shape [rows, len]")):
            POLICY_LOSSES[name](replace(batch, logprobs=batch.logprobs.flatten()), CONFIG)

    def test_no_rows_give_no_rows(self, name: str) -> None:
        batch = random_loss_inputs(0, num_rows=5)
        none = replace(batch, **{key: column[:0] for key, column in columns_of(batch).items()})
        assert POLICY_LOSSES[name](none, CONFIG).token_losses.shape == (0, 9)


@pytest.mark.parametrize("name", ["rollout_is", "dppo"])
def test_rollout_logprobs_that_a_loss_needs_are_named(name: str) -> None:
    with pytest.raises(BatchError, match="needs rollout_logprobs"):
        POLICY_LOSSES[name](replace(random_loss_inputs(0), rollout_logprobs=None), CONFIG)


@pytest.mark.slow
@pytest.mark.skipif(not __debug__, reason="this is the run without asserts")
def test_all_of_this_holds_without_asserts_too() -> None:
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).resolve())]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=300, env={**os.environ}, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
