from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms.losses.off_policy import Correction, LogRatioLedger, log_ratio_ledger, off_policy_weights
from skyrl_train.config.algorithm import OffPolicyConfig
from skyrl_train.errors import BatchError
from skyrl_train.telemetry import merge_metrics, to_values

RATIOS = torch.tensor([[2.0, 0.5, 4.0], [1.0, 1.1, math.nan], [0.01, 1.0, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
"""Products of the turns 4, 1.1 and 0.01; geometric means 4^(1/3), 1.1^(1/2) and 0.01^(1/3)."""


def correct(config: OffPolicyConfig) -> Correction:
    old = torch.full_like(RATIOS, -1.0)
    return off_policy_weights(old, old - RATIOS.log(), MASK, config)


def rows(weights: Tensor) -> list[list[float]]:
    return [pytest.approx(row, abs=1e-12) for row in weights.tolist()]


def test_without_a_correction_weights_are_1() -> None:
    assert correct(OffPolicyConfig()).weights.tolist() == [[1.0] * 3] * 3


def test_truncated_token_weights() -> None:
    found = correct(OffPolicyConfig(weight="token", weight_high=1.5))
    assert rows(found.weights) == [[1.5, 0.5, 1.5], [1.0, 1.1, 1.0], [0.01, 1.0, 1.0]]
    assert found.metrics["off_policy/weights_bounded_fraction"].value == pytest.approx(2 / 8)
    assert found.metrics["off_policy/ratio"].value == pytest.approx(10.61 / 8)
    assert found.metrics["off_policy/weight"].value == pytest.approx(7.61 / 8)


def test_masked_token_weights() -> None:
    found = correct(OffPolicyConfig(weight="token", weight_mode="mask", weight_low=0.5, weight_high=2.0))
    assert rows(found.weights) == [[2.0, 0.5, 0.0], [1.0, 1.1, 1.0], [0.0, 1.0, 1.0]]


def test_truncated_weights_have_a_lower_bound_too() -> None:
    found = correct(OffPolicyConfig(weight="token", weight_low=0.25, weight_high=1.5))
    assert rows(found.weights) == [[1.5, 0.5, 1.5], [1.0, 1.1, 1.0], [0.25, 1.0, 1.0]]
    assert found.metrics["off_policy/weights_bounded_fraction"].value == pytest.approx(3 / 8)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("token", [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]]),
        ("sequence", [[0.0] * 3, [1.0] * 3, [0.0] * 3]),
        ("geometric", [[1.0] * 3, [1.0] * 3, [0.0] * 3]),
    ],
)
def test_a_mask_alone_weighs_nothing(weight: str, expected: list[list[float]]) -> None:
    config = OffPolicyConfig(weight=weight, weight_mode="mask_only", weight_low=0.4, weight_high=2.5)  # type: ignore[arg-type]
    found = correct(config)
    assert found.weights.tolist() == expected
    left_out = sum(value == 0.0 for row in expected for value in row)
    assert found.metrics["off_policy/weights_bounded_fraction"].value == pytest.approx(left_out / 8)


@pytest.mark.parametrize(
    "config",
    [
        OffPolicyConfig(weight="token", weight_mode="mask_only", weight_low=1.0, weight_high=1.0),
        OffPolicyConfig(sequence_mask="geometric", sequence_mask_low=1.0, sequence_mask_high=1.0),
        OffPolicyConfig(outlier_low=1.0, outlier_high=1.0),
    ],
)
def test_a_bound_of_1_leaves_nothing_out_for_rounding(config: OffPolicyConfig) -> None:
    old = torch.full((4, 6), -1.0, dtype=torch.float64)
    noise = 1e-14 * torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 6, dtype=torch.bool)
    assert off_policy_weights(old, old + noise, mask, config).weights.tolist() == [[1.0] * 6] * 4
    assert off_policy_weights(old, old + 1e-6, mask, config).weights.tolist() == [[0.0] * 6] * 4


def test_sequence_and_geometric_weights_are_the_same_for_a_turns_tokens() -> None:
    product = correct(OffPolicyConfig(weight="sequence", weight_high=3.0)).weights
    assert rows(product) == [[3.0] * 3, [1.1, 1.1, 1.0], [0.01] * 3]
    geometric = correct(OffPolicyConfig(weight="geometric", weight_high=3.0)).weights
    assert rows(geometric) == [[4 ** (1 / 3)] * 3, [1.1**0.5, 1.1**0.5, 1.0], [0.01 ** (1 / 3)] * 3]


