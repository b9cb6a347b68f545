"""Weights in buckets: exact, checked, bounded."""

from __future__ import annotations

import pytest
import torch

from skyrl_train.errors import EngineError
from skyrl_train.weights import Bucket, bucket_names, pack_bucket, unpack_bucket

TENSORS = {
    "embed": torch.arange(6, dtype=torch.float32).view(2, 3),
    "scale": torch.tensor(1.5, dtype=torch.bfloat16),
    "half": torch.tensor([1.0, -2.0, 3.0], dtype=torch.float16),
}


def test_what_is_packed_comes_out_the_same() -> None:
    found = dict(unpack_bucket(pack_bucket(TENSORS.items())))
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_bit_that_flipped_on_the_way_is_found() -> None:
    bucket = pack_bucket(TENSORS.items())
    data = bucket.data.copy()
    data[5] ^= 4
    with pytest.raises(EngineError, match=r"'embed' on arrived damaged"):
        list(unpack_bucket(Bucket(**{**bucket.fields(), "data": data})))


def test_shapes_that_do_not_fit_the_bytes_are_found() -> None:
    bucket = pack_bucket(TENSORS.items())
    with pytest.raises(EngineError, match="their shapes make"):
        list(unpack_bucket(Bucket(**{**bucket.fields(), "shapes": ((400, 3), (), (3,))})))


def test_buckets_hold_neighbours_up_to_the_limit() -> None:
    sizes = [("a", 4), ("b", 4), ("c", 3), ("d", 20), ("e", 1)]
    assert bucket_names(sizes, 8) == [("a", "b"), ("c",), ("d",), ("e",)]
