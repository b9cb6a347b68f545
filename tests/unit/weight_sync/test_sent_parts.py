"""Pieces of weights that ranks send by themselves: put together they are the weights, bit for bit, changes alone as well."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.errors import EngineError
from skyrl_train.weight_sync.parts import Arrivals, Entry, SentWeights, pack_part
from skyrl_train.weights import Bucket, Piece, Update, carried_bytes, copy_out, dtype_name, pack

CPU = torch.device("cpu")
Cut = Callable[[Tensor], list[tuple[Tensor, tuple[int, ...]]]]


def by_rows(tensor: Tensor) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Of 2 ranks, as FSDP2 cuts; a part may be empty."""
    first, second = ((tensor, tensor[:0]) if len(tensor) < 2 else tensor.chunk(2))[:2]
    return [(first, (0,) * tensor.ndim), (second, (len(first),) + (0,) * (tensor.ndim - 1))]


def by_columns(tensor: Tensor) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Of 2 ranks, as the inner matrices of tensor parallelism are cut."""
    if tensor.ndim < 2:
        return by_rows(tensor)
    first, second = tensor.chunk(2, dim=1)
    return [(first, (0,) * tensor.ndim), (second, (0, first.shape[1]) + (0,) * (tensor.ndim - 2))]


class Ranks:
    """Two ranks that send weights, and an engine that puts them together."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._sent = [SentWeights(), SentWeights()]
        self.engine = Arrivals()

    def sync(self, weights: dict[str, Tensor], update: Update, tolerance: float = 0.0) -> tuple[dict[str, Tensor], int]:
        """What the engine has afterwards, and the bytes that travelled."""
        planned = Bucket(
            names=tuple(weights),
            dtypes=tuple(dtype_name(tensor.dtype) for tensor in weights.values()),
            shapes=tuple(tuple(tensor.shape) for tensor in weights.values()),
            update=update,
        )
        parts = []
        for rank, sent in enumerate(self._sent):
            entries = []
            for name, tensor in weights.items():
                box, offset = self._cut(tensor)[rank]
                piece = Piece(offset, tuple(tensor.shape))
                if not box.numel():
                    continue
                if update:
                    changes = update == "changes"
                    entries.append(sent.entry(name, box, piece, changes=changes, tolerance=tolerance))
                else:
                    entries.append(Entry(name=name, box=box, piece=piece, dtype=box.dtype))
            part, flat = pack_part(entries, planned, CPU)
            parts.append(replace(part, data=flat.numpy()))
        self.engine.begin()
        found = dict(self.engine.take(replace(planned, parts=tuple(parts)), carried_bytes))
        return {name: tensor.clone() for name, tensor in found.items()}, sum(part.num_bytes for part in parts)


def model(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "matrix": torch.randn(65, 34).bfloat16(),
        "norm": torch.randn(7),
        "single": torch.randn(1),
        "experts": torch.randn(4, 3, 6).double(),
    }


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("cut", [by_rows, by_columns])
def test_pieces_are_put_together_bit_for_bit(cut: Cut) -> None:
    ranks = Ranks(cut)
    found, _ = ranks.sync(model(0), "")
    assert bits(found) == bits(model(0))


@pytest.mark.parametrize("cut", [by_rows, by_columns])
def test_changes_alone_make_the_new_weights_bit_for_bit(cut: Cut) -> None:
    ranks = Ranks(cut)
    weights = model(0)
    _, num_whole = ranks.sync(weights, "keep")
    for step in range(3):
        weights["matrix"][step::20, ::7] *= 2
        weights["matrix"][0, 0] = -0.0 if step % 2 else 0.0
        weights["experts"][step % 4, 0, 0] += 1
        found, num_bytes = ranks.sync(weights, "changes")
        assert bits(found) == bits(weights)
        assert num_bytes < num_whole
    nothing, num_bytes = ranks.sync(weights, "changes")
    assert bits(nothing) == bits(weights)
    assert num_bytes <= 2048


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_with_a_tolerance_the_engine_is_never_further_off_than_that(dtype: torch.dtype) -> None:
    tolerance, step = 1e-3, 3e-4  # so that a sync of what moved since the sync before would never send a thing
    torch.manual_seed(0)
    masters = torch.rand(64, 33).double() / 16
    weights = {"matrix": masters.to(dtype)}
    direction = torch.sign(torch.randn(64, 33)) * torch.rand(64, 33)
    ranks = Ranks(by_rows)
    _, num_whole = ranks.sync(weights, "keep")
    saved = 0
    for _ in range(40):
        masters += step * direction
        weights["matrix"] = masters.to(dtype)
        found, num_bytes = ranks.sync(weights, "changes", tolerance)
        assert (found["matrix"].double() - weights["matrix"].double()).abs().max() <= tolerance
        saved += num_bytes < num_whole
    assert saved > 20
    assert bits(found) != bits(weights)
    found, _ = ranks.sync(weights, "keep")
    assert bits(found) == bits(weights), "a sync of all weights is exact"