@pytest.mark.parametrize(("measure", "low", "high"), [("geometric", 0.9, 1.2), ("product", 0.5, 2.0)])
def test_a_row_outside_the_mask_is_left_out_whole(measure: str, low: float, high: float) -> None:
    config = OffPolicyConfig(sequence_mask=measure, sequence_mask_low=low, sequence_mask_high=high)  # type: ignore[arg-type]
    found = correct(config)
    assert found.weights.tolist() == [[0.0] * 3, [1.0] * 3, [0.0] * 3]
    assert found.metrics["off_policy/turns_left_out_fraction"].value == pytest.approx(2 / 3)
    assert found.metrics["off_policy/turns_under_low_fraction"].value == pytest.approx(1 / 3)
    assert found.metrics["off_policy/turns_over_high_fraction"].value == pytest.approx(1 / 3)


def test_one_outlier_leaves_its_row_out() -> None:
    assert correct(OffPolicyConfig(outlier_low=0.1)).weights.tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert correct(OffPolicyConfig(outlier_high=3.0)).weights.tolist() == [[0.0] * 3, [1.0] * 3, [1.0] * 3]


def test_weights_do_not_depend_on_the_micro_batch() -> None:
    config = OffPolicyConfig(
        weight="sequence", sequence_mask="geometric", sequence_mask_low=0.5, sequence_mask_high=2.0
    )
    old = torch.full_like(RATIOS, -1.0)
    one_by_one = [
        off_policy_weights(old[i : i + 1], (old - RATIOS.log())[i : i + 1], MASK[i : i + 1], config).weights
        for i in range(3)
    ]
    assert torch.equal(torch.cat(one_by_one), correct(config).weights)


@pytest.mark.parametrize("mode", ["truncate", "mask", "mask_only"])
def test_a_nan_on_a_trained_token_stays_visible(mode: str) -> None:
    column = torch.tensor([[math.nan]], dtype=torch.float64)
    config = OffPolicyConfig(weight="token", weight_mode=mode)  # type: ignore[arg-type]
    assert off_policy_weights(column, column, torch.tensor([[True]]), config).weights.isnan().all()


def test_shapes_that_differ_are_named() -> None:
    with pytest.raises(BatchError, match="rollout_logprobs has shape"):
        off_policy_weights(RATIOS, RATIOS[:1], MASK, OffPolicyConfig())


class TestLedger:
    LOGPROBS = torch.tensor([[-1.0, -1.2], [-0.5, math.nan]], dtype=torch.float64)
    OLD = torch.tensor([[-1.1, -1.1], [-0.8, math.nan]], dtype=torch.float64)
    ROLLOUT = torch.tensor([[-1.15, -1.1], [-1.0, math.nan]], dtype=torch.float64)
    SAMPLER = torch.tensor([[9.0, 9.0], [-0.95, math.nan]], dtype=torch.float64)
    MASK = torch.tensor([[True, True], [True, False]])
    STALE = torch.tensor([[False, False], [True, True]])

    @pytest.mark.parametrize("with_sampler", [True, False])
    def test_the_parts_add_up_to_the_log_ratio(self, with_sampler: bool) -> None:
        ledger = self.ledger(with_sampler)
        total = ledger.numerics + ledger.staleness + ledger.drift + ledger.unattributed
        assert torch.allclose(total, torch.where(self.MASK, self.LOGPROBS - self.ROLLOUT, 0.0), atol=1e-15)

    def test_fresh_rows_have_numerics_and_drift_only(self) -> None:
        ledger = self.ledger(with_sampler=True)
        assert ledger.numerics[0].tolist() == pytest.approx([0.05, 0.0])
        assert ledger.drift[0].tolist() == pytest.approx([0.1, -0.1])
        assert ledger.staleness[0].tolist() == [0.0, 0.0]

    def test_stale_rows_are_split_by_the_weights_that_sampled(self) -> None:
        ledger = self.ledger(with_sampler=True)
        assert ledger.numerics[1].tolist() == pytest.approx([0.05, 0.0])
        assert ledger.staleness[1].tolist() == pytest.approx([0.15, 0.0])

    def test_without_them_their_part_is_unattributed(self) -> None:
        ledger = self.ledger(with_sampler=False)
        assert ledger.unattributed.tolist() == [[0.0, 0.0], [pytest.approx(0.2), 0.0]]
        assert ledger.numerics[1].tolist() == [0.0, 0.0]

    def test_metrics(self) -> None:
        metrics = self.ledger(with_sampler=True).metrics(self.MASK)
        assert metrics["off_policy/numerics_mean"].value == pytest.approx(0.1 / 3)
        assert metrics["off_policy/drift_abs_mean"].value == pytest.approx(0.5 / 3)
        assert metrics["off_policy/drift_abs_max"].value == pytest.approx(0.3)

    def test_a_row_may_hold_tokens_of_two_versions(self) -> None:
        ledger = log_ratio_ledger(
            logprobs=self.OLD,
            old_logprobs=self.OLD,
            rollout_logprobs=self.ROLLOUT - 0.25,
            loss_mask=self.MASK,
            is_stale=torch.tensor([[True, False], [False, True]]),
        )
        assert ledger.unattributed.tolist() == [[pytest.approx(0.3), 0.0], [0.0, 0.0]]
        assert ledger.numerics.tolist() == [[0.0, pytest.approx(0.25)], [pytest.approx(0.45), 0.0]]

    def ledger(self, with_sampler: bool) -> LogRatioLedger:
        return log_ratio_ledger(
            logprobs=self.LOGPROBS,
            old_logprobs=self.OLD,
            rollout_logprobs=self.ROLLOUT,
            loss_mask=self.MASK,
            is_stale=self.STALE,
            sampler_logprobs=self.SAMPLER if with_sampler else None,
        )


