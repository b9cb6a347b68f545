"""Halving finds the one that is bad, and says where there is no such one."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from skyrl_train.runs.capsule_bisect import (
    first_bad,
    halve,
    in_context,
    largest_part,
    ninth_decile,
    non_finite_column,
    non_finite_tensors,
    place_of,
    suspects,
    with_loss_on,
)
from tests.support.capsule_parts import batch_of


@pytest.mark.parametrize("count", [1, 2, 3, 8, 13])
def test_halving_finds_each_item_that_is_bad_by_itself(count: int) -> None:
    for bad in range(count):
        tried: list[int] = []

        def is_bad(part: list[int], bad: int = bad, tried: list[int] = tried) -> bool:
            tried.append(len(part))
            return bad in part

        assert halve(range(count), is_bad) == [bad]
        assert sum(tried) <= 2 * count


def test_halving_stops_at_items_that_are_bad_together_alone() -> None:
    assert halve(range(8), lambda part: {2, 3} <= set(part)) == [2, 3]
    assert halve(range(8), lambda part: {0, 7} <= set(part)) == list(range(8))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_first_item_with_which_a_beginning_is_bad_is_found(count: int) -> None:
    for bad in range(count):
        assert first_bad(count, lambda length, bad=bad: length > bad) == bad  # type: ignore[misc]


def test_the_largest_part_is_found_by_its_vector_with_half_of_them_computed() -> None:
    vectors, asked = torch.tensor([[1.0, 0], [2, 1], [0, 9], [4, 0], [3, 3]]), list[list[int]]()

    def vector(part: Sequence[int]) -> torch.Tensor:
        asked.append(list(part))
        return vectors[list(part)].sum(0)

    assert largest_part(range(5), vector) == (2, 9.0)
    assert asked == [[0, 1, 2, 3, 4], [0, 1], [2]]


def test_those_worth_a_look_are_of_the_groups_that_are_largest_together() -> None:
    norms, asked = [1.0] * 100, list[int]()
    norms[57] = 12.0

    def size(some: Sequence[int]) -> float:
        asked.append(len(some))
        return math.sqrt(sum(norms[index] ** 2 for index in some))

    found = suspects(100, size)
    assert found[57] == max(found.values()) == 12.0
    assert len(found) == 20
    assert sorted(found.values())[-2] == 1.0
    assert (asked.count(10), asked.count(1)) == (10, 20)
    assert suspects(1, lambda some: float(len(some))) == {0: 1.0}
    assert suspects(0, lambda some: float(len(some))) == {}


def test_what_is_large_is_told_from_the_many_that_are_near_zero_and_from_the_one_that_is_too_large() -> None:
    assert ninth_decile([1.0] * 3 + [0.001] * 17) == 1.0
    assert ninth_decile([900.0] + [1.0] * 3 + [0.001] * 16) == 1.0
    assert ninth_decile([2.0]) == 2.0
    assert math.isnan(ninth_decile([]))


def test_tensors_are_named_with_the_count_and_the_first_place() -> None:
    tensors = {
        "good": torch.ones(3),
        "ids": torch.ones(2, dtype=torch.int32),
        "bad": torch.tensor([[1.0, float("inf")], [float("nan"), 0.0]]),
    }
    assert non_finite_tensors(tensors) == {"bad": (2, 1)}


def test_a_token_is_told_by_trajectory_turn_and_context(tmp_path: Path) -> None:
    batch = batch_of(tmp_path)
    place = place_of(batch, 1, 5, lambda ids: "".join(f"<{token}>" for token in ids))
    assert (place.uid, place.sample, place.turn, place.position, place.token_id) == ("p0", 1, 1, 5, 5)
    assert place.text == "<1><2><3><4><9>>><5><<"
    assert [place_of(batch, 1, position, None).turn for position in range(6)] == [0, 0, 0, 0, 1, 1]
    apart = batch_of(tmp_path, step_wise=True)
    assert [place_of(apart, row, 2, None).turn for row in (1, 2)] == [0, 1]
    assert place_of(apart, 3, 2, None).sample == 2
    assert in_context([1, 2, 3], 1, None) == "[1]>>[2]<<[3]"


@pytest.mark.parametrize("name", ["rewards", "rollout_logprobs"])
def test_the_column_that_others_are_made_of_is_named_first(tmp_path: Path, name: str) -> None:
    batch = batch_of(tmp_path)
    assert non_finite_column(batch) is None
    planted = batch[name].clone()
    planted[int(batch.row_offsets[2]) + 2] = float("nan")
    advantages = torch.full((batch.num_tokens,), float("nan"))
    bad = non_finite_column(batch.with_columns(**{name: planted}, advantages=advantages))
    assert bad is not None
    assert (bad.name, bad.count, bad.row, bad.position) == (name, 1, 2, 2)


def test_a_number_that_no_loss_reads_is_not_bad(tmp_path: Path) -> None:
    batch = batch_of(tmp_path)
    logprobs = batch["rollout_logprobs"].clone()
    logprobs[int(batch.row_offsets[1])] = float("nan")  # of a prompt's token
    assert non_finite_column(batch.with_columns(rollout_logprobs=logprobs)) is None


def test_loss_is_left_on_the_given_tokens_and_turns_stay_known(tmp_path: Path) -> None:
    batch = batch_of(tmp_path).with_columns(loss_weights=torch.ones(11, dtype=torch.float64))
    tokens = torch.zeros(batch.num_tokens, dtype=torch.bool)
    tokens[int(batch.row_offsets[1]) + 5] = True
    cut = with_loss_on(batch, tokens)
    assert cut["loss_mask"].nonzero().flatten().tolist() == tokens.nonzero().flatten().tolist()
    assert float(cut["loss_weights"].sum()) == 1.0
    assert torch.equal(cut["response_mask"], batch["loss_mask"])


def test_the_package_is_a_command_too() -> None:
    command = [sys.executable, "-m", "skyrl_train.trainers.capsules", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: skyrl-capsule")
