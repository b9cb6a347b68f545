"""A step capsule on disk: all that it takes to execute one training step again, and what came of it the first time.

OUTPUT_DIR/capsules/
  step_000012/           of one of the last `trainer.capsules` steps, of reinforcement or of supervised learning
    capsule.json         the facts below (`Capsule`)
    config.yaml          the run's configuration, secrets redacted
    batch.safetensors    the training batch as the update saw it: scored, with advantages; in supervised training closed
    train_step_...       the step's rollouts: hard links to the run's files, where the disk has such
    manifest.json        size and SHA-256 of every other file; written last
  states/step_000011/    models, optimizers and the loop's state after step 11, as a checkpoint holds them
  failed/step_000013/    the last step that was refused: the same, and the models as they were then, in one folder

Here such folders are read. `writer.py` writes them, `runs/capsule.py` executes them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from skyrl_train.batch import BatchMetadata, TrainingInputBatch
from skyrl_train.batch.steps import LossDenominators
from skyrl_train.errors import DataError, SkyrlTrainError
from skyrl_train.images import as_record, from_record
from skyrl_train.system.files import parse_strict_json, read_json, whole_number, write_json
from skyrl_train.trainers.checkpoints.folder import checkpoint_name, step_of

CAPSULE_FILE = "capsule.json"
CONFIG_FILE = "config.yaml"
BATCH_FILE = "batch.safetensors"
STATES = "states"
FAILED = "failed"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """How a step ended that was not finished."""

    error: str
    learner: str = ""
    """`policy` or `critic`, whose optimizer step was refused; empty where the step ended before its update."""
    optimizer_steps: int = 0
    """That this learner had made in the training step before."""


@dataclass(frozen=True, kw_only=True)
class BadInput:
    """A number of a rollout that is not finite."""

    uid: str
    sample: int
    turn: int
    column: str
    """`reward` or `logprobs`."""
    token: int
    """Index among the turn's response tokens; 0 for a reward."""
    value: str
    text: str
    """The turn's response."""


@dataclass(frozen=True, kw_only=True)
class Capsule:
    """Facts of one training step."""

    step: int
    seed: int
    config_sha256: str
    """Of `config.yaml`."""
    rollouts: str
    """Name of the file, or of the folder of its parts, in the same folder; empty where there is none."""
    rollouts_sha256: str
    """Of that file, or of the index of the parts, which has their sums."""
    versions: Mapping[str, str]
    """Of Python and the libraries that arithmetic depends on."""
    git_commit: str
    """Of the code, with `-dirty` where it was changed; empty where it is not in a repository."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Of the step's record, times aside; None for one that is not finite."""
    refusal: Refusal | None = None
    bad_inputs: tuple[BadInput, ...] = ()
    """Of a step that was refused, from its rollouts."""
    total_steps: int = 0
    """That the run was to have, for schedules; 0 in capsules of before it was kept."""
    denominators: LossDenominators | None = None
    """In supervised training, whose batch is one closed mini-batch; None elsewhere."""

    def write(self, folder: Path) -> None:
        """Write `capsule.json`."""
        write_json(folder / CAPSULE_FILE, {"format": FORMAT, **dataclasses.asdict(self)})

    @staticmethod
    def read(folder: Path) -> Capsule:
        """Raises DataError naming the file and what is wrong with it."""
        path = folder / CAPSULE_FILE
        try:
            content = dict(read_json(path))
            if content.pop("format") != FORMAT:
                raise ValueError(f"not of format {FORMAT}")
            refusal, denominators = content.pop("refusal"), content.pop("denominators", None)
            return Capsule(
                **{
                    **content,
                    "step": whole_number(content, "step"),
                    "seed": whole_number(content, "seed"),
                    "refusal": None if refusal is None else Refusal(**refusal),
                    "denominators": None if denominators is None else LossDenominators(**denominators),
                    "bad_inputs": tuple(BadInput(**each) for each in content.pop("bad_inputs")),
                }
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}): it was damaged") from error


def steps_in(root: Path) -> list[int]:
    """Return the steps with a folder under `root`, in order."""
    return sorted(step for folder in root.glob("step_*") if (step := step_of(folder.name)) >= 0)


def find_capsule(capsules: Path, step: int) -> Path:
    """Return the folder of the capsule of `step`. Raises DataError, naming the steps that there are."""
    for root in (capsules / FAILED, capsules):
        if (root / checkpoint_name(step) / CAPSULE_FILE).is_file():
            return root / checkpoint_name(step)
    kept, failed = steps_in(capsules), steps_in(capsules / FAILED)
    there = [f"of steps {', '.join(map(str, kept))}"] if kept else []
    there += [f"of the refused step {', '.join(map(str, failed))}"] if failed else []
    remedy = f"There are capsules {' and '.join(there)}" if there else "A run keeps some with trainer.capsules=5"
    raise DataError(f"{capsules} has no capsule of step {step}. {remedy}")


def cut_capsules_after(capsules: Path, step: int) -> None:
    """Remove capsules, and states, of later steps, which a resumed run makes again. Those of refused steps stay."""
    for root in (capsules, capsules / STATES):
        for later in [each for each in steps_in(root) if each > step]:
            shutil.rmtree(root / checkpoint_name(later))


def write_batch(path: Path, batch: TrainingInputBatch) -> None:
    """Write the columns, exactly, and what is known of the rows: of their images where they stand, and their sums."""
    tensors = {"row_offsets": batch.row_offsets}
    tensors |= {f"token/{name}": column.contiguous() for name, column in batch.token_columns.items()}
    # Copied, as two of them may be one tensor, which the file refuses.
    tensors |= {f"row/{name}": column.clone() for name, column in batch.row_columns.items()}
    known = dataclasses.asdict(dataclasses.replace(batch.metadata, images=()))
    known["images"] = [as_record(spans) for spans in batch.metadata.images]
    save_file(tensors, path, metadata={"batch": json.dumps(known)})


def read_batch(path: Path) -> TrainingInputBatch:
    """Inverse of `write_batch`, but for the pixels of images. Raises DataError."""
    try:
        file: Any = safe_open(path, framework="pt")
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        known = dict(parse_strict_json(file.metadata()["batch"]))
        for name in ("policy_mini_batch_boundaries", "critic_mini_batch_boundaries"):
            known[name] = known[name] and tuple((int(start), int(stop)) for start, stop in known[name])
        known["images"] = tuple(map(from_record, known.get("images", ())))
        known["uids"] = tuple(map(str, known["uids"]))
        known["prompt_end_indices"] = known["prompt_end_indices"] and tuple(known["prompt_end_indices"])
        return TrainingInputBatch(
            token_columns=_of("token/", tensors),
            row_columns=_of("row/", tensors),
            row_offsets=tensors["row_offsets"],
            metadata=BatchMetadata(**known),
        )
    except (OSError, SafetensorError, SkyrlTrainError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}): it was damaged") from error


def _of(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
