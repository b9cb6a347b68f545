"""A rank's part in a weight sync: what it hands over, in which type, and what it does where nobody takes anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.cluster.workers import planned_buckets
from skyrl_train.config.schema import LoraConfig, ModelConfig
from skyrl_train.distributed.strategy import SingleProcess
from skyrl_train.model.causal_lm import load_causal_lm
from skyrl_train.model.lora import add_adapter, merged_weights
from skyrl_train.weight_sync.buckets import Bucket, Receiver, unpack, unpack_bucket, wire_dtype
from skyrl_train.weight_sync.lending import borrow
from skyrl_train.weight_sync.sender import WeightSender
from tests.learner_cases import save_tiny_model

CPU = torch.device("cpu")


class OneRank:
    """A `WorkerGroup` of this process."""

    def __init__(self, sender: WeightSender) -> None:
        self._sender = sender

    def begin(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self._sender, method)(*args)]

    def wait(self, method: str, phase: str, refs: Sequence[Any]) -> list[Any]:
        return list(refs)


def plan(sender: WeightSender, dtype: str = "") -> list[Bucket]:
    return planned_buckets(OneRank(sender), dtype=dtype)  # type: ignore[arg-type]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return load_causal_lm(ModelConfig(path=str(save_tiny_model(tmp_path))), "cpu")


@pytest.fixture
def sender(model: Any) -> WeightSender:
    return WeightSender(model, SingleProcess(), CPU)


def shared_files() -> set[Path]:
    return set(Path("/dev/shm").glob("skyrl-weights-*"))


def test_a_rank_lends_where_somebody_borrows_and_nothing_elsewhere(sender: WeightSender) -> None:
    (planned,) = plan(sender)
    before = shared_files()
    assert sender.device() == "cpu"
    assert sender.lend(planned, {"GPU-of-another-rank"}) is None
    assert shared_files() == before
    lent = sender.lend(planned, {"cpu"})
    assert lent is not None
    flat = borrow(lent.handles, CPU, lent.num_bytes)
    sender.reclaim()
    assert shared_files() == before
    assert [name for name, _ in unpack(lent, flat)] == list(planned.names)


def test_matrices_travel_in_the_engines_type_and_vectors_in_their_own(sender: WeightSender, model: Any) -> None:
    own = dict(model.named_parameters())
    (whole,), (half,) = plan(sender), plan(sender, "bfloat16")
    assert set(whole.dtypes) == {"float32"}
    assert {(dtype, len(shape) > 1) for dtype, shape in zip(half.dtypes, half.shapes)} == {
        ("bfloat16", True),
        ("float32", False),
    }
    assert half.num_bytes < 0.55 * whole.num_bytes
    carried = sender.carry(half)
    assert carried is not None
    for name, tensor in unpack_bucket(carried):
        expected = own[name].detach().to(torch.bfloat16) if tensor.ndim > 1 else own[name].detach()
        assert torch.equal(tensor, expected), name


def test_a_merged_adapter_is_added_before_it_is_rounded(model: Any) -> None:
    add_adapter(model, LoraConfig(rank=2, targets=("q_proj",)), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1e-3)
    sender = WeightSender(model, SingleProcess(), CPU)
    carried = sender.carry(plan(sender, "bfloat16")[0])
    assert carried is not None
    merged = dict(merged_weights(model, lambda tensor: tensor))
    for name, tensor in unpack_bucket(carried):
        assert torch.equal(tensor, merged[name].to(tensor.dtype)), name


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("bfloat16", "bfloat16"), "bfloat16"),
        (("float16",), "float16"),
        (("float32",), ""),
        (("bfloat16", "float32"), ""),
        (("bfloat16", ""), ""),
        ((), ""),
    ],
)
def test_weights_are_rounded_where_every_engine_would_do_so_itself(dtypes: tuple[str, ...], expected: str) -> None:
    assert wire_dtype(Receiver(device="cpu", dtype=dtype) for dtype in dtypes) == expected
