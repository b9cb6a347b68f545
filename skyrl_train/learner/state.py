"""A learner's state as files.

state.json               format, role, the optimizer's name, its steps and documents so far (the schedule follows from them),
                         types, and where micro-batches size themselves their budgets: found and lowered
model.safetensors        parameters under their Hugging Face names, tied ones once
optimizer.safetensors    e.g. `exp_avg.model.norm.weight`; absent for a model without an optimizer

A model that is sharded over ranks writes `shard-RANK.safetensors` in place of the two safetensors files
(`learner/shards.py`). Either form loads into either kind of learner, on any number of ranks.

Sums prove that a checkpoint is what was written, not who wrote it. What is read here is therefore taken for data, never for
code, and each fact is checked before it is used: types, ranges, shapes, that numbers are finite, that nothing is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from skyrl_train.distributed import reshard
from skyrl_train.errors import CheckpointError, ModelError
from skyrl_train.learner.shards import StoredShards, TensorFact, is_sharded, local_part, shard_of
from skyrl_train.learner.state_files import StateFiles, TensorFile
from skyrl_train.system.files import read_json, shown, whole_number

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
FORMAT = 1
_MODEL_PREFIX = "model/"
_OPTIMIZER_PREFIX = "optimizer/"


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


def state_files(
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
    if sharded:
        name, held, metadata = shard_of(rank, _sharded_names(model, optimizer))
        tensors = {name: TensorFile(tensors=held, metadata=metadata)}
    else:
        tensors = {MODEL_FILE: TensorFile(tensors={name: tensor.detach() for name, tensor in model.items()})}
        if optimizer is not None:
            tensors[OPTIMIZER_FILE] = TensorFile(tensors=optimizer)
    return StateFiles(role=role, tensors=tensors, facts={STATE_FILE: content} if rank == 0 else {})


def read(
    folder: Path, *, role: str, model: Mapping[str, Tensor], with_optimizer: bool, optimizer_name: str = ""
) -> StoredState:
    """Reads the `state_files` that were written of a model with these tensors, laid out as they are.

    Raises CheckpointError for missing or unreadable files, another role, or names, shapes or types that differ.
    """
    facts = _read_facts(folder, role=role)
    with_optimizer = with_optimizer and facts.optimizer == optimizer_name
    with _reading(folder, f"the {role} model"):
        if is_sharded(folder):
            tensors, moments = _read_sharded(folder, model, with_optimizer)
        else:
            tensors = load_file(folder / MODEL_FILE)
            moments = load_file(folder / OPTIMIZER_FILE) if with_optimizer else {}
    _require_same(folder, {name: _fact(tensor) for name, tensor in tensors.items()}, model)
    _require_finite(folder, tensors)
    if with_optimizer:
        _check_moments(folder, moments, facts)
    return StoredState(
        model={name: _laid_out_like(tensor, model[name]) for name, tensor in tensors.items()},
        optimizer={key: _moment_like(value, key, model) for key, value in moments.items()},
        num_optimizer_steps=facts.num_optimizer_steps,
        num_documents=facts.num_documents,
        budgets=facts.budgets,
    )


def read_model(folder: Path) -> dict[str, Tensor]:
    """The parameters alone, whole, in this process. Raises CheckpointError, also where one is not finite."""
    tensors = read_tensors(folder, "model")
    _require_finite(folder, tensors)
    return tensors


def read_tensors(folder: Path, what: Literal["model", "optimizer"]) -> dict[str, Tensor]:
    """The parameters, or the optimizer's state, whole, in this process, whatever they are. An optimizer's is empty where the
    model has none. Raises CheckpointError."""
    prefix, file = {"model": (_MODEL_PREFIX, MODEL_FILE), "optimizer": (_OPTIMIZER_PREFIX, OPTIMIZER_FILE)}[what]
    with _reading(folder, f"the {what}"):
        if is_sharded(folder):
            stored = StoredShards(folder)
            names = [name for name in stored.facts if name.startswith(prefix)]
            whole = {name: torch.empty(stored.facts[name][1], dtype=stored.facts[name][0]) for name in names}
            for name, tensor in whole.items():
                stored.fill(name, tensor)
            return {name.removeprefix(prefix): tensor for name, tensor in whole.items()}
        if what == "optimizer" and not (folder / file).is_file():
            return {}
        return load_file(folder / file)


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What `state.json` says."""

    optimizer: str
    num_optimizer_steps: int
    num_documents: int
    num_optimizer_tensors: int
    budgets: tuple[int, ...]


