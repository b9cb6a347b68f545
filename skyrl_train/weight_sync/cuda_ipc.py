"""Weights that never move between devices: a process exports its memory, and another on the same device copies from it.

On CUDA devices a handle is what CUDA IPC needs, in plain numbers and bytes, so that it passes through any serialiser. On a
CPU it is the name of a file in shared memory: the same calls in the same order, for machines without a GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from skyrl_train.errors import EngineError

_SHARED_MEMORY = Path("/dev/shm")
_HANDLE_PARTS = slice(7, 10)
_COUNTER_PARTS = slice(11, 15)
"""Places in what torch takes a shared CUDA tensor apart into; the rest follows from its being flat bytes."""
_COUNTER = slice(4, 6)
"""Places in a handle that name the count of those who still have to open it."""


class Export:
    """Flat bytes that other processes may read for as long as this object is not closed."""

    def __init__(self, flat: Tensor) -> None:
        self._flat: Tensor | None = flat
        self._file: Path | None = None
        self._count: _OpenCount | None = None
        if flat.device.type == "cuda":
            handle = _cuda_handle(flat)
            self._count = _OpenCount(*handle[_COUNTER], device_index=flat.device.index)
            self.handles: Mapping[str, Any] = {device_name(flat.device): handle}
            return
        folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        # mkstemp is for the name, which no other process of the node has; tofile opens the file by itself.
        descriptor, name = tempfile.mkstemp(prefix="skyrl-weights-", dir=folder)
        os.close(descriptor)
        self._file = Path(name)
        flat.numpy().tofile(self._file)
        self.handles = {device_name(flat.device): [name]}

    def close(self) -> None:
        """Take the memory back, whether it was opened or not: importers must have copied what they need. Idempotent."""
        # Counted down before the memory is let go: torch keeps a block back whose count is not 0 yet.
        if self._count is not None:
            self._count.release()
            self._count = None
        self._flat = None
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None


class _OpenCount:
    """How many still have to open an exported CUDA block: 1 at first. Its importer counts it down on letting go, and torch
    frees the block only at 0, so that one which nobody opened would stay for ever unless its owner counts for them.

    Counted down twice the number would wrap around, which torch takes for many, so that it is read first: torch keeps the
    counts in a file in shared memory, 64-bit numbers behind a header.
    """

    _HEADER_BYTES = 64

    def __init__(self, handle: bytes, index: int, *, device_index: int) -> None:
        self._handle, self._index, self._device_index = handle, index, device_index
        # Nobody can have opened a new export: another number says that counts are not where they are looked for.
        self._is_readable = self._read() == 1
        """False under a torch that keeps its counts elsewhere: then every export is taken for one that was opened."""

    def release(self) -> None:
        """Count down for an importer that never came."""
        if self._is_readable and self._read() == 1:
            # torch's own call for an importer that has no use for its count.
            release: Any = torch.UntypedStorage._release_ipc_counter
            release(self._handle, self._index, device=self._device_index)

    def _read(self) -> int | None:
        try:
            # The handle is a name of shm_open, which begins with a slash; Linux has what it names in /dev/shm.
            with (_SHARED_MEMORY / self._handle.decode().lstrip("/")).open("rb") as file:
                file.seek(self._HEADER_BYTES + 8 * self._index)
                return int.from_bytes(file.read(8), sys.byteorder)
        except OSError:
            return None


def import_copy(handles: Mapping[str, Any], device: torch.device, num_bytes: int) -> Tensor:
    """Return a copy of what a process on `device` exports. Raises EngineError where none does."""
    name = device_name(device)
    require_exporters([name], handles)
    handle = handles[name]
    if device.type == "cuda":
        # A copy, since the exporter takes its memory back without asking who still has it open.
        return _open_cuda_handle(handle, device, num_bytes).clone()
    return torch.from_file(handle[0], shared=True, size=num_bytes, dtype=torch.uint8).clone()


def require_exporters(importers: Iterable[str], exporters: Iterable[str]) -> None:
    """Raise EngineError where a device on which weights are to be imported is not one on which they are exported."""
    if alone := sorted(set(importers) - set(exporters)):
        raise EngineError(
            f"weights are exported on {', '.join(sorted(set(exporters)))}, but an engine computes on {', '.join(alone)}. "
            "Engines that share the trainer's devices need a rank of the policy on each; or set "
            "generator.weight_transport=shared_memory"
        )


def device_name(device: torch.device) -> str:
    """Return a name that is the same in every process that uses the device, whatever number it has there."""
    if device.type == "cuda":
        # A number would not do: each process counts the devices that it may see from 0.
        return str(torch.cuda.get_device_properties(device).uuid)
    return device.type


def _cuda_handle(flat: Tensor) -> list[Any]:
    # torch would pickle all parts, classes among them and the number that the device has in this process.
    reduce: Any = reduce_tensor
    _, parts = reduce(flat)
    return [parts[3], *parts[_HANDLE_PARTS], *parts[_COUNTER_PARTS]]


def _open_cuda_handle(handle: list[Any], device: torch.device, num_bytes: int) -> Tensor:
    offset, *rest = handle
    rebuild: Any = rebuild_cuda_tensor
    # What the handle lacks of torch's arguments is known: flat bytes, on what this process calls the device.
    opened: Tensor = rebuild(
        Tensor,
        torch.Size([num_bytes]),
        (1,),
        offset,
        torch.storage.TypedStorage,
        torch.uint8,
        device.index or 0,
        *rest[:3],
        False,
        *rest[3:],
    )
    return opened
