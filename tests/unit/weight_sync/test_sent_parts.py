"""Pieces of weights that ranks send by themselves: put together they are the weights, bit for bit, changes alone as well."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from skyrl_train.errors import EngineError
from skyrl_train.weight_sync.parts import Arrivals, Entry, SentWeights, pack_part
from skyrl_train.weights import Bucket, Piece, Update, carried_bytes, dtype_name

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