class TestLedgerByAge:
    """Five trained tokens of ages 0, 0, 1, 1 and 3, whose log-ratios before the update are 0.1, -0.1, 0.5, -0.2 and 1."""

    MASK = torch.tensor([[True, True, True], [True, True, False]])
    AGE = torch.tensor([[0, 0, 1], [1, 3, 9]], dtype=torch.int32)
    BEFORE = torch.tensor([[0.1, -0.1, 0.5], [-0.2, 1.0, math.nan]], dtype=torch.float64)
    DRIFT = torch.tensor([[0.0, 0.2, 0.0], [-0.4, 0.3, math.nan]], dtype=torch.float64)

    def ledger(self, age: Tensor) -> LogRatioLedger:
        rollout = torch.full_like(self.BEFORE, -2.0)
        return log_ratio_ledger(
            logprobs=rollout + self.BEFORE + self.DRIFT,
            old_logprobs=rollout + self.BEFORE,
            rollout_logprobs=rollout,
            loss_mask=self.MASK,
            is_stale=age != 0,
        )

    def metrics(self, age: Tensor, ages: Sequence[int]) -> dict[str, float]:
        return to_values(self.ledger(age).metrics_by_age(self.MASK, age, ages))

    def test_the_distance_of_a_kept_cache_is_that_of_fresh_tokens_behind_older_ones_of_their_turn(self) -> None:
        age = torch.tensor([[1, 0, 0], [0, 0, 9]], dtype=torch.int32)
        found = to_values(self.ledger(age).metrics_behind_updates(self.MASK, age))
        # Tokens 1 and 2 of the first row; the second row is of one version.
        expected = {"cache_distance": (0.1 + 0.5) / 2, "cache_distance_max": 0.5}
        assert found == {f"off_policy/in_flight/{name}": pytest.approx(value) for name, value in expected.items()}

    def test_each_age_has_its_means(self) -> None:
        found = self.metrics(self.AGE, (0, 1, 3))
        expected = {
            "off_policy/abs/age_0": 0.1,
            "off_policy/abs/age_1": 0.35,
            "off_policy/abs/age_3": 1.0,
            "off_policy/k1/age_0": 0.0,
            "off_policy/k1/age_1": -0.15,
            "off_policy/k1/age_3": -1.0,
            "off_policy/kl/age_0": 0.00500417,  # (e^0.1 - 1.1 + e^-0.1 - 0.9) / 2
            "off_policy/kl/age_1": 0.08372601,  # (e^0.5 - 1.5 + e^-0.2 - 0.8) / 2
            "off_policy/kl/age_3": 0.71828183,  # e - 2
            "off_policy/drift/age_0": 0.1,
            "off_policy/drift/age_1": 0.2,
            "off_policy/drift/age_3": 0.3,
        }
        assert found == {name: pytest.approx(value, abs=1e-8) for name, value in expected.items()}

    def test_the_oldest_are_counted_together_and_those_of_another_run_under_no_age(self) -> None:
        age = torch.tensor([[0, -4, 16], [30, 999, 0]], dtype=torch.int32)
        found = self.metrics(age, (-4, 0, 16, 30, 999))
        assert {name.rpartition("/")[2] for name in found} == {"age_0", "age_16"}
        assert found["off_policy/abs/age_16"] == pytest.approx((0.5 + 0.2 + 1.0) / 3)

    def test_rows_in_micro_batches_give_the_same_numbers(self) -> None:
        parts = [
            log_ratio_ledger(
                logprobs=self.BEFORE[row] + self.DRIFT[row],
                old_logprobs=self.BEFORE[row],
                rollout_logprobs=torch.zeros_like(self.BEFORE[row]),
                loss_mask=self.MASK[row],
                is_stale=self.AGE[row] != 0,
            ).metrics_by_age(self.MASK[row], self.AGE[row], (0, 1, 3))
            for row in (slice(0, 1), slice(1, 2))
        ]
        whole = self.metrics(self.AGE, (0, 1, 3))
        assert to_values(merge_metrics(parts)) == {name: pytest.approx(value) for name, value in whole.items()}
