"""A learner's state as files, which `state.py` reads again: which tensors go where, as they are or copied to the host.

state.json               format, role, the optimizer's name, its steps and documents so far (the schedule follows from them),
                         types, and where micro-batches size themselves their budgets: found and lowered
model.safetensors        parameters under their Hugging Face names, tied ones once
optimizer.safetensors    e.g. `exp_avg.model.norm.weight`; absent for a model without an optimizer

A model that is sharded over ranks writes in place of the two safetensors files
shard-00003.safetensors  of rank 3: its part of each tensor, named `model/NAME` or `optimizer/NAME`. The file's header, which
                         is JSON, states in `parts` where each part lies in the whole:
                         {"model/lm_head.weight": {"shape": [512, 64], "offset": [384, 0]}}

No rank waits for another: there is no index to be gathered, and one that cannot write leaves the others be.

Tensors are written in the format of safetensors block by block, and hashed on the way: of a file that the library writes,
the sum can only be had by reading it again. What is written is what the library would write, byte for byte.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from skyrl_train.errors import SaveError
from skyrl_train.system.files import FileSums, write_hashed

FILES = {"model": "model.safetensors", "optimizer": "optimizer.safetensors"}
"""What a state has, and the file that has it whole. In shards its names begin with that and a slash."""
STATE_FILE = "state.json"
PARTS = "parts"
FORMAT = 1
_TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""Names in the format, in the order in which the library sorts them: what needs more alignment comes first, from the end."""
_ORDER = {dtype: -number for number, dtype in enumerate(_TYPES)}
_HEADER_ALIGNMENT = 8
_HOST_MARGIN = 0.1
"""Share of the host's memory that a copy leaves free."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """What one safetensors file holds: tensors by name, and texts about them."""

    tensors: Mapping[str, Tensor]
    """Plain ones, of this rank."""
    metadata: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> tuple[int, str]:
        """Write the file; returns its size and sum. Raises OSError, and SaveError for a type that the format lacks."""
        for name, tensor in self.tensors.items():
            if tensor.dtype not in _TYPES:
                raise SaveError(f"{path}: {name} is of {tensor.dtype}, which safetensors does not store")
        # By alignment, then by name, as the library: an element is then aligned without gaps, which the format forbids.
        names = sorted(self.tensors, key=lambda name: (_ORDER[self.tensors[name].dtype], name))
        return write_hashed(path, self._content(names))

    def _content(self, names: Iterable[str]) -> Iterator[bytes | memoryview]:
        header: dict[str, Any] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        offset = 0
        for name in names:
            tensor = self.tensors[name]
            end = offset + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _TYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        # So that the first tensor is aligned: JSON may end with blanks.
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        yield struct.pack("<Q", len(text)) + text
        for name in names:
            yield _bytes_of(self.tensors[name])


@dataclass(frozen=True, kw_only=True)
class StateFiles:
    """All files of a state that this rank writes."""

    role: str
    tensors: Mapping[str, TensorFile]
    """By the name of the file."""
    facts: Mapping[str, Mapping[str, object]]
    """JSON, by the name of the file."""
    ready: torch.cuda.Event | None = None
    """Behind which the tensors are what they should be, where a device is still copying them."""

    @staticmethod
    def of(
        *,
        role: str,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor] | None,
        optimizer_name: str = "",
        steps: int,
        documents: int,
        budgets: tuple[int, ...] = (),
        sharded: bool = False,
        rank: int = 0,
    ) -> StateFiles:
        """What is to be written of a model as it is now. Asked of all ranks where it is `sharded`, else of one."""
        content = {
            "format": FORMAT,
            "role": role,
            "optimizer": optimizer_name,
            "num_optimizer_steps": steps,
            "num_documents": documents,
            "num_optimizer_tensors": len(optimizer or {}),
            "memory_budgets": budgets,
            "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in model.values()}),
        }
        kinds = {"model": {name: tensor.detach() for name, tensor in model.items()}}
        if optimizer is not None:
            kinds["optimizer"] = dict(optimizer)
        if sharded:
            names = {f"{kind}/{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}
            files = {f"shard-{rank:05d}.safetensors": shard_of(rank, names)}
        else:
            files = {FILES[kind]: TensorFile(tensors=tensors) for kind, tensors in kinds.items()}
        return StateFiles(role=role, tensors=files, facts={STATE_FILE: content} if rank == 0 else {})

    def write(self, folder: Path) -> FileSums:
        """Write them into `folder`, which is made, and return their sums. Raises SaveError."""
        try:
            # Here, on the thread that writes: whoever asked for the copies has gone on.
            if self.ready is not None:
                self.ready.synchronize()
            folder.mkdir(parents=True, exist_ok=True)
            sums = {name: file.write(folder / name) for name, file in self.tensors.items()}
            for name, content in self.facts.items():
                sums[name] = write_hashed(folder / name, [(json.dumps(content, indent=1) + "\n").encode()])
        except OSError as error:
            raise SaveError(f"{folder}: the {self.role} model could not be written: {error}") from error
        return sums


class HostCopy:
    """The host's copy of a state. Its memory is kept for the next one, as taking it anew would cost more than copying."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, str], Tensor] = {}
        self._is_refused = False

    def take(self, files: StateFiles, *, num_ranks: int) -> StateFiles | None:
        """Return the files with copies of their tensors, which take the place of those of the last call; None, with a
        warning once, where the host has not the memory for it beside `num_ranks` - 1 others.

        From a device they are copied to pinned memory in the order of its work: what is computed next does not change them.
        """
        if self._is_refused:
            return None
        there = {(file, name): tensor for file, each in files.tensors.items() for name, tensor in each.tensors.items()}
        # What is not used again is let go first, so that the room is counted without it.
        self._memory = {key: kept for key, kept in self._memory.items() if key in there and _fits(kept, there[key])}
        missing = {key: tensor for key, tensor in there.items() if key not in self._memory}
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in missing.values())
        if missing and not self._has_room(num_bytes, num_ranks):
            return None
        try:
            for key, tensor in missing.items():
                self._memory[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        except RuntimeError as error:  # torch's only error for memory of the host
            self._refuse(f"{error}")
            return None
        on_device = None
        for key, tensor in there.items():
            self._memory[key].copy_(tensor, non_blocking=True)
            on_device = tensor.device if tensor.is_cuda else on_device
        ready = None
        if on_device is not None:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(on_device))
        copies = {
            file: replace(each, tensors={name: self._memory[file, name] for name in each.tensors})
            for file, each in files.tensors.items()
        }
        return replace(files, tensors=copies, ready=ready)

    def _has_room(self, num_bytes: int, num_ranks: int) -> bool:
        free = free_host_bytes()
        if free is None or num_bytes * num_ranks <= (1 - _HOST_MARGIN) * free:
            return True
        self._refuse(f"{num_bytes * num_ranks / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free")
        return False

    def _refuse(self, reason: str) -> None:
        self._is_refused, self._memory = True, {}
        logger.warning(
            "checkpoints are written while the run waits: the host's memory has no room for a copy of the state (%s). "
            "trainer.background_checkpoints=false does not try",
            reason,
        )


