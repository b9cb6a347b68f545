from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from skyrl_train.batch.planner import split_packed, split_padded
from skyrl_train.errors import BatchError, MemoryLimitError
from skyrl_train.learner.memory.fit import MemoryModel, MemoryProbe, fit_memory_model, probes_at_the_limit


def probe(rows, longest, peak_bytes, *, positions=None, training=True):
    positions = rows * longest if positions is None else positions
    return MemoryProbe(rows=rows, longest=longest, positions=positions, training=training, peak_bytes=peak_bytes)


def planted(shapes, *, base, per_position, per_square):
    return [
        probe(rows, longest, int(base + per_position * rows * longest + per_square * rows * longest**2))
        for rows, longest in shapes
    ]


def model(*, base=0.0, per_position=0.0, per_square=0.0, slack=0.0, margin=0.0, longest=64):
    return MemoryModel(
        base_bytes=base,
        bytes_per_position=per_position,
        bytes_per_position_and_length=per_square,
        slack_bytes=slack,
        margin=margin,
        longest=longest,
        training=True,
        largest_relative_error=0.0,
        r_squared=1.0,
    )


SHAPES = [(1, 512), (2, 512), (1, 256), (4, 256), (1, 128), (8, 128)]

models = st.builds(
    model,
    base=st.floats(0, 1e12),
    per_position=st.floats(0, 1e7),
    per_square=st.floats(0, 1e4),
    slack=st.floats(0, 1e6),
    margin=st.floats(0, 0.5),
    longest=st.just(300),
)


# Fitting


def test_a_fit_finds_what_was_planted():
    fitted = fit_memory_model(planted(SHAPES, base=1_000_000, per_position=2_000, per_square=3), margin=0.0)
    assert fitted.base_bytes == pytest.approx(1_000_000)
    assert fitted.bytes_per_position == pytest.approx(2_000)
    assert fitted.bytes_per_position_and_length == pytest.approx(3)
    assert fitted.largest_relative_error < 1e-9
    assert fitted.r_squared == pytest.approx(1.0)
    assert (fitted.longest, fitted.training) == (512, True)


@given(base=st.integers(1_000, 10**12), per_position=st.integers(0, 10**7), per_square=st.integers(0, 10**4))
def test_a_fit_predicts_its_probes(base, per_position, per_square):
    probes = planted(SHAPES, base=base, per_position=per_position, per_square=per_square)
    assume(len({each.peak_bytes for each in probes}) > 1)
    fitted = fit_memory_model(probes, margin=0.0)
    for each in probes:
        assert fitted.peak_bytes(each.rows, each.longest, each.positions) == pytest.approx(
            each.peak_bytes, rel=1e-6, abs=2
        )


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 99), st.integers(1, 10**9)), min_size=2, max_size=9))
def test_no_probe_lies_above_the_model(shapes):
    probes = [probe(rows, longest, peak) for rows, longest, peak in shapes]
    assume(len({each.positions for each in probes}) > 1)
    fitted = fit_memory_model(probes, margin=0.0)
    for each in probes:
        assert fitted.peak_bytes(each.rows, each.longest, each.positions) >= each.peak_bytes * (1 - 1e-9)


def test_no_coefficient_is_negative_where_longer_rows_took_less():
    fitted = fit_memory_model([probe(1, 64, 900), probe(1, 32, 1000), probe(2, 32, 950)])
    assert min(fitted.base_bytes, fitted.bytes_per_position, fitted.bytes_per_position_and_length) >= 0


def test_a_maximum_of_two_phases_is_never_underestimated_between_its_probes():
    def peak(positions):
        return max(1_000_000 + 10 * positions, 900_000 + 400 * positions)

    fitted = fit_memory_model([probe(rows, 64, peak(rows * 64)) for rows in (1, 2, 4, 8, 16)], margin=0.0)
    assert all(fitted.peak_bytes(rows, 64, rows * 64) >= peak(rows * 64) for rows in range(1, 17))
    assert fitted.largest_relative_error > 0


def test_probes_of_one_length_charge_the_square_to_positions():
    fitted = fit_memory_model(planted([(1, 512), (3, 512)], base=100, per_position=2, per_square=1), margin=0.0)
    assert fitted.bytes_per_position_and_length == 0.0
    assert fitted.bytes_per_position == pytest.approx(514)


def test_the_fit_says_how_good_it_is():
    bent = fit_memory_model([probe(1, 8, 1000), probe(2, 8, 1000), probe(3, 8, 4000)])
    assert bent.largest_relative_error > 0.1
    assert bent.r_squared < 0.9


def test_equal_peaks_are_explained_in_full():
    assert fit_memory_model([probe(1, 8, 500), probe(2, 8, 500)]).r_squared == 1.0


# Degenerate probes


