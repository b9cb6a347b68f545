from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from skyrl_train.batch.steps.minibatch import restore_rows
from skyrl_train.batch.training_batch import SCHEMA, TrainingInputBatch, token_positions
from skyrl_train.errors import BatchError
from tests.support.batch_builders import make_batch


@pytest.fixture
def batch() -> TrainingInputBatch:
    """Three rows of two prompts, with every kind of metadata."""
    rows = make_batch([("a", 0, [1, 2, 3]), ("a", 1, [4, 5]), ("b", 2, [6, 7, 8, 9])])
    metadata = replace(
        rows.metadata,
        prompt_end_indices=(2, 3),
        policy_mini_batch_boundaries=((0, 2), (2, 3)),
        critic_mini_batch_boundaries=((0, 3),),
    )
    return replace(rows, metadata=metadata)


def test_sizes(batch):
    assert (batch.num_rows, batch.num_tokens, len(batch)) == (3, 9, 3)
    assert batch.lengths.tolist() == [3, 2, 4]
    assert batch.row_offsets.tolist() == [0, 3, 5, 9]


def test_padded_puts_the_pad_value_after_each_row(batch):
    assert batch.padded("input_ids").tolist() == [[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 9]]
    assert batch.padded("loss_mask").tolist()[1] == [False, True, False, False]


def test_padded_of_some_rows_is_as_wide_as_the_longest_of_them(batch):
    assert batch.padded("input_ids", rows=torch.tensor([1, 0])).tolist() == [[4, 5, 0], [1, 2, 3]]


def test_from_padded_inverts_padded(batch):
    assert torch.equal(batch.from_padded(batch.padded("input_ids")), batch["input_ids"])
    wider = torch.nn.functional.pad(batch.padded("input_ids"), (0, 2))
    assert torch.equal(batch.from_padded(wider), batch["input_ids"])


def test_from_padded_refuses_another_shape(batch):
    with pytest.raises(BatchError, match=r"\(3, 3\).*\[3, 4\]"):
        batch.from_padded(torch.zeros(3, 3))


def test_padded_carries_gradients_back_to_the_flat_column(batch):
    column = torch.zeros(9, requires_grad=True)
    batch.with_columns(values=column).padded("values")[2].sum().backward()
    assert column.grad.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_a_slice_of_one_row_has_one_uid_and_nothing_of_the_whole(batch):
    row = batch.slice(2, 3)
    assert row.metadata.uids == ("b",)
    assert row["input_ids"].tolist() == [6, 7, 8, 9]
    assert row.row_offsets.tolist() == [0, 4]
    assert row.metadata.prompt_end_indices is None
    assert row.metadata.policy_mini_batch_boundaries is None
    assert row.metadata.critic_mini_batch_boundaries is None
    assert (row.metadata.global_step, row.metadata.weight_version) == (3, 7)


def test_a_slice_shares_no_memory_with_the_whole(batch):
    part = batch.slice(0, 2)
    part["input_ids"].fill_(0)
    part["prompt_index"].fill_(9)
    assert batch["input_ids"].tolist()[:5] == [1, 2, 3, 4, 5]
    assert batch["prompt_index"].tolist() == [0, 0, 1]


def test_take_reorders_rows_and_uids_alike(batch):
    taken = batch.take([2, 0])
    assert taken["input_ids"].tolist() == [6, 7, 8, 9, 1, 2, 3]
    assert taken.metadata.uids == ("b", "a")
    assert taken["trajectory_index"].tolist() == [2, 0]
    assert taken.metadata.policy_mini_batch_boundaries is None


def test_take_of_no_rows_is_an_empty_batch(batch):
    empty = batch.take([])
    assert (empty.num_rows, empty.num_tokens, empty.metadata.uids) == (0, 0, ())
    assert empty.padded("input_ids").shape == (0, 0)


@pytest.mark.parametrize("rows", [[3], [-1]])
def test_take_refuses_a_row_that_is_not_there(batch, rows):
    with pytest.raises(BatchError, match=r"batch of 3 rows"):
        batch.take(rows)


def test_slice_refuses_rows_that_are_not_there(batch):
    with pytest.raises(BatchError, match=r"\[2, 4\) of a batch of 3"):
        batch.slice(2, 4)


def test_cat_inverts_slicing(batch):
    joined = TrainingInputBatch.cat([batch.slice(0, 1), batch.slice(1, 3)])
    for name in batch.token_columns:
        assert torch.equal(joined[name], batch[name])
    assert joined.metadata.uids == batch.metadata.uids
    assert joined.metadata.policy_mini_batch_boundaries is None


def test_cat_refuses_two_prompts_of_one_number():
    one, other = make_batch([("a", 0, [1, 2])]), make_batch([("b", 0, [1, 2])])
    with pytest.raises(BatchError, match=r"prompt_index 0 is 'a' and, in batch 1, 'b'"):
        TrainingInputBatch.cat([one, other])


def test_cat_refuses_different_columns(batch):
    with pytest.raises(BatchError, match=r"differ in the columns values"):
        TrainingInputBatch.cat([batch, batch.with_columns(values=torch.zeros(9))])


