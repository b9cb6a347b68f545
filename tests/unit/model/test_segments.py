"""The block mask of a forward against its mask written out, and what it takes at 131,072 positions."""

from __future__ import annotations

import tracemalloc
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from skyrl_train.batch import batch_of_lengths
from skyrl_train.batch.layouts import Segment, packed_layout, prefix_order, shared_layout, tree_segments
from skyrl_train.learner.memory import CountingMeter
from skyrl_train.model.layers import segments as segments_module
from skyrl_train.model.layers.segments import Segments, block_size

CPU = torch.device("cpu")


def segments_of(rows: list[list[int]]) -> Segments:
    order = prefix_order([np.array(row, dtype=np.int32) for row in rows])
    return Segments(tree_segments(order), max(order.lengths))


def rows_of(branches: list[tuple[int, int, int]]) -> list[list[int]]:
    """Rows grown from one another: each keeps a share of an earlier row, in sixteenths, and goes on with its own tokens."""
    rows = [[0] * 40]
    for number, (parent, share, own) in enumerate(branches, start=1):
        kept = rows[parent % len(rows)]
        rows.append(kept[: len(kept) * share // 16] + [number] * own)
    return rows


def written_out(segments: Segments, window: int | None) -> NDArray[np.bool_]:
    """bool `[positions, positions]`, by walking up from each segment."""
    size = segments.num_positions
    mask = np.zeros((size, size), dtype=np.bool_)
    path: list[Segment] = []
    for segment in segments.segments:
        while path and path[-1].subtree_stop <= segment.start:
            path.pop()
        path.append(segment)
        row = [position for each in path for position in range(each.start, each.stop)]
        for query in range(segment.start, segment.stop):
            seen = row[: row.index(query) + 1]
            mask[query, seen if window is None else seen[-window:]] = True
    return mask


trees = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 16), st.integers(1, 90)), min_size=1, max_size=9)


@given(branches=trees, window=st.none() | st.integers(1, 120))
@settings(max_examples=40)
def test_blocks_and_rule_together_are_the_mask_written_out(
    branches: list[tuple[int, int, int]], window: int | None
) -> None:
    segments = segments_of(rows_of(branches))
    size = segments.num_positions
    mask = segments.block_mask(CPU, window)
    assert mask.seq_lengths == (size, size)
    expected = written_out(segments, window)
    position = torch.arange(size)
    zero = torch.zeros((), dtype=torch.int64)
    rule = mask.mask_mod(zero, zero, position[:, None], position[None, :]).numpy()
    blocks = -(-size // 128)
    read = np.zeros((2, blocks, blocks), dtype=np.bool_)
    for kind, (counts, indices) in enumerate(
        [(mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)]
    ):
        for row in range(blocks):
            read[kind, row, indices[0, 0, row, : counts[0, 0, row]].numpy()] = True
    assert not (read[0] & read[1]).any()
    spread = [each.repeat(128, 0).repeat(128, 1)[:size, :size] for each in read]
    np.testing.assert_array_equal(spread[0] & rule | spread[1], expected)
    # the backward pass goes by blocks of keys
    for blocks_of, (counts, indices) in zip(
        read, [(mask.q_num_blocks, mask.q_indices), (mask.full_q_num_blocks, mask.full_q_indices)]
    ):
        for column in range(blocks):
            assert (
                indices[0, 0, column, : counts[0, 0, column]].tolist() == np.flatnonzero(blocks_of[:, column]).tolist()
            )


@given(branches=trees)
@settings(max_examples=15)
def test_without_a_window_the_blocks_are_those_of_torch(branches: list[tuple[int, int, int]]) -> None:
    """Which builds them from the whole mask, and so knows the fewest."""
    from torch.nn.attention.flex_attention import create_block_mask

    segments = segments_of(rows_of(branches))
    mine = segments.block_mask(CPU)
    size = segments.num_positions
    theirs = create_block_mask(mine.mask_mod, None, None, size, size, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        found, expected = getattr(mine, name), getattr(theirs, name)
        # one block is followed by another in which nothing is
        torch.testing.assert_close(found[..., : expected.shape[-1]], expected)
        assert found.sum() == expected.sum()
    blocks = theirs.kv_num_blocks.shape[-1]
    torch.testing.assert_close(mine.to_dense()[..., :blocks, :blocks], theirs.to_dense())


def test_depths_are_the_position_ids_of_the_layout() -> None:
    """`shared_layout` counts them another way."""
    rows = rows_of([(0, 8, 30), (1, 12, 7), (0, 3, 50), (2, 16, 4)])
    batch = batch_of_lengths([len(row) for row in rows])
    batch = batch.with_columns(input_ids=torch.tensor([token for row in rows for token in row], dtype=torch.int32))
    for layout in (shared_layout(batch), packed_layout(batch)):
        depths = Segments(layout.segments, layout.longest).depths()
        assert depths.tolist() == layout.position_ids[0].tolist()


def test_blocks_that_nobody_attends_to_are_left_out() -> None:
    """Two packed rows of 256: of 16 pairs of blocks each row has the 3 that are causal, 2 of them in part."""
    rows = Segments((Segment(0, 256, 256), Segment(256, 512, 512)), 256)
    mask = rows.block_mask(CPU)
    computed = mask.to_dense()[0, 0] > 0
    assert computed.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, True, True],
    ]
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1]]]


def test_a_window_leaves_out_blocks_that_are_further_back() -> None:
    """One row of 1,024 with a window of 129: each block of 128 reads itself and the one before it."""
    mask = Segments((Segment(0, 1024, 1024),), 1024).block_mask(CPU, 129)
    counts = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert counts.tolist() == [[[1, *[2] * 7]]]


def test_no_tensor_of_positions_times_positions_is_made_at_131072() -> None:
    """16 GiB of booleans as it is commonly built. 16 samples of a prompt of 98,304 tokens, 2,048 each."""
    prompt, own = 98_304, 2_048
    stops = list(accumulate([own] * 16, initial=prompt))
    size = stops[-1]
    assert size == 131_072
    tree = Segments((Segment(0, prompt, size), *(Segment(a, b, b) for a, b in pairwise(stops))), prompt + own)
    meter = CountingMeter(1 << 40)
    tracemalloc.start()
    with meter.counting():
        mask = tree.block_mask(CPU, 4_096)
    _, of_numpy = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    kept = sum(
        getattr(mask, name).nbytes
        for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices", "kv_num_blocks", "q_num_blocks")
    )
    assert kept <= 17 << 20, "on the device"
    assert meter.peak_bytes() + of_numpy < 128 << 20, "on the host, while it is built"


@pytest.mark.parametrize(
    ("positions", "expected"), [(1, 128), (131_072, 128), (131_073, 256), (262_145, 512), (1 << 20, 1024)]
)
def test_blocks_grow_so_that_there_are_never_more_than_1024(positions: int, expected: int) -> None:
    assert block_size(positions) == expected
    assert -(-positions // expected) <= segments_module.MAX_BLOCKS