def free_host_bytes() -> int | None:
    """Return how much memory processes may still take here, by the kernel and by this container; None where unknown."""
    try:
        lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, LookupError, ValueError):
        return None
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            stats = (_CGROUP / limit).with_name("memory.stat").read_text().split()
            # The kernel counts pages of files as used, and drops them where memory is wanted.
            cached = int(stats[stats.index("inactive_file") + 1])
            allowed = int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()) + cached
            free = min(free, allowed)
        except (OSError, ValueError):  # "max" is no number: there is no limit
            continue
    return max(0, free)


def _fits(kept: Tensor, tensor: Tensor) -> bool:
    return kept.shape == tensor.shape and kept.dtype == tensor.dtype


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


def shard_of(rank: int, tensors: Mapping[str, Tensor]) -> TensorFile:
    """The file of what this rank holds of the tensors. Asked of each rank, in any order."""
    held, parts = {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):  # of ranks that hold the same, one writes it
            coordinates: Any = tensor.device_mesh.get_coordinate()
            is_mine = all(not place.is_replicate() or at == 0 for place, at in zip(tensor.placements, coordinates))
        else:
            is_mine = rank == 0
        local, offset = local_part(tensor)
        # A rank may have nothing of a small tensor; a tensor without values is written all the same, as it is asked for.
        if is_mine and (local.numel() or not tensor.numel()):
            held[name] = local
            parts[name] = {"shape": list(tensor.shape), "offset": list(offset)}
    return TensorFile(tensors=held, metadata={PARTS: json.dumps(parts)})


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank holds of the tensor, and where that begins in the whole."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offset)