def test_one_size_cannot_be_fitted():
    with pytest.raises(
        BatchError, match=r"at least two probes with different numbers of positions.*got 2 probes with \[8\]"
    ):
        fit_memory_model([probe(1, 8, 100), probe(2, 4, 100)])


def test_no_probe_cannot_be_fitted():
    with pytest.raises(BatchError, match="got 0 probes"):
        fit_memory_model([])


def test_training_and_forward_are_fitted_apart():
    with pytest.raises(BatchError, match="fitted apart"):
        fit_memory_model([probe(1, 8, 100), probe(2, 8, 100, training=False)])


@pytest.mark.parametrize("positions", [7, 17, 0])
def test_positions_must_agree_with_rows(positions):
    with pytest.raises(BatchError, match=r"2 rows of at most 8 tokens compute 8 to 16 positions"):
        fit_memory_model([probe(1, 8, 100), probe(2, 8, 100, positions=positions)])


def test_a_peak_is_positive():
    with pytest.raises(BatchError, match="peak must be positive"):
        fit_memory_model([probe(1, 8, 0), probe(2, 8, 100)])


@pytest.mark.parametrize("margin", [-0.1, float("nan"), float("inf")])
def test_a_margin_is_a_share(margin):
    with pytest.raises(BatchError, match="margin"):
        fit_memory_model([probe(1, 8, 100), probe(2, 8, 200)], margin=margin)


# The peak of one micro-batch


def test_the_peak_of_a_micro_batch():
    assert model(base=100, per_position=2, per_square=0.5, slack=7).peak_bytes(3, 10, 30) == 100 + 7 + 60 + 150


def test_the_margin_is_on_what_grows():
    assert model(base=100, per_position=2, margin=0.5).peak_bytes(1, 10, 10) == 130


def test_nothing_is_said_of_rows_longer_than_any_probe():
    with pytest.raises(BatchError, match="rows of 65 tokens: the model was fitted on rows of 1 to 64"):
        model(longest=64).peak_bytes(1, 65, 65)


# The budget


def test_the_budget_without_a_square_term_is_a_quotient():
    # 10 bytes a position, 1,000 bytes: 100 positions in rows of any length; 101 positions only in rows of 1 or 101
    assert model(per_position=10, longest=10).token_budget(1000, 10) == 100


def test_the_square_term_lowers_the_budget():
    # rows of 10 take 100 + 100 bytes and rows of 9 take 90 + 81: five of either fit, and a sixth of 9 needs 54 positions
    assert model(per_position=10, per_square=1, longest=10).token_budget(1000, 10) == 53


def test_packed_positions_may_be_of_rows_of_any_length():
    assert model(per_position=10, per_square=1, longest=10).token_budget(1000, 10, padded=False) == 50


def test_a_row_that_fits_alone_is_admitted_whatever_else():
    assert model(per_position=10, longest=10).token_budget(100, 10) >= 10


def test_a_row_that_does_not_fit_alone_is_named():
    with pytest.raises(
        MemoryLimitError, match=r"one row of 10 tokens takes 150 bytes.*50 do not depend on it; 149 bytes"
    ):
        model(base=50, per_position=10, longest=10).token_budget(149, 10)


def test_weights_that_do_not_fit_leave_no_budget():
    with pytest.raises(MemoryLimitError):
        model(base=1000).token_budget(999, 8)


def test_positions_that_cost_nothing_are_not_limited():
    assert model(base=10).token_budget(10, 8) >= 1 << 39


def test_the_budget_is_for_lengths_that_were_probed():
    with pytest.raises(BatchError, match="1 to 64"):
        model(longest=64).token_budget(1000, 65)


lengths_of_rows = st.lists(st.integers(1, 300), min_size=1, max_size=40)


@given(models, lengths_of_rows, st.floats(1, 50))
def test_every_padded_micro_batch_under_the_budget_fits(model, lengths, room):
    limit = model.peak_bytes(1, 300, 300) + int(room * model.peak_bytes(1, 300, 300) / 10)
    budget = model.token_budget(limit, 300)
    lengths = np.array(lengths)
    for rows in split_padded(lengths, budget):
        longest = int(lengths[rows].max())
        assert model.peak_bytes(len(rows), longest, len(rows) * longest) <= limit


@given(models, lengths_of_rows, st.floats(1, 50))
def test_every_packed_micro_batch_under_the_budget_fits(model, lengths, room):
    limit = model.peak_bytes(1, 300, 300) + int(room * model.peak_bytes(1, 300, 300) / 10)
    budget = model.token_budget(limit, 300, padded=False)
    lengths = np.array(lengths)
    for rows in split_packed(lengths, budget):
        longest, positions = int(lengths[rows].max()), int(lengths[rows].sum())
        assert model.peak_bytes(len(rows), longest, positions) <= limit