def test_what_is_no_number_is_sent_whatever_the_tolerance() -> None:
    ranks, weights = Ranks(by_rows), {"matrix": torch.zeros(16, 8)}
    ranks.sync(weights, "keep")
    weights["matrix"][3, 3], weights["matrix"][9, 1] = torch.nan, torch.inf
    found, _ = ranks.sync(weights, "changes", 1e9)
    assert bits(found) == bits(weights)


def test_where_most_has_changed_all_is_sent() -> None:
    ranks = Ranks(by_rows)
    _, num_whole = ranks.sync(model(0), "keep")
    found, num_bytes = ranks.sync(model(1), "changes")
    assert bits(found) == bits(model(1))
    assert num_bytes == num_whole


def test_changes_are_refused_where_the_rest_is_not_there() -> None:
    ranks = Ranks(by_rows)
    ranks.sync(model(0), "keep")
    ranks.engine = Arrivals()  # of an engine that was started again
    with pytest.raises(EngineError, match="only what changed of matrix arrived"):
        ranks.sync(model(0), "changes")


def test_changes_are_refused_after_an_update_of_which_nothing_was_kept() -> None:
    ranks = Ranks(by_rows)
    ranks.sync(model(0), "keep")
    ranks.sync(model(1), "")
    with pytest.raises(EngineError, match="only what changed of"):
        ranks.sync(model(1), "changes")


def test_a_part_that_is_damaged_or_missing_is_refused() -> None:
    weights = {"matrix": torch.arange(12.0).view(4, 3)}
    planned = Bucket(names=("matrix",), dtypes=("float32",), shapes=((4, 3),))
    parts = []
    for box, offset in by_rows(weights["matrix"]):
        part, flat = pack_part(
            [Entry(name="matrix", box=box, piece=Piece(offset, (4, 3)), dtype=box.dtype)], planned, CPU
        )
        parts.append(replace(part, data=flat.numpy()))
    with pytest.raises(EngineError, match="of matrix 6 values did not arrive"):
        list(Arrivals().take(replace(planned, parts=tuple(parts[:1])), carried_bytes))
    damaged = replace(parts[1], checksum=1)
    with pytest.raises(EngineError, match="arrived damaged"):
        list(Arrivals().take(replace(planned, parts=(parts[0], damaged)), carried_bytes))


