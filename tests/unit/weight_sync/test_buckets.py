"""Weights in buckets: exact, checked, bounded."""

from __future__ import annotations

import pytest
import torch

from skyrl_train.errors import EngineError
from skyrl_train.weights import Bucket, Memory, bucket_names, checksum_of, pack_bucket, unpack_bucket

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


def test_equal_weights_are_equal_bytes_whatever_lay_in_the_memory_before() -> None:
    """Ranks export theirs, and whoever copies one of them is told of the checksum of another."""
    tensors = [("norm", torch.arange(3.0)), ("bias", torch.arange(5.0))]
    dirty = Memory()
    dirty.take(4096, torch.device("cpu")).fill_(255)
    clean, other = pack_bucket(tensors), pack_bucket(tensors, dirty)
    assert clean.data is not None
    assert other.data is not None
    assert clean.data.tobytes() == other.data.tobytes()
    assert clean.checksum == other.checksum


def test_memory_is_used_again_and_grows_where_it_has_to() -> None:
    memory = Memory()
    small, large = pack_bucket(TENSORS.items(), memory), {"more": torch.rand(4096)}
    assert torch.equal(dict(unpack_bucket(small))["embed"], TENSORS["embed"])
    assert torch.equal(dict(unpack_bucket(pack_bucket(large.items(), memory)))["more"], large["more"])
    del small
    first = memory.take(1024, torch.device("cpu"))
    places, first = {first.data_ptr()}, None
    again = pack_bucket(TENSORS.items(), memory)
    assert torch.equal(dict(unpack_bucket(again))["half"], TENSORS["half"])
    assert again.data is not None
    assert again.data.ctypes.data in places, "nothing lies there any more"
    other = pack_bucket(TENSORS.items(), memory)
    assert other.data is not None
    assert other.data.ctypes.data != again.data.ctypes.data, "where bytes lie that somebody has"


@pytest.mark.parametrize("num_words", [256, 2**17 - 256, 2**17 + 512, 2**18])
def test_the_checksum_notices_what_happens_to_one_word_and_words_that_change_places(num_words: int) -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31 - 1, (num_words,), dtype=torch.int32, generator=generator)
    whole = checksum_of(words.view(torch.uint8))
    assert whole == checksum_of(words.clone().view(torch.uint8))
    for place in torch.randint(0, num_words, (20,), generator=generator).tolist():
        for bit in (0, 7, 31):
            other = words.clone()
            other[place] ^= -(2**31) if bit == 31 else 1 << bit
            assert checksum_of(other.view(torch.uint8)) != whole
    for first, second in ((0, 1), (0, num_words - 1), (num_words // 2, num_words // 2 - 128)):
        other = words.clone()
        other[first], other[second] = words[second], words[first]
        assert checksum_of(other.view(torch.uint8)) != whole
    stale = words.clone()
    stale[: num_words // 2] = stale[num_words // 2 :][: num_words // 2]
    assert checksum_of(stale.view(torch.uint8)) != whole


def test_shapes_that_do_not_fit_the_bytes_are_found() -> None:
    bucket = pack_bucket(TENSORS.items())
    with pytest.raises(EngineError, match="their shapes make"):
        list(unpack_bucket(Bucket(**{**bucket.fields(), "shapes": ((400, 3), (), (3,))})))


def test_buckets_hold_neighbours_up_to_the_limit() -> None:
    sizes = [("a", 4), ("b", 4), ("c", 3), ("d", 20), ("e", 1)]
    assert bucket_names(sizes, 8) == [("a", "b"), ("c",), ("d",), ("e",)]
