from __future__ import annotations

import pytest
import torch

from skyrl_train.algorithms.sequences import BLOCK, discounted_suffix_sum, next_in_segment, position_in_segment


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.999, 1.0])
def test_suffix_sums_of_runs_around_the_size_of_a_block(factor: float) -> None:
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 1, 2 * BLOCK, 3 * BLOCK + 7, 2, 10 * BLOCK]
    values = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    segment = torch.repeat_interleave(torch.arange(len(lengths)) * 5, torch.tensor(lengths))
    expected = values.tolist()
    for t in reversed(range(len(expected) - 1)):
        if segment[t] == segment[t + 1]:
            expected[t] += factor * expected[t + 1]
    assert discounted_suffix_sum(values, segment, factor).tolist() == pytest.approx(expected, abs=1e-12)


def test_nothing_has_no_sum() -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    assert discounted_suffix_sum(empty, torch.zeros(0, dtype=torch.int64), 0.9).tolist() == []
    assert position_in_segment(torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_positions_and_successors_within_runs() -> None:
    segment = torch.tensor([7, 7, 9, 9, 9, 7])
    assert position_in_segment(segment).tolist() == [0, 1, 0, 1, 2, 0]
    assert next_in_segment(torch.arange(6.0), segment).tolist() == [1.0, 0.0, 3.0, 4.0, 0.0, 0.0]