@pytest.mark.parametrize("num_ranks", [8, 512])
def test_what_the_driver_hands_on_of_a_rank_is_small_and_grows_with_parameters_alone(num_ranks: int) -> None:
    """Two layers of a 7B model, which are 270 MB: beside the bytes, a description that each engine reads of each rank."""
    names = tuple(f"model.layers.{number // 7}.mlp.gate_proj_{number}.weight" for number in range(14))
    shapes = ((18944 // num_ranks, 3584),) * 14
    pieces = tuple(Piece((18944 // num_ranks * (num_ranks - 1), 0), (18944, 3584), 10) for _ in names)
    part = Bucket(names=names, dtypes=("bfloat16",) * 14, shapes=shapes, checksum=123456789, rank=7, pieces=pieces)
    assert len(pickle.dumps(part.fields())) < 150 * len(names)


class CountedWrites(TorchDispatchMode):
    """Counts the bytes that operations write, the lanes of checksums aside, which stay in a core's cache."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self._aliasing = ("view", "slice", "select", "detach", "alias", "reshape", "as_strided", "split", "unsqueeze")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1].removeprefix("_").removeprefix("unsafe_")
        if name.startswith(("copy_", "clone", "to_copy", "cat", "zero_", "index", "fill_", "empty_like")):
            written = found if isinstance(found, Tensor) else args[0]
            is_lanes = written.dtype == torch.int64
            self.num_bytes += 0 if is_lanes else written.numel() * written.element_size()
        else:
            assert name.startswith(
                ("add", "mul", "sum", "zeros", "arange", "empty", "scalar", "local_scalar", "lift_fresh")
            ) or any(part in name for part in self._aliasing), f"{name} is not known to write nothing"
        return found


def large(num_ranks: int) -> tuple[dict[str, Tensor], Bucket, list[list[Entry]]]:
    """A bucket of 16 MB in matrices of float32 and what each of its ranks has of it."""
    weights = {f"layers.{index}.matrix": torch.randn(1024, 1024) for index in range(4)}
    planned = Bucket(names=tuple(weights), dtypes=("float32",) * 4, shapes=((1024, 1024),) * 4)
    rows = 1024 // num_ranks
    entries = [
        [
            Entry(name=name, box=whole[low : low + rows], piece=Piece((low, 0), (1024, 1024)), dtype=torch.float32)
            for name, whole in weights.items()
        ]
        for low in range(0, 1024, rows)
    ]
    return weights, planned, entries


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_byte_is_copied_once_by_its_rank_and_once_by_an_engine_and_once_into_the_model(num_ranks: int) -> None:
    weights, planned, entries = large(num_ranks)
    arrivals, model = Arrivals(), {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    with CountedWrites() as counted:
        parts = []
        for each in entries:
            part, flat = pack_part(each, planned, CPU)
            parts.append(replace(part, data=flat.numpy()))
        packed = counted.num_bytes
        for name, tensor in arrivals.take(replace(planned, parts=tuple(parts)), carried_bytes):
            model[name].copy_(tensor)
    assert packed == pytest.approx(planned.num_bytes, rel=0.001)
    assert counted.num_bytes == pytest.approx(3 * planned.num_bytes, rel=0.001)
    assert bits(model) == bits(weights)


def test_memory_is_taken_again_once_nothing_lies_in_it_and_never_before() -> None:
    weights, planned, entries = large(1)
    part, flat = pack_part(entries[0], planned, CPU)
    carried, arrivals = replace(part, data=flat.numpy()), Arrivals()

    def take() -> dict[str, Tensor]:
        arrivals.begin()
        return dict(arrivals.take(carried, carried_bytes))

    kept, others = take(), take()
    places = {tensor.untyped_storage().data_ptr() for tensor in (*kept.values(), *others.values())}
    assert len(places) == 2, "those of the first are still there"
    one = next(iter(kept.values()))
    del kept
    third = take()
    assert one.untyped_storage().data_ptr() not in {each.untyped_storage().data_ptr() for each in third.values()}
    assert torch.equal(one, weights["layers.0.matrix"])
    places |= {tensor.untyped_storage().data_ptr() for tensor in (one, *third.values())}
    del one, others, third
    again = take()
    assert next(iter(again.values())).untyped_storage().data_ptr() in places


def test_bytes_that_are_read_may_be_anybodys_and_stay_as_they_are() -> None:
    """As those of Ray's object store, which are read-only, and of a file."""
    weights, planned, entries = large(2)
    parts = []
    for each in entries:
        part, flat = pack_part(each, planned, CPU)
        data = flat.numpy().copy()
        data.flags.writeable = False
        parts.append(replace(part, data=data))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = dict(Arrivals().take(replace(planned, parts=tuple(parts)), carried_bytes))
    found["layers.0.matrix"].zero_()
    found = dict(Arrivals().take(replace(planned, parts=tuple(parts)), carried_bytes))
    assert bits(found) == bits(weights)


@pytest.mark.parametrize("shape", [(0,), (), (1,), (300, 7), (3, 200_000), (2, 3, 50_000)])
@pytest.mark.parametrize("columns", [False, True])
def test_what_is_copied_out_in_one_pass_has_the_checksum_of_all_bytes(shape: tuple[int, ...], columns: bool) -> None:
    whole = torch.randn(shape)
    target = torch.zeros(*shape[:-1], shape[-1] + 3)[..., :-3] if shape and columns else torch.zeros(shape)
    (bucket, flat), start = pack([("first", torch.randn(5)), ("weight", whole)], CPU), 32
    assert copy_out(flat, [(start, target)]) == bucket.checksum
    assert torch.equal(target, whole)


def test_an_empty_file_of_weights_is_read(tmp_path: Path) -> None:
    (tmp_path / "0.bin").touch()
    assert len(carried_bytes(Bucket(names=(), dtypes=(), shapes=(), path=str(tmp_path / "0.bin")))) == 0
