"""Tensors of a model that is spread over ranks, as files: each rank writes what it holds, a reader takes what it needs.

shard-00003.safetensors   of rank 3: its part of each tensor. The file's header, which is JSON, states in `parts` where each
                          part lies in the whole: {"model/lm_head.weight": {"shape": [512, 64], "offset": [384, 0]}}

No rank waits for another: there is no index to be gathered, and one that cannot write leaves the others be. A reader looks
through the headers and copies what overlaps with its own part, however the writers had cut the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from skyrl_train.system.files import parse_strict_json, shown

TensorFact = tuple[torch.dtype, tuple[int, ...]]
"""Type and whole shape."""
_SHARDS = "shard-*.safetensors"
_PARTS = "parts"
_TORCH_METADATA = ".metadata"
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A box of a tensor that some file holds."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class StoredShards:
    """The tensors in a folder to which ranks wrote their shards."""

    def __init__(self, folder: Path) -> None:
        """Reads headers alone. Raises OSError, and ValueError for damaged ones."""
        self._parts: dict[str, list[_Part]] = {}
        self.facts: dict[str, TensorFact] = {}
        """By name."""
        for path in sorted(folder.glob(_SHARDS)):
            self._add_file(path)

    def fill(self, name: str, target: Tensor) -> None:
        """Copies a tensor into `target`, of the same whole shape: whole, or this rank's part of it where that is sharded.

        Raises ValueError where the files lack some of it.
        """
        local, offset = local_part(target)
        is_filled = torch.zeros(local.shape, dtype=torch.bool)
        for part in self._parts[name]:
            start = [max(mine, theirs) for mine, theirs in zip(offset, part.offset)]
            stop = [min(m + n, t + k) for m, n, t, k in zip(offset, local.shape, part.offset, part.shape)]
            if all(low < high for low, high in zip(start, stop)):
                here = tuple(slice(low - o, high - o) for low, high, o in zip(start, stop, offset))
                there = tuple(slice(low - o, high - o) for low, high, o in zip(start, stop, part.offset))
                local[here].copy_(part.read()[there])
                is_filled[here] = True
        if not is_filled.all():
            raise ValueError(f"{name}: no file has all of it; shards are missing")

    def _add(self, name: str, dtype: torch.dtype, whole: tuple[int, ...], part: _Part) -> None:
        fits = len(whole) == len(part.offset) == len(part.shape) <= _MAX_DIMENSIONS and all(
            low + size <= end for low, size, end in zip(part.offset, part.shape, whole)
        )
        if not fits:
            raise ValueError(f"{name}: a part of shape {part.shape} at {part.offset} is not within {whole}")
        if self.facts.setdefault(name, (dtype, whole)) != (dtype, whole):
            raise ValueError(f"{name} is {dtype} {whole} in one file, {self.facts[name]} in another")
        self._parts.setdefault(name, []).append(part)

    def _add_file(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
            parts = parse_strict_json((file.metadata() or {}).get(_PARTS, "{}"))
            for name in file.keys():  # noqa: SIM118 - no mapping
                tensor = file.get_tensor(name)  # which maps the file and reads nothing yet
                whole, offset = _sizes(parts[name]["shape"]), _sizes(parts[name]["offset"])
                part = _Part(offset=offset, shape=tuple(tensor.shape), read=partial(file.get_tensor, name))
                self._add(name, tensor.dtype, whole, part)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path.name}: {type(error).__name__}: {error}") from error


def is_sharded(folder: Path) -> bool:
    """Whether ranks wrote their shards here. Raises ValueError for shards of a kind that is not read any more."""
    if (folder / _TORCH_METADATA).is_file():
        raise ValueError(
            f"its shards are torch.distributed.checkpoint's ({_TORCH_METADATA}), which is read no more; go on with the "
            "version of skyrl_train that wrote them, or begin with model.path=EXPORT of that run"
        )
    return any(folder.glob(_SHARDS))


def shard_of(rank: int, tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor], dict[str, str]]:
    """Name, tensors and metadata of the file of what this rank holds of the tensors. Asked of each rank, in any order."""
    held, parts = {}, {}
    for name, tensor in tensors.items():
        if not (_is_first_replica(tensor) if isinstance(tensor, DTensor) else rank == 0):
            continue
        local, offset = local_part(tensor)
        if local.numel() or not tensor.numel():
            held[name] = local
            parts[name] = {"shape": list(tensor.shape), "offset": list(offset)}
    return f"shard-{rank:05d}.safetensors", held, {_PARTS: json.dumps(parts)}


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank holds of the tensor, and where that begins in the whole."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offset)


def _is_first_replica(tensor: Any) -> bool:
    """Of ranks that hold the same, one writes it."""
    coordinates = tensor.device_mesh.get_coordinate()
    return all(not place.is_replicate() or at == 0 for place, at in zip(tensor.placements, coordinates))


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"a shape or an offset is {shown(value)}")
    return tuple(value)
