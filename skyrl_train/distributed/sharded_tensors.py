"""Named tensors as one checkpoint that all ranks write together, readable on any number of ranks.

Each rank writes the shards that it holds; a reader asks for the parts that it needs, however the writers had cut them
(`torch.distributed.checkpoint`). Its `.metadata` is a pickle: read only what `trainers/checkpoints.py` has verified.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

METADATA_FILE = ".metadata"


def is_sharded(folder: Path) -> bool:
    """Whether `write_tensors` wrote here."""
    return (folder / METADATA_FILE).is_file()


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """All ranks call it with the same names. Raises what torch raises where the disk refuses."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(str(folder), single_file_per_rank=True, sync_files=False, overwrite=True)
    save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())


def describe_tensors(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and whole shape of every tensor there."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: (entry.properties.dtype, tuple(entry.size))
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fills the tensors of `into`, sharded or whole, each with what this rank holds of it. All ranks call it."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(dict(into), storage_reader=FileSystemReader(str(folder)), no_dist=not dist.is_initialized())


def laid_out_like(whole: Tensor, target: Tensor) -> Tensor:
    """`whole`, which every rank has, as `target` is laid out: this rank's part of it where `target` is sharded."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(target, DTensor):
        return whole
    options: dict[str, Any] = {"src_data_rank": None}
    return distribute_tensor(whole.to(target.device), target.device_mesh, target.placements, **options)
