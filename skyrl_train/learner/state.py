"""A learner's state as files.

state.json               format, role, the optimizer's name, its steps and documents so far (the schedule follows from them),
                         types, and where micro-batches size themselves their budgets: found and lowered
model.safetensors        parameters under their Hugging Face names, tied ones once
optimizer.safetensors    e.g. `exp_avg.model.norm.weight`; absent for a model without an optimizer

A model that is sharded over ranks writes `.metadata` and `__RANK_0.distcp` in place of the two safetensors files
(`torch.distributed.checkpoint`): each rank writes the shards that it holds, and a reader asks for the parts that it
needs, however the writers had cut them. `.metadata` is a pickle: read only what `trainers/checkpoints.py` has verified.
Either form loads into either kind of learner, on any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from skyrl_train.distributed.fsdp import reshard
from skyrl_train.errors import CheckpointError, ModelError

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
FORMAT = 1
_METADATA_FILE = ".metadata"
_MODEL_PREFIX = "model/"
_OPTIMIZER_PREFIX = "optimizer/"
TensorFact = tuple[torch.dtype, tuple[int, ...]]
"""Type and whole shape."""


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """The state that `read` found, on the CPU."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    """Empty where it is the state of an optimizer of another name: a fork changed it, and the new one begins without."""
    num_optimizer_steps: int
    num_documents: int
    budgets: tuple[int, ...]
    """As `OomRetry.budgets`; empty where none were stored."""


def write(
    folder: Path,
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
) -> None:
    """Writes the files. Called by all ranks where the model is `sharded`, else by one. Raises CheckpointError where the
    disk refuses."""
    content = {
        "format": FORMAT,
        "role": role,
        "optimizer": optimizer_name,
        "num_optimizer_steps": steps,
        "num_documents": documents,
        "memory_budgets": budgets,
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in model.values()}),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if sharded:
            _write_tensors(folder, _sharded_names(model, optimizer))
        else:
            save_file(_plain(model), folder / MODEL_FILE)
            if optimizer is not None:
                save_file(_plain(optimizer), folder / OPTIMIZER_FILE)
        if rank == 0:
            (folder / STATE_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: the {role} model could not be written: {error}") from error


def read(
    folder: Path, *, role: str, model: Mapping[str, Tensor], with_optimizer: bool, optimizer_name: str = ""
) -> StoredState:
    """Reads what `write` wrote for a model with these tensors, laid out as they are. A checkpoint of before optimizers were
    named is taken to be of the same one.

    Raises CheckpointError for missing or unreadable files, another role, or names, shapes or types that differ.
    """
    try:
        content = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        steps, documents = int(content["num_optimizer_steps"]), int(content["num_documents"])
        budgets = tuple(int(tokens) for tokens in content.get("memory_budgets", ()))
        found = (int(content["format"]), str(content["role"]))
        if found != (FORMAT, role):
            raise CheckpointError(f"{folder}: holds format {found[0]}, role {found[1]!r}; expected {FORMAT}, {role!r}")
        with_optimizer = with_optimizer and content.get("optimizer", optimizer_name) == optimizer_name
        if _is_sharded(folder):
            tensors, moments = _read_sharded(folder, model, with_optimizer)
        else:
            tensors = load_file(folder / MODEL_FILE)
            moments = load_file(folder / OPTIMIZER_FILE) if with_optimizer else {}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: the {role} model cannot be read: {type(error).__name__}: {error}") from error
    _require_same(folder, {name: _fact(tensor) for name, tensor in tensors.items()}, model)
    return StoredState(
        model={name: _laid_out_like(tensor, model[name]) for name, tensor in tensors.items()},
        optimizer={key: _moment_like(value, key, model) for key, value in moments.items()},
        num_optimizer_steps=steps,
        num_documents=documents,
        budgets=budgets,
    )


def read_model(folder: Path) -> dict[str, Tensor]:
    """The parameters alone, whole, in this process. Raises CheckpointError."""
    try:
        if not _is_sharded(folder):
            return load_file(folder / MODEL_FILE)
        facts = _describe_tensors(folder)
        tensors = {
            name: torch.empty(shape, dtype=dtype)
            for name, (dtype, shape) in facts.items()
            if name.startswith(_MODEL_PREFIX)
        }
        _read_tensors(folder, tensors)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{folder}: the model cannot be read: {type(error).__name__}: {error}") from error
    return {name.removeprefix(_MODEL_PREFIX): tensor for name, tensor in tensors.items()}


@torch.no_grad()
def take_weights(
    model: nn.Module, parameters: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]], *, role: str
) -> int:
    """Copies whole weights into the model's `parameters` of these names, or into this rank's shards of them; returns how
    many. Raises ModelError for an unknown name or another shape."""
    reshard(model)
    count = 0
    for name, tensor in weights:
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise ModelError(f"the {role} model cannot take {name} of shape {list(tensor.shape)}")
        parameters[name].copy_(_laid_out_like(tensor, parameters[name]))
        count += 1
    return count


def _sharded_names(model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    return {
        **{f"{_MODEL_PREFIX}{name}": tensor.detach() for name, tensor in model.items()},
        **{f"{_OPTIMIZER_PREFIX}{key}": tensor for key, tensor in (optimizer or {}).items()},
    }


def _read_sharded(
    folder: Path, model: Mapping[str, Tensor], with_optimizer: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors laid out as the model's; moments as the parameters that they belong to."""
    facts = _describe_tensors(folder)
    stored = {name.removeprefix(_MODEL_PREFIX): fact for name, fact in facts.items() if name.startswith(_MODEL_PREFIX)}
    _require_same(folder, stored, model)
    into = {f"{_MODEL_PREFIX}{name}": torch.empty_like(tensor) for name, tensor in model.items()}
    if with_optimizer:
        for name, (dtype, shape) in facts.items():
            if name.startswith(_OPTIMIZER_PREFIX):
                owner = model.get(name.removeprefix(_OPTIMIZER_PREFIX).partition(".")[2])
                if owner is not None and tuple(owner.shape) == shape:
                    into[name] = torch.empty_like(owner, dtype=dtype)
                else:
                    into[name] = torch.empty(shape, dtype=dtype)
    _read_tensors(folder, into)
    return (
        {name.removeprefix(_MODEL_PREFIX): into[name] for name in into if name.startswith(_MODEL_PREFIX)},
        {name.removeprefix(_OPTIMIZER_PREFIX): into[name] for name in into if name.startswith(_OPTIMIZER_PREFIX)},
    )


