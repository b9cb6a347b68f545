"""The key of a token's noise: a hash of its request's seed and its position, for all rows at once."""

from __future__ import annotations

import torch

from skyrl_train.inference.vllm.sampler import row_keys


def test_keys_are_those_of_splitmix64() -> None:
    """Its first three outputs from state 0, as published with the generator."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    keys = row_keys(torch.zeros(3, dtype=torch.int64), torch.tensor([1, 2, 3]))
    assert [int(key) % 2**64 for key in keys] == published


def test_a_key_depends_on_seed_and_position_and_on_no_other_row() -> None:
    seeds = torch.tensor([2**62, 5, 2**62 + 1, 5])
    positions = torch.tensor([7, 7, 7, 8])
    together = row_keys(seeds, positions)
    assert len(set(together.tolist())) == 4
    for row in range(4):
        assert row_keys(seeds[row : row + 1], positions[row : row + 1]) == together[row]
