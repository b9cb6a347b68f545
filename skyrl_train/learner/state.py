"""A learner's state as files: safetensors and JSON, no pickle.

model.safetensors        parameters under their Hugging Face names, tied ones once
optimizer.safetensors    e.g. `exp_avg.model.norm.weight`; absent for a model without an optimizer
state.json               format, role, number of optimizer steps (the schedule is a function of it), types
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl_train.errors import CheckpointError

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """What `read` found, on the CPU."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    num_optimizer_steps: int


def write(
    folder: Path, *, role: str, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor] | None, steps: int
) -> None:
    """Writes the three files into an existing folder. Raises CheckpointError where the disk refuses."""
    content = {
        "format": FORMAT,
        "role": role,
        "num_optimizer_steps": steps,
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in model.values()}),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(_plain(model), folder / MODEL_FILE)
        if optimizer is not None:
            save_file(_plain(optimizer), folder / OPTIMIZER_FILE)
        (folder / STATE_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: the {role} model could not be written: {error}") from error


def read(folder: Path, *, role: str, model: Mapping[str, Tensor], with_optimizer: bool) -> StoredState:
    """Reads what `write` wrote for a model with these tensors.

    Raises CheckpointError for missing or unreadable files, another role, or names, shapes or types that differ.
    """
    try:
        content = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        steps, found = int(content["num_optimizer_steps"]), (int(content["format"]), str(content["role"]))
        tensors = load_file(folder / MODEL_FILE)
        moments = load_file(folder / OPTIMIZER_FILE) if with_optimizer else {}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: the {role} model cannot be read: {type(error).__name__}: {error}") from error
    if found != (FORMAT, role):
        raise CheckpointError(f"{folder}: holds format {found[0]}, role {found[1]!r}; expected {FORMAT}, {role!r}")
    _require_same(folder, tensors, model)
    return StoredState(model=tensors, optimizer=moments, num_optimizer_steps=steps)


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _require_same(folder: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    def describe(tensor: Tensor | None) -> str:
        return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

    for name in sorted(found.keys() | expected.keys()):
        there, here = describe(found.get(name)), describe(expected.get(name))
        if there != here:
            raise CheckpointError(
                f"{folder}: {name} is {there} in {MODEL_FILE} but {here} in the model. "
                "Is model.path the one of that run?"
            )
