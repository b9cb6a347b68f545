"""A learner's state is read from its files (`state_files.py` says which), however many ranks wrote them and read them.

Sums prove that a checkpoint is what was written, not who wrote it. What is read here is therefore taken for data, never for
code, and each fact is checked before it is used: types, ranges, shapes, that numbers are finite, that nothing is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from skyrl_train.distributed import reshard
from skyrl_train.errors import CheckpointError, ModelError
from skyrl_train.learner.state_files import FILES, FORMAT, PARTS, STATE_FILE, local_part
from skyrl_train.system.files import parse_strict_json, read_json, shown, whole_number

TensorFact = tuple[torch.dtype, tuple[int, ...]]
"""The type of a tensor's elements and its whole shape, over all ranks."""
_SHARDS = "shard-*.safetensors"
_TORCH_METADATA = ".metadata"
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, kw_only=True)
class StateFacts:
    """What `state.json` says of a model and its optimizer."""

    optimizer: str
    """The optimizer's name; empty for a model without one."""
    num_optimizer_steps: int
    num_documents: int
    num_optimizer_tensors: int
    budgets: tuple[int, ...]
    """As `OomRetry.budgets`; empty where none were stored."""


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """The state that `read` found."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    """On the CPU; empty where it is the state of an optimizer of another name: a fork changed it, and the new one begins
    without."""
    facts: StateFacts


def read(
    folder: Path, *, role: str, model: Mapping[str, Tensor], with_optimizer: bool, optimizer_name: str = ""
) -> StoredState:
    """Reads the `StateFiles` that were written of a model with these tensors, laid out as they are; the optimizer's state in
    the host: beside the model and its gradients there may be no room for it.

    Raises CheckpointError for missing or unreadable files, another role, or names, shapes or types that differ.
    """
    facts = _read_facts(folder, role=role)
    with_optimizer = with_optimizer and facts.optimizer == optimizer_name
    with _reading(folder, f"the {role} model"):
        stored = StoredTensors(folder, *(FILES if with_optimizer else ["model"]))
        _require_same(folder, stored.facts_of("model"), model)
        tensors = {name: stored.take(f"model/{name}", like, like.device) for name, like in model.items()}
        moments = {}
        for key, (_, shape) in stored.facts_of("optimizer").items() if with_optimizer else ():
            owner = model.get(key.partition(".")[2])
            # Averages are sharded as their parameter is; a number, as the count of steps, is whole on each rank.
            like = owner if owner is not None and owner.shape == shape else None
            moments[key] = stored.take(f"optimizer/{key}", like)
    _require_finite(folder, tensors)
    if with_optimizer:
        _check_moments(folder, moments, facts)
    return StoredState(model=tensors, optimizer=moments, facts=facts)


def read_model(folder: Path) -> dict[str, Tensor]:
    """The parameters alone, whole, in this process. Raises CheckpointError, also where one is not finite."""
    tensors = read_tensors(folder, "model")
    _require_finite(folder, tensors)
    return tensors


def read_tensors(folder: Path, what: Literal["model", "optimizer"]) -> dict[str, Tensor]:
    """The parameters, or the optimizer's state, whole, in this process, whatever they are. An optimizer's is empty where the
    model has none. Raises CheckpointError."""
    with _reading(folder, f"the {what}"):
        has_none = what == "optimizer" and not (folder / FILES[what]).is_file()
        stored = StoredTensors(folder, *([] if has_none else [what]))
        return {name: stored.take(f"{what}/{name}") for name in stored.facts_of(what)}


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A box of a tensor that some file holds."""

    offset: tuple[int, ...]
    held: Tensor
    """Of a file that is mapped: nothing of it is read before it is used."""


