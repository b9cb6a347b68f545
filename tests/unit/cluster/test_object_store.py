"""The object store of a session of this machine has room for the buckets in which weights travel."""

from __future__ import annotations

import pytest

from skyrl_train.cluster.session import object_store_bytes
from skyrl_train.model.sizes import largest_parameter, meta_model, read_config

GIB = 1 << 30


def test_two_of_the_largest_buckets_fit_beside_the_batches() -> None:
    embedding = 4 * largest_parameter("Qwen/Qwen2.5-1.5B-Instruct")
    assert embedding == 4 * 151_936 * 1536, "933 MB"
    assert object_store_bytes(embedding, free_bytes=64 * GIB) == 2 * embedding + GIB
    assert object_store_bytes(256 << 20, free_bytes=64 * GIB) == 3 * GIB // 2


def test_a_step_that_is_larger_than_the_usual_batches_fits_in_their_place() -> None:
    assert object_store_bytes(0, 5 * GIB, free_bytes=64 * GIB) == 5 * GIB
    assert object_store_bytes(GIB, 1000, free_bytes=64 * GIB) == 3 * GIB
    assert object_store_bytes(GIB, 100 * GIB, free_bytes=64 * GIB) == 64 * GIB


def test_a_store_is_no_larger_than_the_shared_memory_that_is_there() -> None:
    assert object_store_bytes(4 * GIB, free_bytes=3 * GIB) == 3 * GIB
    assert object_store_bytes(4 * GIB, free_bytes=64 << 20) == GIB, "as in a container: Ray lays it on the disk"


@pytest.mark.parametrize("path", ["builtin:tiny_qwen2", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-0.6B"])
def test_the_largest_parameter_is_that_of_the_model_itself(path: str) -> None:
    parameters = meta_model(read_config(path), name=path).parameters()
    assert largest_parameter(path) == max(parameter.numel() for parameter in parameters)


def test_a_model_whose_config_is_not_here_is_loaded_all_the_same() -> None:
    assert largest_parameter("nobody/no-such-model") == 0
