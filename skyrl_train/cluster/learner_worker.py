"""One rank of a learner: what runs inside a Ray actor, and how a batch gets there and back.

A batch travels as references to flat numpy arrays in the object store, which readers map without copying. A rank fetches its
rows, and leaves its scores of them in the store.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from skyrl_train.batch import BatchMetadata, TrainingInputBatch
from skyrl_train.batch.plane import Piece, ReferencedColumns
from skyrl_train.batch.steps import LossDenominators, MiniBatch
from skyrl_train.cluster.calls import Answer, Identity, finds, own_identity
from skyrl_train.cluster.endpoints import Served
from skyrl_train.cluster.images import Sent, SentImages, arrived
from skyrl_train.cluster.stored import put_arrays
from skyrl_train.distributed import is_broken_collective, join
from skyrl_train.endpoints import Rendezvous, free_port
from skyrl_train.errors import CollectiveError, SaveError, SkyrlTrainError
from skyrl_train.interfaces import HeldState, ScoreMethod
from skyrl_train.learner import PolicyLearner, build_learner, build_strategy, take_weights
from skyrl_train.learner.memory import make_meter, size_micro_batches
from skyrl_train.model.layers import set_numerics
from skyrl_train.system.files import FileSums
from skyrl_train.telemetry import StepMetrics
from skyrl_train.telemetry.logs import stacks
from skyrl_train.weights import Bucket, WeightSender, tensors_of

if TYPE_CHECKING:
    from skyrl_train.batch.layouts import CostModel
    from skyrl_train.config.derived import LearnerSettings
    from skyrl_train.config.fields import LayoutChoice
    from skyrl_train.learner import CriticLearner
    from skyrl_train.learner.memory import SizingLimits, SizingReport


@dataclass(frozen=True, kw_only=True)
class ToScore:
    """Rows whose scores stay with the rank that computes them."""

    rows: Shipped
    method: ScoreMethod
    names: tuple[str, ...]
    """Of the columns that the scores become; what has none is not kept."""


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """A rank's rows on their way. torch tensors would be copied, numpy arrays are not."""

    token_columns: ReferencedColumns
    row_columns: Mapping[str, NDArray[Any]]
    row_offsets: NDArray[np.int64]
    metadata: BatchMetadata
    """Without the images."""
    images: Sent | None = None
    denominators: LossDenominators | None = None
    """Denominators of the whole mini-batch that these rows are a part of."""


def pack(batch: TrainingInputBatch, images: SentImages, denominators: LossDenominators | None = None) -> Shipped:
    """Return the rows as they travel, by reference; `images` are those that were sent before."""
    columns = batch.token_columns
    if not isinstance(columns, ReferencedColumns):
        raise TypeError("rows travel by reference: put their arrays somewhere first (put_batch)")
    return Shipped(
        token_columns=columns,
        row_columns={name: column.numpy() for name, column in batch.row_columns.items()},
        row_offsets=batch.row_offsets.numpy(),
        metadata=replace(batch.metadata, images=()),
        images=images.of(batch.metadata.images),
        denominators=denominators,
    )


def unpack(shipped: Shipped) -> TrainingInputBatch:
    """Return the rows as tensors, those of rows over memory that is read-only; no operation of a batch writes in place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return TrainingInputBatch(
            token_columns=shipped.token_columns.here(),
            row_columns={name: torch.from_numpy(array) for name, array in shipped.row_columns.items()},
            row_offsets=torch.from_numpy(shipped.row_offsets),
            metadata=replace(shipped.metadata, images=arrived(shipped.images)),
        )


def unpack_mini_batch(shipped: Shipped) -> MiniBatch:
    """Return a rank's part of a closed mini-batch. Raises ValueError for rows that were shipped without denominators."""
    if shipped.denominators is None:
        raise ValueError("these rows are not part of a closed mini-batch")
    return MiniBatch(batch=unpack(shipped), denominators=shipped.denominators)