def _moment_like(value: Tensor, key: str, model: Mapping[str, Tensor]) -> Tensor:
    owner = model.get(key.partition(".")[2])
    return value if owner is None or owner.shape != value.shape else _laid_out_like(value, owner)


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _fact(tensor: Tensor) -> TensorFact:
    return tensor.dtype, tuple(tensor.shape)


def _require_same(folder: Path, found: Mapping[str, TensorFact], expected: Mapping[str, Tensor]) -> None:
    def describe(fact: TensorFact | None) -> str:
        return "absent" if fact is None else f"{str(fact[0]).removeprefix('torch.')} {list(fact[1])}"

    for name in sorted(found.keys() | expected.keys()):
        there = describe(found.get(name))
        here = describe(_fact(expected[name]) if name in expected else None)
        if there != here:
            raise CheckpointError(
                f"{folder}: {name} is {there} in the checkpoint but {here} in the model. "
                "Is model.path the one of that run?"
            )


def _is_sharded(folder: Path) -> bool:
    """Whether `_write_tensors` wrote here."""
    return (folder / _METADATA_FILE).is_file()


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """All ranks call it with the same names. Raises what torch raises where the disk refuses."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(str(folder), single_file_per_rank=True, sync_files=False, overwrite=True)
    save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())


def _describe_tensors(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and whole shape of every tensor there."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: (entry.properties.dtype, tuple(entry.size))
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _read_tensors(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fills the tensors of `into`, sharded or whole, each with what this rank holds of it. All ranks call it."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(dict(into), storage_reader=FileSystemReader(str(folder)), no_dist=not dist.is_initialized())


def _laid_out_like(whole: Tensor, target: Tensor) -> Tensor:
    """`whole`, which every rank has, as `target` is laid out: this rank's part of it where `target` is sharded."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(target, DTensor):
        return whole
    options: dict[str, Any] = {"src_data_rank": None}
    return distribute_tensor(whole.to(target.device), target.device_mesh, target.placements, **options)
