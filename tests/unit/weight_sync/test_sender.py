"""A rank's part in a weight sync: what it hands over, in which type, and what it does where nobody takes anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.config.models import LoraConfig, ModelConfig
from skyrl_train.distributed import SingleProcess
from skyrl_train.endpoints import LocalEndpoint
from skyrl_train.model import load_causal_lm
from skyrl_train.model.lora import add_adapter, as_they_are, merged_weights
from skyrl_train.weight_sync.cuda_ipc import import_copy
from skyrl_train.weight_sync.receiver import Receiver, wire_dtype
from skyrl_train.weight_sync.sender import RankSender
from skyrl_train.weights import Bucket, ModelWeights, WeightSender, stored_weights, unpack, unpack_bucket
from tests.support.learner_cases import save_tiny_model

CPU = torch.device("cpu")


def plan(sender: RankSender, dtype: str = "") -> list[Bucket]:
    return ModelWeights(LocalEndpoint[WeightSender](sender)).buckets(dtype=dtype)


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return load_causal_lm(ModelConfig(path=str(save_tiny_model(tmp_path))), "cpu")


@pytest.fixture
def sender(model: Any) -> RankSender:
    return RankSender(model, SingleProcess(), CPU)


def shared_files() -> set[Path]:
    return set(Path("/dev/shm").glob("skyrl-weights-*"))


def test_a_rank_exports_where_somebody_imports_and_nothing_elsewhere(sender: RankSender) -> None:
    (planned,) = plan(sender)
    before = shared_files()
    assert sender.device() == "cpu"
    assert not sender.export(planned, {"GPU-of-another-rank"}).handles
    assert shared_files() == before
    exported = sender.export(planned, {"cpu"})
    flat = import_copy(exported.handles, CPU, exported.num_bytes)
    sender.close_export()
    assert shared_files() == before
    assert [name for name, _ in unpack(exported, flat)] == list(planned.names)


def test_matrices_travel_in_the_engines_type_and_vectors_in_their_own(sender: RankSender, model: Any) -> None:
    own = dict(model.named_parameters())
    (whole,), (half,) = plan(sender), plan(sender, "bfloat16")
    assert set(whole.dtypes) == {"float32"}
    assert {(dtype, len(shape) > 1) for dtype, shape in zip(half.dtypes, half.shapes)} == {
        ("bfloat16", True),
        ("float32", False),
    }
    assert half.num_bytes < 0.55 * whole.num_bytes
    carried = sender.carry(half)
    for name, tensor in unpack_bucket(carried):
        expected = own[name].detach().to(torch.bfloat16) if tensor.ndim > 1 else own[name].detach()
        assert torch.equal(tensor, expected), name


def test_a_weight_without_values_is_handed_over_too(model: Any) -> None:
    model.register_parameter("nothing", torch.nn.Parameter(torch.zeros(0, 4)))
    sender = RankSender(model, SingleProcess(), CPU)
    (planned,) = plan(sender)
    part = sender.carry_part(planned)
    assert dict(zip(part.names, part.shapes))["nothing"] == (0, 4)


def test_a_merged_adapter_is_added_before_it_is_rounded(model: Any) -> None:
    add_adapter(model, LoraConfig(rank=2, targets=("q_proj",)), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1e-3)
    sender = RankSender(model, SingleProcess(), CPU)
    carried = sender.carry(plan(sender, "bfloat16")[0])
    merged = dict(merged_weights(model, as_they_are))
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


def test_weights_that_are_iterated_are_the_parameters_themselves(sender: RankSender, model: Any) -> None:
    found = dict(ModelWeights(LocalEndpoint[WeightSender](sender)))
    own = dict(model.named_parameters())
    assert list(found) == list(own)
    assert all(tensor.data_ptr() == own[name].data_ptr() for name, tensor in found.items()), "nothing is copied"


def test_stored_weights_go_the_same_ways_as_a_models(tmp_path: Path) -> None:
    tensors = {"matrix": torch.randn(3, 4), "vector": torch.randn(4)}
    stored = stored_weights(tensors)
    assert stored.scores is None
    (planned,) = stored.buckets(dtype="bfloat16")
    assert planned.dtypes == ("bfloat16", "float32")
    (written,) = stored.senders.call(WeightSender.write, "sync", planned, tmp_path / "0.bin")
    assert written.path == str(tmp_path / "0.bin")
    assert torch.equal(dict(stored)["matrix"], tensors["matrix"])
