"""What an update is counted to do grows in proportion to its work, and does not grow from one version to the next."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts" / "bench"))

import slopes
from core_rates import CoreRates
from rollouts_bound import least_s
from slopes import count_axis, exponent
from update_bound import work_of
from update_ours import Ours
from update_work import Conversation, ModelSize

MOST = 1.05
MOST_OF_TURNS = 1.08
"""Of an exponent. Losses pad their columns to rows times the longest, of which turns have more as they go on."""
SIZES = {
    "tokens": (256, 512, 1024),
    "samples": (4, 8, 16),
    "prompts": (2, 4, 8),
    "turns": (2, 4, 8),
    "layers": (2, 4, 8),
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """And torch's own products, so that all machines count alike."""
    monkeypatch.setattr("skyrl_train.model.layers.linear.has_fast_products", lambda: False)
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize("axis", SIZES)
def test_operations_and_bytes_grow_no_faster_than_the_work(axis: str) -> None:
    sizes = SIZES[axis]
    found = [count_axis(axis, size) for size in sizes]
    work = sizes if axis == "layers" else [each.positions for each in found]
    assert exponent(work, [each.operations for each in found]) <= MOST
    assert exponent(work, [each.bytes for each in found]) <= (MOST_OF_TURNS if axis == "turns" else MOST)


def test_an_exponent_is_that_of_the_larger_half() -> None:
    assert exponent((1, 2, 4, 8), [100.0, 100.0, 16.0, 64.0]) == pytest.approx(2.0)
    assert exponent((1, 2, 4), [5.0, 5.0, 5.0]) == 0.0


def test_the_work_of_an_update_is_counted_by_hand() -> None:
    """Answers `6 7` and `6 8` to the prompt `4 5`: five distinct tokens, two of which predict three others."""
    size = ModelSize(hidden=8, layers=2, heads=2, kv_heads=1, intermediate=16, vocabulary=32)
    talks = [Conversation(0, [4, 5], [([6, 7 + number], [])], 1.0) for number in (0, 1)]
    work = work_of(Ours(size, talks, variant="auto", tokens=64).batch, size, parameters=1000)
    # 6 is predicted from 5, both 7 and 8 from 6
    assert (work.positions, work.read, work.scored, work.rows_tokens) == (5, 2, 3, 8)
    key_value, others = 2 * 8 * 4, 2 * 8 * 8 + 3 * 8 * 16
    assert work.linear == 6 * ((key_value + others) * 5 + key_value * 5 + others * 2)
    # tokens see 1, 2, 3, 4 and 4; those that are read see 2 and 3
    assert work.attention == 12 * 8 * (14 + 5)
    assert work.head == 6 * 32 * 8 * 3
    assert (work.weight_bytes, work.optimizer_bytes) == (12_000, 32_000)
    rates = CoreRates(float32=1e3, bfloat16=1e6, bytes=1e3)
    assert work.least_s(rates, "float32") == pytest.approx(work.operations / 1e3 + 32)
    assert work.least_s(rates, "bfloat16") == pytest.approx(12 + 32), (
        "reading the weights takes longer than the products"
    )


def test_the_least_time_of_a_wave_is_counted_by_hand() -> None:
    """One prompt of 3 tokens, whose answers have 1 and 2 tokens: after the prefill one step of one row."""
    size = ModelSize(hidden=8, layers=1, heads=2, kv_heads=1, intermediate=16, vocabulary=32)
    wave = [([1, 2, 3], 1), ([1, 2, 3], 2)]
    layer, head = 2 * 8 * (8 + 4) + 3 * 8 * 16, 32 * 8
    prefill = 2 * layer * 3 + 4 * 8 * 6 + 2 * head
    step = 2 * (layer + head) + 4 * 8 * 4
    rates = CoreRates(float32=1e3, bfloat16=1e3, bytes=1e3)
    assert least_s(wave, size, rates, caches=10**9) == pytest.approx((prefill + step) / 1e3)
    moved = 4 * (layer + head) + 2 * 4 * 4 * (1 + 3)
    slow = CoreRates(float32=1e9, bfloat16=1e9, bytes=1e3)
    assert least_s(wave, size, slow, caches=0) == pytest.approx(prefill / 1e9 + moved / 1e3)


@pytest.mark.slow
def test_a_rank_sends_no_more_messages_however_many_ranks_there_are() -> None:
    two, four = (slopes.count_ranks(ranks) for ranks in (2, 4))
    assert 0 < four.collectives <= two.collectives
