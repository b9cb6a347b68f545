"""What a rank holds of a mixture whose experts are divided over ranks."""

from __future__ import annotations

from dataclasses import replace

from skyrl_train.learner.memory.share import DeviceShare
from skyrl_train.model.sizes import ParameterCounts

COUNTS = ParameterCounts(
    total=1000, trained=1000, block=450, root=100, block_experts=400, experts=800, trained_experts=800
)
"""Two layers of 50 numbers and 400 of experts, and 100 outside of them."""


def test_ranks_hold_as_much_and_gather_only_the_experts_that_they_have() -> None:
    whole = DeviceShare(num_shards=8, sharded=True, compute_bytes=2)
    divided = replace(whole, expert_ranks=4)
    assert divided.resident(COUNTS, training=True) == whole.resident(COUNTS, training=True)
    assert whole.exchanged(COUNTS, training=True) == {
        "gathered parameters": 2 * (100 + 2 * 450),
        "gradients in flight": 4 * 450 + 4 * 57,
    }
    assert divided.exchanged(COUNTS, training=True) == {
        "gathered parameters": 2 * (100 + 2 * 150),
        "gradients in flight": 4 * 150 + 4 * 19,
    }


def test_gradients_that_are_kept_whole_are_those_of_a_ranks_own_experts() -> None:
    share = DeviceShare(num_shards=8, sharded=True, gradient_sync="step", expert_ranks=4)
    assert share.resident(COUNTS, training=True)["gradients"] == 4 * (200 + 200)


def test_a_replica_has_its_experts_alone() -> None:
    share = DeviceShare(expert_ranks=4)
    assert share.resident(COUNTS, training=True) == {
        "parameters": 4 * 400,
        "gradients": 4 * 400,
        "optimizer state": 8 * 400,
    }


def test_tokens_on_their_way_are_counted_as_sent_and_as_they_come() -> None:
    share = DeviceShare(expert_ranks=4, sequence=2, compute_bytes=2)
    assert share.travelling_tokens(8 * 16, positions=100) == {"tokens that travel": 2 * 8 * 16 * 50 * 2}
    assert replace(share, expert_ranks=1).travelling_tokens(8 * 16, positions=100) == {}
