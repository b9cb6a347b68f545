from __future__ import annotations

import math

import pytest
import torch

from skyrl_train.batch.reduce import masked_mean, whiten
from skyrl_train.errors import BatchError

VALUES = torch.tensor([[1.0, 3.0, math.nan], [5.0, math.inf, -7.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_a_mean_runs_over_the_tokens_of_the_mask() -> None:
    assert float(masked_mean(VALUES, MASK)) == 3.0
    assert masked_mean(VALUES, MASK, 1).tolist() == [2.0, 5.0]


def test_nothing_masked_in_gives_0() -> None:
    nothing = torch.zeros_like(MASK)
    assert float(masked_mean(VALUES, nothing)) == 0.0
    assert whiten(VALUES, nothing).tolist() == [[0.0] * 3] * 2


def test_whitened_tokens_have_mean_0_and_deviation_1_and_others_are_0() -> None:
    assert whiten(VALUES, MASK).tolist() == [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


def test_each_range_is_whitened_on_its_own_and_the_rest_becomes_0() -> None:
    values = torch.tensor([1.0, 3.0, 10.0, 30.0, 5.0])
    found = whiten(values, torch.ones(5, dtype=torch.bool), boundaries=[(0, 2), (2, 4)])
    half = 0.5**0.5
    assert found.tolist() == pytest.approx([-half, half, -half, half, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("values", [[0.1, 0.1, 0.1], [7.0], [0.1 + 0.2, 0.3]])
def test_equal_values_and_a_single_one_become_exactly_0(values: list[float], dtype: torch.dtype) -> None:
    column = torch.tensor(values, dtype=dtype)
    assert not whiten(column, torch.ones_like(column, dtype=torch.bool)).any()


def test_a_nan_that_counts_is_refused() -> None:
    with pytest.raises(BatchError, match="not all finite"):
        whiten(VALUES, torch.ones_like(MASK))


def test_whitening_float32_is_computed_in_float64() -> None:
    values = 1000 + torch.arange(1000) / 1000
    found = whiten(values, torch.ones(1000, dtype=torch.bool)).double()
    assert abs(float(found.mean())) < 1e-6
    assert float(found.std()) == pytest.approx(1.0, abs=1e-6)