class LearnerRank:
    """A rank's model, as the group of all ranks calls it."""

    def __init__(self, learner: PolicyLearner | CriticLearner, role: str) -> None:
        self._learner, self._role = learner, role
        self._held: dict[bool, HeldState] = {}
        """By whether copies were asked for."""

    def hold_scores(self, asked: ToScore) -> Piece:
        """Return where the scores of the rows are, each column `[num_tokens]` float32."""
        model = self._learner if asked.method == "forward" else self._policy()
        found: torch.Tensor = getattr(model, asked.method)(unpack(asked.rows))
        columns = found.numpy().reshape(-1, len(asked.names)).T
        source = put_arrays({name: np.ascontiguousarray(each) for name, each in zip(asked.names, columns) if name})
        return Piece(source, asked.rows.row_offsets)

    def forward_backward(self, rows: Shipped) -> StepMetrics:
        """Return the metrics of this rank's rows."""
        return self._learner.forward_backward(unpack_mini_batch(rows))

    def optim_step(self) -> StepMetrics:
        """Take the optimizer step of this rank, and return its metrics, as `Learner.optim_step`."""
        return self._learner.optim_step()

    def size_micro_batches(self, limits: SizingLimits, stored: Sequence[SizingReport]) -> SizingReport:
        """Find what fits, together with the other ranks; `stored` are the reports of an earlier run, by rank."""
        engine = self._learner.engine
        own = stored[engine.strategy.rank] if len(stored) == engine.strategy.num_ranks else None
        return size_micro_batches(self._learner, make_meter(engine.passes.device, limits), limits, stored=own)

    def hold_state(self, copies: bool) -> bool:
        """See `Learner.hold_state`; returns whether it is a copy. What was held as such before is forgotten."""
        self._held[copies] = self._learner.hold_state(copies=copies)
        return self._held[copies].is_copied

    def write_state(self, folder: Path, copies: bool) -> FileSums | SaveError:
        """Write what is held, of this rank alone. Runs beside whatever else runs where it is a copy."""
        try:
            return self._held[copies].write(folder)
        except SaveError as error:
            return error

    def load(self, folder: Path) -> None:
        """Take this rank's part of the weights and the optimizer in `folder`, as `Learner.load`."""
        self._held.clear()  # what is replaced must not stay on the device
        self._learner.load(folder)

    def export_hf(self, folder: Path) -> None:
        """Write the model, gathered from all ranks, in Hugging Face format, as `Learner.export_hf`."""
        self._learner.export_hf(folder)

    def offload(self) -> None:
        """Move the model's memory to the host."""
        self._learner.engine.offloader.offload()

    def release(self) -> None:
        """Give memory that passes have freed back to the device, for models of other processes."""
        self._learner.engine.offloader.release()

    def onload(self, optimizer: bool) -> None:
        """Bring the model back to its device, with its optimizer's state where asked for."""
        self._learner.engine.offloader.onload(optimizer=optimizer)

    def take_bucket(self, bucket: Bucket) -> int:
        """Replace the parameters that are in the bucket, and return how many they are."""
        engine = self._learner.engine
        engine.offloader.require(optimizer=False)
        return take_weights(engine.model, engine.parameters, tensors_of(bucket), role=self._role)

    def _policy(self) -> PolicyLearner:
        if not isinstance(self._learner, PolicyLearner):
            raise SkyrlTrainError(f"the {self._role} model has no log-probabilities")
        return self._learner


class LearnerWorker:
    """The actor of a rank. It serves itself, and from `start` on a `LearnerRank` and a `WeightSender`."""

    def __init__(self, settings: LearnerSettings, *, secrets: Mapping[str, str]) -> None:
        """`secrets`: environment variables that Ray must not see."""
        os.environ.update(secrets)
        stacks.answer(f"{settings.role} worker")
        self._settings = settings
        self._served = Served()
        self._served.add(LearnerWorker, self)

    def ping(self) -> bool:
        """Give a sign of life; runs beside whatever else runs."""
        return True

    def invoke(self, key: str, *args: Any, **kwargs: Any) -> Answer:
        """Answer for whatever this actor serves."""
        try:
            return self._served.answer(key, args, kwargs)
        except RuntimeError as error:
            if not is_broken_collective(error):
                raise
            return Answer(error=CollectiveError(str(error)))

    def identify(self) -> Identity:
        """Return where this process is."""
        return own_identity()

    def finds(self, marker: Path) -> str:
        """Return why this node cannot use the folder of a file that the caller just made there; empty where it can."""
        return finds(marker)

    def free_port(self) -> int:
        """Return a port of this node that nobody listens on at this moment, for the ranks to meet at."""
        return free_port()

    def start(self, rendezvous: Rendezvous) -> tuple[LayoutChoice, CostModel]:
        """Meet the other ranks and load the model. Return the layout that is exact for it, and what its rows cost."""
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        set_numerics(deterministic=self._settings.deterministic)
        device = torch.device("cuda:0" if self._settings.platform.name == "gpu" else "cpu")
        if self._settings.strategy.kind != "single":
            join(rendezvous, device)
        strategy = build_strategy(self._settings, device, num_ranks=rendezvous.num_ranks)
        learner = build_learner(self._settings, strategy=strategy)
        self._served.add(LearnerRank, LearnerRank(learner, self._settings.role))
        self._served.add(WeightSender, learner.sender())
        batching = learner.engine.passes.micro_batching
        return batching.layout, batching.cost