@given(models, st.integers(1, 300), st.integers(0, 10**11))
def test_the_next_larger_budget_admits_a_micro_batch_that_does_not_fit(model, longest, room):
    assume(model.bytes_per_position + model.bytes_per_position_and_length > 1e-3)
    limit = model.peak_bytes(1, longest, longest) + room
    budget = model.token_budget(limit, longest)
    assume(budget < 1 << 40)  # which is as good as no limit
    lengths = np.arange(1, longest + 1)
    largest = np.maximum((budget + 1) // lengths, 1)
    assert any(
        model.peak_bytes(int(rows), int(length), int(rows * length)) > limit * (1 - 1e-8)
        for rows, length in zip(largest, lengths)
    )


@given(models, st.integers(1, 300), st.integers(0, 10**11))
def test_the_budget_is_not_needlessly_small(model, longest, room):
    assume(model.bytes_per_position > 1e-3)
    limit = model.peak_bytes(1, longest, longest) + room
    room_for_growth = (limit - model.base_bytes - model.slack_bytes) / (1 + model.margin)
    worst = model.bytes_per_position + model.bytes_per_position_and_length * longest
    expected = min(room_for_growth / worst * (1 - 1e-6), 1 << 40)  # more is as good as no limit
    assert model.token_budget(limit, longest) >= expected - 1


# The search


class CountedProbe:
    """1,000 bytes, 2 for a position, 1 for a pair of them."""

    def __init__(self, most_rows=None):
        self.asked, self.most_rows = [], most_rows

    def __call__(self, rows, length):
        self.asked.append((rows, length))
        if self.most_rows is not None and rows > self.most_rows:
            return None
        peak = 1000 + 2 * rows * length + rows * length**2
        return MemoryProbe(rows=rows, longest=length, positions=rows * length, training=True, peak_bytes=peak)


def test_the_longest_rows_are_doubled_and_shorter_ones_compute_as_many_positions():
    found = probes_at_the_limit(CountedProbe(), [8, 16], limit_bytes=3000, max_rows=999, held_bytes=lambda: 1000)
    assert [(probe.rows, probe.longest) for probe in found] == [(1, 16), (2, 16), (4, 16), (8, 8)]


def test_where_the_longest_row_fits_once_single_rows_of_the_others_give_the_slope():
    found = probes_at_the_limit(CountedProbe(), [4, 8, 16], limit_bytes=1300, max_rows=999, held_bytes=lambda: 1000)
    assert [(probe.rows, probe.longest) for probe in found] == [(1, 16), (2, 8), (4, 4), (1, 8), (1, 4)]


def test_a_first_size_that_was_foreseen_too_high_begins_again_at_one_row():
    probe = CountedProbe(most_rows=3)
    found = probes_at_the_limit(probe, [8], limit_bytes=10**9, max_rows=9, first_rows=4)
    assert [rows for rows, _ in probe.asked] == [4, 1, 2, 4]
    assert [each.rows for each in found] == [1, 2]


def test_a_fit_of_the_probes_gives_a_budget():
    model = fit_memory_model(
        probes_at_the_limit(CountedProbe(), [4, 8, 16], limit_bytes=2000, max_rows=999), margin=0.0
    )
    assert model.bytes_per_position_and_length == pytest.approx(1.0)
    assert model.peak_bytes(3, 16, 48) <= 2000


def test_rows_are_never_more_than_asked_for():
    probe = CountedProbe()
    probes_at_the_limit(probe, [8], limit_bytes=10**9, max_rows=5)
    assert [rows for rows, _ in probe.asked] == [1, 2, 4]


@pytest.mark.parametrize("lengths", [[], [0, 4]])
def test_lengths_are_positive(lengths):
    with pytest.raises(BatchError, match="positive numbers of tokens"):
        probes_at_the_limit(CountedProbe(), lengths, limit_bytes=1200, max_rows=999)


@given(st.integers(1, 10**6), st.integers(1, 100), st.sampled_from([0.0, 0.01, 1.0]), st.integers(0, 10**8))
def test_no_size_beyond_the_limit_is_probed_and_the_largest_is_more_than_half_of_what_fits(
    base, per_position, square, room
):
    limit = base + room

    def peak(rows, length):
        positions = rows * length
        return int(base + per_position * positions + square * positions * length)

    assume(peak(1, 64) <= limit)
    found = probes_at_the_limit(
        lambda r, n: probe(r, n, peak(r, n)),
        [64, 16],
        limit_bytes=limit,
        max_rows=1 << 30,
        held_bytes=lambda: base,
    )
    assert all(each.peak_bytes <= limit for each in found)
    most = max(each.rows for each in found if each.longest == 64)
    assert peak(2 * most, 64) + 2 > limit