@contextmanager
def _reading(folder: Path, what: str) -> Iterator[None]:
    """Turns what damaged files make their readers raise into CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else f"{error}"
        raise CheckpointError(f"{folder}: {what} cannot be read: {type(error).__name__}: {reason}") from error


def _read_facts(folder: Path, *, role: str) -> _Facts:
    """Raises CheckpointError naming the file and the entry."""
    with _reading(folder, f"the {role} model's {STATE_FILE}"):
        content = read_json(folder / STATE_FILE)
        if (content["format"], content["role"]) != (FORMAT, role):
            raise ValueError(
                f"holds format {shown(content['format'])}, role {shown(content['role'])}; expected {FORMAT}, {role!r}"
            )
        optimizer = content["optimizer"]
        if not isinstance(optimizer, str):
            raise ValueError(f"optimizer must be a name; got {shown(optimizer)}")
        dtypes = content.get("dtypes", [])
        if not isinstance(dtypes, list) or not all(isinstance(each, str) for each in dtypes):
            raise ValueError(f"dtypes must be names of types; got {shown(dtypes)}")
        budgets = content.get("memory_budgets", [])
        if not isinstance(budgets, list) or len(budgets) not in (0, 4):
            raise ValueError(f"memory_budgets must be no or four numbers; got {shown(budgets)}")
        numbered = {f"memory_budgets[{index}]": tokens for index, tokens in enumerate(budgets)}
        return _Facts(
            optimizer=optimizer,
            num_optimizer_steps=whole_number(content, "num_optimizer_steps"),
            num_documents=whole_number(content, "num_documents"),
            num_optimizer_tensors=whole_number(content, "num_optimizer_tensors"),
            budgets=tuple(whole_number(numbered, name) for name in numbered),
        )


def _require_finite(folder: Path, tensors: Mapping[str, Tensor], what: str = "") -> None:
    """Raises CheckpointError naming the first tensor with a NaN or an infinity, as far as this rank has it."""
    for name, tensor in tensors.items():
        local = local_part(tensor)[0]
        if local.is_floating_point() and not local.isfinite().all():
            count = int(local.numel() - local.isfinite().sum())
            raise CheckpointError(
                f"{folder}: {what}{name} has {count} of {local.numel()} values that are not finite. Resume from an earlier "
                "checkpoint with trainer.resume_mode=from_path trainer.resume_path=..."
            )


def _check_moments(folder: Path, moments: Mapping[str, Tensor], facts: _Facts) -> None:
    """Raises CheckpointError where some are missing, not finite, or of a number of steps that was never made."""
    if facts.num_optimizer_tensors != len(moments):
        raise CheckpointError(
            f"{folder}: the optimizer's state has {len(moments)} tensors; {STATE_FILE} states "
            f"{facts.num_optimizer_tensors}"
        )
    _require_finite(folder, moments, "the optimizer's ")
    for key, value in moments.items() if facts.optimizer == "adamw" else ():
        if key.startswith("step.") and value.numel() == 1:
            count = float(local_part(value)[0])
            if not 0 <= count <= facts.num_optimizer_steps or count % 1:
                raise CheckpointError(
                    f"{folder}: the optimizer's {key} is {count:g}; it must be a number of steps up to the "
                    f"{facts.num_optimizer_steps} of {STATE_FILE}"
                )


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
    """Tensors laid out as the model's; moments as the parameters that they belong to, in the host: beside the model and its
    gradients there may be no room for them."""
    shards = StoredShards(folder)
    stored = {
        name.removeprefix(_MODEL_PREFIX): fact for name, fact in shards.facts.items() if name.startswith(_MODEL_PREFIX)
    }
    _require_same(folder, stored, model)
    tensors = {name: torch.empty_like(tensor) for name, tensor in model.items()}
    moments = {}
    for name, (dtype, shape) in shards.facts.items():
        if with_optimizer and name.startswith(_OPTIMIZER_PREFIX):
            key = name.removeprefix(_OPTIMIZER_PREFIX)
            owner = model.get(key.partition(".")[2])
            if owner is not None and tuple(owner.shape) == shape:
                moments[key] = torch.empty_like(owner, dtype=dtype, device="cpu")
            else:
                moments[key] = torch.empty(shape, dtype=dtype)
    for prefix, into in ((_MODEL_PREFIX, tensors), (_OPTIMIZER_PREFIX, moments)):
        for name, tensor in into.items():
            shards.fill(f"{prefix}{name}", tensor)
    return tensors, moments


def _moment_like(value: Tensor, key: str, model: Mapping[str, Tensor]) -> Tensor:
    owner = model.get(key.partition(".")[2])
    return value if owner is None or owner.shape != value.shape else _laid_out_like(value, owner).to("cpu")


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


def _laid_out_like(whole: Tensor, target: Tensor) -> Tensor:
    """`whole`, which every rank has, as `target` is laid out: this rank's part of it where `target` is sharded."""
    if not isinstance(target, DTensor):
        return whole
    options: dict[str, Any] = {"src_data_rank": None}
    return distribute_tensor(whole.to(target.device), target.device_mesh, target.placements, **options)