class StoredTensors:
    """The tensors `model/NAME` and `optimizer/NAME` in a folder, to which ranks wrote their shards or one wrote all."""

    def __init__(self, folder: Path, *kinds: str) -> None:
        """Reads headers alone; of whole files those of the `kinds`. Raises OSError, and ValueError for damaged ones, or
        shards of a kind that is not read any more."""
        if (folder / _TORCH_METADATA).is_file():
            raise ValueError(
                f"its shards are torch.distributed.checkpoint's ({_TORCH_METADATA}), which is read no more; go on with the "
                "version of skyrl_train that wrote them, or begin with model.path=EXPORT of that run"
            )
        self._parts: dict[str, list[_Part]] = {}
        self.facts: dict[str, TensorFact] = {}
        """Of each tensor that the files have, by `model/NAME` or `optimizer/NAME`."""
        shards = sorted(folder.glob(_SHARDS))
        for path in shards:
            self._add_file(path)
        for kind in () if shards else kinds:
            self._add_file(folder / FILES[kind], whole_kind=kind)

    def facts_of(self, kind: str) -> dict[str, TensorFact]:
        """Return the facts of the model's tensors, or of the optimizer's, by their names there."""
        prefix = f"{kind}/"
        return {name.removeprefix(prefix): fact for name, fact in self.facts.items() if name.startswith(prefix)}

    def take(self, name: str, like: Tensor | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return a tensor: this rank's part of it where `like`, of the same whole shape, is sharded, else whole. What has to
        be put together is so on the `device`. Raises ValueError where the files lack some of it."""
        dtype, shape = self.facts[name]
        if isinstance(like, DTensor):
            target = torch.empty_like(like, dtype=dtype, device=device)
        elif len(self._parts[name]) == 1 and self._parts[name][0].held.shape == shape:
            # Mapped from the file, and not copied: it is read when it is used.
            return self._parts[name][0].held
        else:
            target = torch.empty(shape, dtype=dtype, device=device)
        self.fill(name, target)
        return target

    def fill(self, name: str, target: Tensor) -> None:
        """Copies a tensor into `target`, of the same whole shape: whole, or this rank's part of it where that is sharded.

        Raises ValueError where the files lack some of it.
        """
        local, offset = local_part(target)
        # `target` is fresh memory: without a shard some of it would be whatever was there, and look like weights.
        is_filled = torch.zeros(local.shape, dtype=torch.bool)
        for part in self._parts[name]:
            # Where this rank's box and the file's overlap, in the whole tensor; below counted from each box's own corner.
            start = [max(mine, theirs) for mine, theirs in zip(offset, part.offset)]
            stop = [min(m + n, t + k) for m, n, t, k in zip(offset, local.shape, part.offset, part.held.shape)]
            if all(low < high for low, high in zip(start, stop)):
                here = tuple(slice(low - o, high - o) for low, high, o in zip(start, stop, offset))
                there = tuple(slice(low - o, high - o) for low, high, o in zip(start, stop, part.offset))
                local[here].copy_(part.held[there])
                is_filled[here] = True
        if not is_filled.all():
            raise ValueError(f"{name}: no file has all of it; shards are missing")

    def _add_file(self, path: Path, *, whole_kind: str = "") -> None:
        """`whole_kind`: what the file has whole, under its names there."""
        try:
            file: Any = safe_open(path, framework="pt")
            parts = {} if whole_kind else parse_strict_json((file.metadata() or {}).get(PARTS, "{}"))
            for name in file.keys():  # noqa: SIM118 - no mapping
                held = file.get_tensor(name)
                if whole_kind:
                    whole, offset = tuple(held.shape), (0,) * held.ndim
                    self._add(f"{whole_kind}/{name}", whole, _Part(offset=offset, held=held))
                else:
                    whole, offset = _sizes(parts[name]["shape"]), _sizes(parts[name]["offset"])
                    self._add(name, whole, _Part(offset=offset, held=held))
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path.name}: {type(error).__name__}: {error}") from error

    def _add(self, name: str, whole: tuple[int, ...], part: _Part) -> None:
        shape, dtype = tuple(part.held.shape), part.held.dtype
        fits = len(whole) == len(part.offset) == len(shape) <= _MAX_DIMENSIONS and all(
            low + size <= end for low, size, end in zip(part.offset, shape, whole)
        )
        if not fits:
            raise ValueError(f"{name}: a part of shape {shape} at {part.offset} is not within {whole}")
        # Shards of two models in one folder would be put together without a word.
        if self.facts.setdefault(name, (dtype, whole)) != (dtype, whole):
            raise ValueError(f"{name} is {dtype} {whole} in one file, {self.facts[name]} in another")
        self._parts.setdefault(name, []).append(part)


def _sizes(value: object) -> tuple[int, ...]:
    # `type(...) is int`, as True is an int to isinstance.
    if not isinstance(value, (list, tuple)) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"a shape or an offset is {shown(value)}")
    return tuple(value)


@contextmanager
def _reading(folder: Path, what: str) -> Iterator[None]:
    """Turns what damaged files make their readers raise into CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else f"{error}"
        raise CheckpointError(f"{folder}: {what} cannot be read: {type(error).__name__}: {reason}") from error


def _read_facts(folder: Path, *, role: str) -> StateFacts:
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
        return StateFacts(
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


def _check_moments(folder: Path, moments: Mapping[str, Tensor], facts: StateFacts) -> None:
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


def _require_same(folder: Path, found: Mapping[str, TensorFact], expected: Mapping[str, Tensor]) -> None:
    def describe(fact: TensorFact | None) -> str:
        return "absent" if fact is None else f"{str(fact[0]).removeprefix('torch.')} {list(fact[1])}"

    for name in sorted(found.keys() | expected.keys()):
        there = describe(found.get(name))
        here = describe((expected[name].dtype, tuple(expected[name].shape)) if name in expected else None)
        if there != here:
            raise CheckpointError(
                f"{folder}: {name} is {there} in the checkpoint but {here} in the model. "
                "Is model.path the one of that run?"
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
        target = parameters[name]
        if isinstance(target, DTensor):  # every rank has the whole, and takes its own part
            options: dict[str, Any] = {"src_data_rank": None}
            tensor = distribute_tensor(tensor.to(target.device), target.device_mesh, target.placements, **options)
        target.copy_(tensor)
        count += 1
    return count