def test_dummy_rows_are_short_have_no_loss_and_extend_the_metadata(batch):
    padded = batch.pad_rows(2)
    assert padded.lengths.tolist() == [3, 2, 4, 2, 2]
    assert padded["input_ids"].tolist()[9:] == [0, 0, 0, 0]
    assert not padded["loss_mask"][9:].any()
    assert padded["is_padding"].tolist() == [False, False, False, True, True]
    assert padded["trajectory_index"].tolist()[3:] == [-1, -1]
    assert padded["prompt_index"].tolist()[3:] == [1, 1]
    assert padded.metadata.uids == ("a", "a", "b", "b", "b")
    assert padded.metadata.prompt_end_indices == (2, 5)
    assert padded.metadata.policy_mini_batch_boundaries == ((0, 2), (2, 5))
    assert padded.metadata.critic_mini_batch_boundaries == ((0, 5),)
    assert batch.metadata.uids == ("a", "a", "b")


def test_dummy_rows_of_another_uid_drop_what_no_longer_holds(batch):
    padded = batch.pad_rows(1, uid="z")
    assert padded.metadata.uids == ("a", "a", "b", "z")
    assert padded["prompt_index"].tolist() == [0, 0, 1, -1]
    assert padded.metadata.policy_mini_batch_boundaries is None


def test_an_empty_batch_needs_a_uid_for_dummy_rows(batch):
    empty = batch.slice(0, 0)
    assert empty.pad_rows(1, uid="dummy").metadata.uids == ("dummy",)
    with pytest.raises(BatchError, match=r"without a uid"):
        empty.pad_rows(1)


def test_with_columns_leaves_the_batch_as_it_was(batch):
    more = batch.with_columns(values=torch.ones(9, dtype=torch.float64))
    assert "values" in more
    assert "values" not in batch
    assert more.metadata is batch.metadata


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"advantage": torch.zeros(9)}, "'advantage' is not in the schema .* [Dd]id you mean 'advantages'"),
        ({"values": torch.zeros(8)}, r"'values' has shape \(8,\) where \[9\] was expected"),
        ({"loss_mask": torch.zeros(9)}, "'loss_mask' is torch.float32 where torch.bool was expected"),
        ({"input_ids": torch.zeros(9, dtype=torch.int64)}, "'input_ids' is torch.int64 where torch.int32"),
        ({"is_padding": torch.zeros(9, dtype=torch.bool)}, r"'is_padding' has shape \(9,\) where \[3\]"),
    ],
)
def test_columns_that_contradict_the_schema_are_refused_by_name(batch, columns, message):
    with pytest.raises(BatchError, match=message):
        batch.with_columns(**columns)


def test_an_absent_column_is_named_with_those_that_are_there(batch):
    with pytest.raises(BatchError, match=r"no column 'reward' .* [Dd]id you mean 'rewards'"):
        batch["reward"]


def test_row_columns_cannot_be_padded(batch):
    with pytest.raises(BatchError, match=r"one value per row"):
        batch.padded("is_padding")


def test_a_row_has_at_least_one_token(batch):
    with pytest.raises(BatchError, match=r"row 1 has 0 tokens"):
        TrainingInputBatch(
            token_columns=batch.token_columns,
            row_columns=batch.row_columns,
            row_offsets=torch.tensor([0, 3, 3, 9]),
            metadata=batch.metadata,
        )


def test_uids_must_match_the_rows(batch):
    with pytest.raises(BatchError, match=r"2 uids for a batch of 3 rows"):
        replace(batch, metadata=replace(batch.metadata, uids=("a", "b")))


def test_missing_columns_are_listed(batch):
    columns = {name: column for name, column in batch.token_columns.items() if name != "rewards"}
    with pytest.raises(BatchError, match=r"lacks the columns rewards"):
        TrainingInputBatch(
            token_columns=columns,
            row_columns=batch.row_columns,
            row_offsets=batch.row_offsets,
            metadata=batch.metadata,
        )


def test_a_batch_survives_pickling_and_a_part_ships_only_itself(batch):
    copy = pickle.loads(pickle.dumps(batch))
    assert torch.equal(copy["input_ids"], batch["input_ids"])
    assert copy.metadata == batch.metadata
    large = make_batch([("a", 0, range(20000)), ("b", 1, [1, 2])])
    assert len(pickle.dumps(large.slice(1, 2))) < 10000


def test_token_positions_name_the_tokens_of_rows_in_order(batch):
    assert token_positions(batch.row_offsets, torch.tensor([2, 1])).tolist() == [5, 6, 7, 8, 3, 4]


def test_restore_rows_undoes_a_reordering(batch):
    order = torch.tensor([2, 0, 1])
    assert torch.equal(restore_rows(batch.take(order)["input_ids"], order, batch.row_offsets), batch["input_ids"])
    with pytest.raises(BatchError, match=r"order of 3 rows .2 different. for a batch of 3"):
        restore_rows(batch["input_ids"], torch.tensor([0, 0, 1]), batch.row_offsets)


def test_the_schema_covers_every_column_of_a_batch(batch):
    assert {*batch.token_columns, *batch.row_columns} == {name for name, spec in SCHEMA.items() if not spec.optional}
