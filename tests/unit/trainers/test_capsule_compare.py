"""Two executions of a step are equal, within bounds, or not; each difference is told with its place."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from skyrl_train.trainers.capsules.compare import (
    EXACT,
    FLOAT32,
    compare_batches,
    compare_metrics,
    compare_tensors,
    table,
)
from tests.support.capsule_parts import batch_of

WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
MOVED = {"a": torch.tensor([1.0, 2.1]), "b": torch.tensor([3.0])}


def test_every_bit_is_demanded_on_the_same_placement() -> None:
    last_bit = {**MOVED, "a": torch.nextafter(MOVED["a"], torch.tensor(9.0))}
    assert compare_tensors("policy weights", MOVED, MOVED, EXACT.change, before=WEIGHTS).holds
    found = compare_tensors("policy weights", last_bit, MOVED, EXACT.change, before=WEIGHTS)
    assert not found.holds
    assert found.where.startswith("a, by")
    assert compare_tensors("policy weights", last_bit, MOVED, FLOAT32.change, before=WEIGHTS).holds


def test_weights_are_compared_as_a_share_of_what_the_step_changed() -> None:
    """0.01 off a step of 0.1 is a tenth, however long the weights are."""
    off = {**MOVED, "a": torch.tensor([1.0, 2.11])}
    found = compare_tensors("policy weights", off, MOVED, FLOAT32.change, before=WEIGHTS)
    assert found.largest == pytest.approx(0.1, rel=1e-4)
    assert not found.holds
    assert compare_tensors("policy optimizer", off, MOVED, FLOAT32.moment).largest == pytest.approx(
        0.01 / 3.7961, rel=1e-3
    )


def test_a_step_that_moved_nothing_is_the_same_only_where_nothing_moved() -> None:
    assert compare_tensors("policy weights", WEIGHTS, WEIGHTS, FLOAT32.change, before=WEIGHTS).holds
    assert not compare_tensors("policy weights", MOVED, WEIGHTS, FLOAT32.change, before=WEIGHTS).holds


@pytest.mark.parametrize("other", [{"a": WEIGHTS["a"]}, {**WEIGHTS, "b": torch.tensor([3.0, 4.0])}])
def test_other_names_or_shapes_never_hold(other: dict[str, torch.Tensor]) -> None:
    found = compare_tensors("policy weights", other, WEIGHTS, FLOAT32.change, before=WEIGHTS)
    assert (found.largest, found.holds) == (math.inf, False)


def test_metrics_are_compared_where_both_have_them_and_those_of_the_layout_only_exactly() -> None:
    found = {"loss/total": 0.5, "layout/policy_positions": 7.0, "own": 1.0}
    recorded = {"loss/total": 0.5, "layout/policy_positions": 9.0, "reward/mean": 1.0}
    (exact,), (bounded,) = (compare_metrics(found, recorded, bounds) for bounds in (EXACT, FLOAT32))
    assert (exact.count, exact.holds, bounded.count, bounded.holds) == (2, False, 1, True)
    assert "layout/policy_positions: 7.0, recorded 9.0" in exact.where


def test_a_metric_that_is_no_number_equals_only_its_like() -> None:
    assert compare_metrics({"a": math.nan}, {"a": None}, EXACT)[0].holds
    assert not compare_metrics({"a": 1.0}, {"a": None}, FLOAT32)[0].holds
    assert not compare_metrics({"a": math.nan}, {"a": 1.0}, FLOAT32)[0].holds
    assert not compare_metrics({"a": 1.0}, {"b": 1.0}, FLOAT32)[0].holds  # nothing was compared


def test_token_ids_must_be_equal_whatever_the_bounds(tmp_path: Path) -> None:
    batch = batch_of(tmp_path)
    ids, logprobs = batch["input_ids"].clone(), batch["rollout_logprobs"].clone()
    ids[4] += 1
    logprobs[4] += 1e-5
    lines = {
        line.what: line
        for line in compare_batches(batch.with_columns(input_ids=ids, rollout_logprobs=logprobs), batch, FLOAT32)
    }
    assert not lines["batch input_ids"].holds
    assert lines["batch input_ids"].where == "index 4"
    assert lines["batch rollout_logprobs"].holds
    text = table(list(lines.values()))
    assert "batch input_ids" in text
    assert text.count("DIFFERS") == 1
