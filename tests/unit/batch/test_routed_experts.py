"""Recorded experts as a column of training rows: which token has which, and what becomes of the column."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train.batch.plane import Layer, Piece, by_reference
from skyrl_train.batch.references import ArraysHere
from skyrl_train.batch.training_batch import ROUTED, TrainingInputBatch
from skyrl_train.cluster import SentImages, pack, unpack
from skyrl_train.errors import BatchError
from skyrl_train.runs import assembler
from skyrl_train.types import Trajectory
from tests.support.batch_builders import failed_trajectory, make_config, make_rollouts, make_trajectory, make_turn
from tests.support.fakes_trainer import linked

ROWS = ("per_trajectory", "per_turn")


def experts(*numbers: int) -> np.ndarray[Any, Any]:
    """`[tokens, 1 layer, 2 experts]`: `n` and `n + 1`."""
    return np.array([[[number, number + 1]] for number in numbers], dtype=np.uint8)


FIRST = make_turn([1, 2], [3, 4], routed_experts=experts(10, 20, 30))
SECOND = make_turn([1, 2, 3, 4, 9], [5])
"""The fourth token is computed with the second turn."""


def two_turns() -> Trajectory:
    trajectory = make_trajectory("a", 0, FIRST, SECOND)
    first, second = trajectory.turns
    return replace(trajectory, turns=(first, replace(second, routed_experts=experts(40, 90))))


def assembled(*trajectories: Trajectory, step_wise: bool = False, replays: bool = True) -> TrainingInputBatch:
    rollouts = make_rollouts(*trajectories, n_samples=1)
    config = make_config(prompts=len(trajectories), n_samples=1, mini_batch=len(trajectories))
    config = replace(config, trainer=replace(config.trainer, moe_routing_replay=replays))
    return assembler(config, rows=ROWS[step_wise])(rollouts, step=1, weight_version=0)


def test_each_token_has_the_experts_that_its_turn_recorded_but_for_the_last() -> None:
    batch = assembled(two_turns())
    assert batch["input_ids"].tolist() == [1, 2, 3, 4, 9, 5]
    assert batch[ROUTED].dtype == torch.int16
    assert batch[ROUTED].tolist() == [[10, 11], [20, 21], [30, 31], [40, 41], [90, 91], [-1, -1]]


def test_a_row_per_turn_has_the_same_and_the_first_ends_as_the_turn_after_it_went_on() -> None:
    batch = assembled(two_turns(), step_wise=True)
    assert batch[ROUTED][:, 0].tolist() == [10, 20, 30, 40, 10, 20, 30, 40, 90, -1]


def test_turns_that_continue_one_turn_have_each_their_own_way_to_its_last_token() -> None:
    turns = linked(FIRST, make_turn([1, 2, 3, 4, 9], [5]), make_turn([1, 2, 3, 4, 8], [6]))
    recorded = (turns[0], *(replace(turn, routed_experts=experts(n, n)) for turn, n in zip(turns[1:], (40, 50))))
    batch = assembled(replace(make_trajectory("a", 0), turns=recorded), step_wise=True)
    assert batch[ROUTED][:, 0].tolist() == [10, 20, 30, 40, 10, 20, 30, 40, 40, -1, 10, 20, 30, 50, 50, -1]


def test_what_the_engine_did_not_return_of_a_prompt_is_left_to_the_router() -> None:
    turn = make_turn([1, 2], [3, 4], routed_experts=experts(30))
    assert assembled(make_trajectory("a", 0, turn))[ROUTED][:, 0].tolist() == [-1, -1, 30, -1]


def test_without_the_setting_there_is_no_column_and_a_failed_trajectory_has_none_known() -> None:
    assert ROUTED not in assembled(two_turns(), replays=False)
    batch = assembled(make_trajectory("a", 0, FIRST), failed_trajectory("b", 0))
    assert batch[ROUTED][:, 0].tolist() == [10, 20, 30, -1, -1, -1]
    assert ROUTED not in assembled(failed_trajectory("b", 0))


def test_a_turn_without_experts_or_with_those_of_another_model_is_refused_by_name() -> None:
    with pytest.raises(BatchError, match=r"trajectory a/0, turn 1: experts .*trainer.moe_routing_replay=false"):
        assembled(make_trajectory("a", 0, FIRST, SECOND))
    with pytest.raises(BatchError, match=r"trajectory a/0, turn 0: experts \[0, 0, 0\]"):
        assembled(make_trajectory("a", 0, make_turn([1], [2])))


def test_rows_keep_their_experts_when_they_are_taken_joined_padded_and_shipped() -> None:
    batch = assembled(two_turns(), make_trajectory("b", 0, FIRST))
    assert batch.take([1])[ROUTED][:, 0].tolist() == [10, 20, 30, -1]
    assert batch.slice(1, 2)[ROUTED].tolist() == batch.take([1])[ROUTED].tolist()
    both = TrainingInputBatch.cat([batch.take([1]), batch.take([0])])
    assert both[ROUTED][4:].tolist() == batch.take([0])[ROUTED].tolist()
    assert batch.pad_rows(1)[ROUTED][-3:].tolist() == [[-1, -1]] * 3
    assert batch.padded(ROUTED)[1, :, 0].tolist() == [10, 20, 30, -1, -1, -1]
    source = ArraysHere({name: column.numpy() for name, column in batch.token_columns.items()})
    dtypes = {name: column.dtype for name, column in batch.token_columns.items()}
    held = by_reference(Layer.of([Piece(source, batch.row_offsets.numpy())], dtypes), batch)
    assert unpack(pack(held, SentImages()))[ROUTED].tolist() == batch[ROUTED].tolist()
    with pytest.raises(TypeError, match="by reference"):
        pack(batch, SentImages())
    with pytest.raises(BatchError, match="routed_experts"):
        batch.with_columns(**{ROUTED: batch[ROUTED][1:]})


def test_a_turn_records_no_more_than_what_is_new_in_it() -> None:
    with pytest.raises(ValueError, match="experts of 4 tokens, and the turn has 3 new ones"):
        make_turn([1, 2], [3, 4], routed_experts=experts(1, 2, 3, 4))
    for wrong in (np.zeros((1, 1, 1)), np.full((1, 1, 1), -1), np.full((1, 1, 1), 2**15), np.zeros((1, 1), int)):
        with pytest.raises(ValueError, match="experts must"):
            make_turn([1, 2], [3, 4], routed_experts=wrong)
