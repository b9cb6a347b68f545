"""Arrays in Ray's object store, and the data plane of a run on Ray (`batch/plane/plane.py`).

    loop                         worker of a node, near the arrays
    RayPlane.hold(batch)         (the store has the arrays, in pieces of whole prompts)
    RayPlane.add_columns(f, b) -> DataWorker.add_columns: reads b, computes f(b), puts what is new --> where it is
    RayPlane.ask(f, b)         -> DataWorker.ask: reads b, computes f(b) --> a small answer

What is put lives as long as somebody refers to it and the process that put it lives. Nothing is pickled but the arrays
themselves, by Ray, and references to them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import ray
import torch
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.plane import Layer, Piece, added_columns, by_reference
from skyrl_train.cluster.calls import HEALTH, SAVES, Answer, Identity, RemoteActor, own_identity
from skyrl_train.cluster.endpoints import ActorGroup, Served
from skyrl_train.cluster.session import RaySession, forwarded_environment
from skyrl_train.endpoints import Endpoint
from skyrl_train.errors import ActorLostError
from skyrl_train.telemetry.logs import stacks

if TYPE_CHECKING:
    from skyrl_train.config.models import PlacementConfig

P = ParamSpec("P")
R = TypeVar("R")

_FETCH_S = 300.0
"""Deadline of reading arrays that are there, from another node perhaps."""
_PIECE_TOKENS = 2**20
"""About as many tokens are put together, of whole prompts: who needs some of their rows fetches no more than that."""


@dataclass(frozen=True, eq=False)
class StoredArrays:
    """Implements `Arrays` with a reference into the object store."""

    reference: Any

    def read(self) -> Mapping[str, NDArray[Any]]:
        """Map the arrays, from another node where they are there. Raises ActorLostError where they are gone."""
        try:
            found: Mapping[str, NDArray[Any]] = ray.get(self.reference, timeout=_FETCH_S)
        except ray.exceptions.RayError as error:
            what = " ".join(str(error).split())[:300]
            raise ActorLostError(f"arrays of rows are gone from the object store: {what}", phase="data") from None
        return found


def put_arrays(arrays: Mapping[str, NDArray[Any]]) -> StoredArrays:
    """Put arrays of plain types into the object store of this node. Raises TypeError for others."""
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise TypeError(f"{name} is an array of Python objects, which do not travel")
    return StoredArrays(ray.put(dict(arrays)))


class DataWorker:
    """The actor of a node that computes with rows and rollouts whose arrays are in the object store."""

    def __init__(self, *, num_threads: int, secrets: Mapping[str, str]) -> None:
        """`secrets`: environment variables that Ray must not see."""
        os.environ.update(secrets)
        stacks.answer("data worker")
        torch.set_num_threads(num_threads)
        self._served = Served()
        self._served.add(DataWorker, self)

    def ping(self) -> bool:
        """Give a sign of life; runs beside whatever else runs."""
        return True

    def invoke(self, key: str, *args: Any, **kwargs: Any) -> Answer:
        """Answer for this actor."""
        return self._served.answer(key, args, kwargs)

    def identify(self) -> Identity:
        """Return where this process is."""
        return own_identity()

    def ask(self, function: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Return what a function gives for batches whose columns are read first."""
        return function(*(_read(each) for each in args), **{name: _read(each) for name, each in kwargs.items()})

    def add_columns(
        self,
        function: Callable[..., TrainingInputBatch],
        batch: TrainingInputBatch,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[TrainingInputBatch, Layer | None]:
        """Return the batch with its new columns of rows, and where those of tokens are; None where none are new."""
        read = batch.here()
        added, after = added_columns(read, function(read, *args, **kwargs))
        rows = TrainingInputBatch(
            token_columns=batch.token_columns,
            row_columns=after.row_columns,
            row_offsets=after.row_offsets,
            metadata=after.metadata,
        )
        if not added:
            return rows, None
        source = put_arrays({name: column.numpy() for name, column in added.items()})
        dtypes = {name: column.dtype for name, column in added.items()}
        return rows, Layer.of([Piece(source, after.row_offsets.numpy())], dtypes)


class RayPlane:
    """Implements `DataPlane` with the object store and a worker on each node. May be used from several threads."""

    def __init__(self, session: RaySession, placement: PlacementConfig, *, num_threads: int) -> None:
        """Start the workers and return at once; who needs them first waits for them."""
        env, secrets = session.runtime_env(num_threads), forwarded_environment(secret=True)
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        actors = [
            RemoteActor(
                handle=ray.remote(concurrency_groups={HEALTH: 1, SAVES: 1})(DataWorker)
                .options(
                    num_cpus=0,
                    max_restarts=0,
                    runtime_env=env,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                )
                .remote(num_threads=num_threads, secrets=secrets),
                role="data worker",
                rank=rank,
                log_folder=session.log_folder,
            )
            for rank, node in enumerate(nodes)
        ]
        self._group = ActorGroup(placement, "data", actors)
        self._starting = self._group.of(DataWorker).begin(DataWorker.identify, "start")
        self._is_started = False
        self._turns = itertools.count()

    def hold(self, batch: TrainingInputBatch) -> TrainingInputBatch:
        """Put the batch's arrays into the store, in pieces of whole prompts; one whose arrays are there stays as it is."""
        if isinstance(batch.token_columns, dict):
            pieces = [_put_rows(batch, start, stop) for start, stop in _spans(batch)]
            dtypes = {name: column.dtype for name, column in batch.token_columns.items()}
            return by_reference(Layer.of(pieces, dtypes), batch)
        return batch

    def add_columns(
        self,
        function: Callable[Concatenate[TrainingInputBatch, P], TrainingInputBatch],
        batch: TrainingInputBatch,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> TrainingInputBatch:
        """Have a worker do it, and keep the new columns of tokens."""
        found, layer = self._worker().call(DataWorker.add_columns, "data", function, batch, args, kwargs)[0]
        return found if layer is None else found.with_layer(layer)

    def ask(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Have a worker do it."""
        answers: list[R] = self._worker().call(DataWorker.ask, "data", function, args, kwargs)
        return answers[0]

    def close(self) -> None:
        """End the workers, and with them what they have put."""
        self._group.close()

    def _worker(self, *, saves: bool = False) -> Endpoint[DataWorker]:
        """Return the worker whose turn it is."""
        actors = self._group.actors
        if not self._is_started:
            for actor, identity in zip(actors, self._starting.wait()):
                actor.found_at(identity)
            self._is_started = True
        actor = actors[next(self._turns) % len(actors)]
        return self._group.of(DataWorker, [actor], concurrency_group=SAVES if saves else "")


def _read(given: Any) -> Any:
    return given.here() if isinstance(given, TrainingInputBatch) else given


def _put_rows(batch: TrainingInputBatch, start: int, stop: int) -> Piece:
    offsets = batch.row_offsets[start : stop + 1].numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    arrays = {name: column[first:last].numpy() for name, column in batch.token_columns.items()}
    return Piece(put_arrays(arrays), offsets - first)


def _spans(batch: TrainingInputBatch) -> list[tuple[int, int]]:
    """Return `[start, stop)` rows of each piece, whole prompts."""
    bounds = batch.row_offsets.numpy()
    ends = batch.metadata.prompt_end_indices or (batch.num_rows,)
    spans, start = [], 0
    for end, following in zip(ends, (*ends[1:], None)):
        if following is None or bounds[following] - bounds[start] > _PIECE_TOKENS:
            spans.append((start, end))
            start = end
    return spans
