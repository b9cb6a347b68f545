"""Arrays in Ray's object store, and the data plane of a run on Ray (`batch/plane/plane.py`).

    loop                        worker of a node, near the arrays
    RayPlane.hold(r)            (the store has the arrays, in pieces of whole prompts)
    RayPlane.make_rows(f, r)    -> DataWorker.make_rows: reads r, computes f(r), puts its token columns --> where they are
    RayPlane.add_columns(f, b)  -> DataWorker.add_columns: reads b, computes f(b), puts what is new --> where it is
    RayPlane.ask(f, b)          -> DataWorker.ask: reads b, computes f(b) --> a small answer
    RayPlane.save(f, calls)     -> the same on another thread of it: the log of rollouts, which is written beside an update,
                                by the worker of each node that has some of their arrays

What is put lives as long as somebody refers to it and the process that put it lives. What must outlive that process is
written to a file before anybody is told of it (`put_durably`), and read from there when it is gone from the store.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from skyrl_train.batch import BatchMetadata, TrainingInputBatch
from skyrl_train.batch.plane import (
    DataPlane,
    Layer,
    Piece,
    PlacedRollouts,
    ReferencedColumns,
    RowSharing,
    added_columns,
    arrays_of,
    by_reference,
    facts_in,
    is_storable,
    placed,
    trajectories_of,
)
from skyrl_train.batch.planner import facts_of
from skyrl_train.batch.steps import Together
from skyrl_train.cluster.calls import HEALTH, SAVES, Answer, Identity, RemoteActor, own_identity
from skyrl_train.cluster.endpoints import ActorGroup, Served
from skyrl_train.cluster.session import RaySession, forwarded_environment
from skyrl_train.endpoints import Endpoint
from skyrl_train.errors import ActorLostError, SaveError, byte_size
from skyrl_train.system.files import bring_to_disk, sync_folder
from skyrl_train.telemetry.logs import stacks
from skyrl_train.types import RolloutBatch, Trajectory

if TYPE_CHECKING:
    from skyrl_train.config.models import PlacementConfig

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

DECLARED_METRICS = """
memory/store_spilled_gib | GiB | What Ray's object store moved to disks, all nodes. | on Ray, where it did
"""

_FETCH_S = 300.0
"""Deadline of reading arrays that are there, from another node perhaps."""
_PIECE_TOKENS = 2**20
"""About as many tokens are put together, of whole prompts: who needs some of their rows fetches no more than that."""


class StoredArrays:
    """Implements `Arrays` with a reference into the object store."""

    def __init__(self, reference: Any, file: Path | None = None, node: str = "") -> None:
        """`file` has the same arrays, on a disk that all nodes share, for when who put them is gone; `node` is Ray's name of
        where they were put."""
        self.reference, self.file, self.node = reference, file, node
        self._mapped: Mapping[str, NDArray[Any]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredArrays, (self.reference, self.file, self.node)

    def read(self) -> Mapping[str, NDArray[Any]]:
        """Map the arrays, from another node where they are there, or read their file. Raises ActorLostError where they are
        gone."""
        if self._mapped is None:
            try:
                self._mapped = ray.get(self.reference, timeout=_FETCH_S)
            except ray.exceptions.RayError as error:
                self._mapped = self._restored(error)
        assert self._mapped is not None
        return self._mapped

    def _restored(self, lost: Exception) -> Mapping[str, NDArray[Any]]:
        what = " ".join(str(lost).split())[:300]
        if self.file is None:
            raise ActorLostError(f"arrays of rows are gone from the object store: {what}", phase="data") from None
        logger.warning("arrays are read from %s, as they are gone from the object store: %s", self.file, what)
        try:
            return load_file(self.file)
        except (OSError, SafetensorError) as error:
            raise ActorLostError(
                f"{self.file} cannot be read ({error}), and its arrays are gone: {what}", phase="data"
            ) from None


def put_arrays(arrays: Mapping[str, NDArray[Any]]) -> StoredArrays:
    """Put arrays of plain types into the object store of this node. Raises TypeError for others."""
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise TypeError(f"{name} is an array of Python objects, which do not travel")
    return StoredArrays(ray.put(dict(arrays)), node=ray.get_runtime_context().get_node_id())


def put_durably(arrays: Mapping[str, NDArray[Any]], file: Path) -> StoredArrays:
    """Put arrays into the object store once they are in a new `file`, which outlives this process and a loss of power.
    Raises OSError."""
    temporary = file.with_name(f".{file.name}.tmp")
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary)
    with open(temporary, "rb") as written:
        bring_to_disk(written.fileno(), temporary)
    os.replace(temporary, file)
    sync_folder(file.parent)
    stored = put_arrays(arrays)
    return StoredArrays(stored.reference, file, stored.node)


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

    @staticmethod
    def ask_here(function: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        """Return what a function gives for rows and rollouts that are read first."""
        return function(*map(_read, args), **{name: _read(each) for name, each in kwargs.items()})

    def ask(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do that in this process."""
        return self.ask_here(function, args, kwargs)

    def save(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Do the same with a function that writes, and reads of rows what it needs. Raises SaveError where the disk does
        not take it."""
        try:
            return function(*(each.here() if isinstance(each, PlacedRollouts) else each for each in args))
        except OSError as error:
            raise SaveError(str(error)) from error

    def make_rows(
        self,
        function: Callable[..., TrainingInputBatch],
        rollouts: PlacedRollouts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        together: Together,
    ) -> TrainingInputBatch:
        """Return the rows of rollouts, their token columns by reference; and what they share within a unit of `together`."""
        return put_batch(function(rollouts.here(), *args, **kwargs), together)

    def add_columns(
        self,
        function: Callable[..., TrainingInputBatch],
        batch: TrainingInputBatch,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Mapping[str, torch.Tensor], BatchMetadata, Layer | None]:
        """Return the columns of rows and the metadata as they are now, and where new columns of tokens are; None where none
        are new. The references stay with the asker: Ray registers each that comes back anew."""
        read = batch.here()
        added, after = added_columns(read, function(read, *args, **kwargs))
        if not added:
            return after.row_columns, after.metadata, None
        source = put_arrays({name: column.numpy() for name, column in added.items()})
        dtypes = {name: column.dtype for name, column in added.items()}
        return after.row_columns, after.metadata, Layer.of([Piece(source, after.row_offsets.numpy())], dtypes)


class RayPlane(DataPlane):
    """The object store, and a worker on each node. May be used from several threads."""

    def __init__(
        self, session: RaySession, placement: PlacementConfig, *, num_threads: int, together: Together = "row"
    ) -> None:
        """Start the workers and return at once; who needs them first waits for them. `together`: within what unit rows that
        ranks are given share computation, which is looked for where the tokens are."""
        self._together = together
        env, secrets = session.runtime_env(num_threads), forwarded_environment(secret=True)
        self._nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
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
            for rank, node in enumerate(self._nodes)
        ]
        self._group = ActorGroup(placement, "data", actors)
        self._starting = self._group.of(DataWorker).begin(DataWorker.identify, "start")
        self._is_started = False
        self._turns = itertools.count()
        self._spilled = 0

    def hold(self, rollouts: RolloutBatch) -> RolloutBatch:
        """Put the arrays of rollouts into the store, in pieces of whole prompts. Those that are there stay as they are, and
        so do those that arrays of plain types cannot hold: with images, or with messages that JSON does not know."""
        if placed(rollouts) is not None or not is_storable(rollouts):
            return rollouts
        size, found = rollouts.n_samples_per_prompt, list[Trajectory]()
        lengths = [sum(turn.num_response_tokens for turn in each.turns) for each in rollouts.trajectories]
        for start, stop in _spans(np.cumsum([0, *lengths]), range(size, len(lengths) + 1, size)):
            try:
                arrays = arrays_of(rollouts.trajectories[start:stop])
            except TypeError:
                return rollouts
            found += trajectories_of(put_arrays(arrays), facts_in(arrays))
        return replace(rollouts, trajectories=tuple(found))

    def make_rows(
        self,
        function: Callable[Concatenate[RolloutBatch, P], TrainingInputBatch],
        rollouts: RolloutBatch,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> TrainingInputBatch:
        """Have a worker do it, or do it here where the arrays are here, and put the token columns into the store."""
        there = placed(rollouts)
        if there is None:
            return put_batch(function(rollouts, *args, **kwargs), self._together)
        return self._worker().call(DataWorker.make_rows, "data", function, there, args, kwargs, self._together)[0]

    def add_columns(
        self,
        function: Callable[Concatenate[TrainingInputBatch, P], TrainingInputBatch],
        batch: TrainingInputBatch,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> TrainingInputBatch:
        """Have a worker do it, and keep the new columns of tokens."""
        sent = _without_images(batch)
        rows, metadata, layer = self._worker().call(DataWorker.add_columns, "data", function, sent, args, kwargs)[0]
        found = replace(batch, row_columns=rows, metadata=replace(metadata, images=batch.metadata.images))
        return found if layer is None else found.with_layer(layer)

    def ask(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Have a worker do it."""
        given = _sent(args, kwargs)
        if given is None:
            return DataWorker.ask_here(function, args, kwargs)
        found = self._worker().call(DataWorker.ask, "data", cast(Callable[..., Any], function), given[0], given[1])
        return cast(R, found[0])

    def shares(self, rollouts: RolloutBatch) -> Mapping[str, Sequence[int]]:
        """Return the prompts by the node where the first trajectory's arrays were put. Where that is not known, or has no
        worker, it is the node of the worker whose turn it is."""
        if len(self._nodes) == 1 or not rollouts.prompts or (there := placed(rollouts)) is None:
            return super().shares(rollouts)
        turn = self._nodes[next(self._turns) % len(self._nodes)]
        nodes = [node if (node := getattr(each, "node", "")) in self._nodes else turn for each in there.sources]
        found: dict[str, list[int]] = {}
        for number, source in enumerate(there.source_of[:: rollouts.n_samples_per_prompt].tolist()):
            found.setdefault(nodes[source], []).append(number)
        return found

    def save(self, function: Callable[..., R], calls: Mapping[str, tuple[Any, ...]]) -> list[R]:
        """Have the workers of the nodes do it, each on the thread that writes."""
        given = {node: sent[0] for node, args in calls.items() if (sent := _sent(args, {})) is not None}
        if len(given) < len(calls):
            return super().save(function, calls)
        pending = [
            self._worker(near=node, saves=True).begin(DataWorker.save, "data", function, args)
            for node, args in given.items()
        ]
        pending[0].wait(*pending[1:])
        return [cast(R, each.wait()[0]) for each in pending]

    def room_warning(self, batch_bytes: int) -> str:
        """Return a line where the stores of all nodes do not hold the rollouts and rows of a step, of so many bytes; empty
        where they do."""
        room = int(ray.cluster_resources().get("object_store_memory", 0))
        if batch_bytes <= room:
            return ""
        return (
            f"a step's rollouts and rows may take {byte_size(batch_bytes)}, and Ray's object store has {byte_size(room)}: "
            "the rest goes to the disk and back. Give nodes more (docker run --shm-size, ray start --object-store-memory), "
            "or lower trainer.train_batch_size or generator.max_context_length"
        )

    def take_metrics(self) -> dict[str, float]:
        """Return what went to the disk since the last time, if anything did; nothing where Ray does not say."""
        try:
            there = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address))
        except Exception as error:  # of any kind: whatever is wrong with Ray ends the next call, by its name
            logger.info("the object store does not say what it holds: %s", " ".join(str(error).split())[:300])
            return {}
        before, self._spilled = self._spilled, int(there.store_stats.spilled_bytes_total)
        return {"memory/store_spilled_gib": (self._spilled - before) / 2**30} if self._spilled > before else {}

    def close(self) -> None:
        """End the workers, and with them what they have put."""
        self._group.close()

    def _worker(self, *, near: str = "", saves: bool = False) -> Endpoint[DataWorker]:
        """Return the worker of the node `near`, or the one whose turn it is."""
        actors = self._group.actors
        if not self._is_started:
            for actor, identity in zip(actors, self._starting.wait()):
                actor.found_at(identity)
            self._is_started = True
        actor = actors[self._nodes.index(near) if near else next(self._turns) % len(actors)]
        return self._group.of(DataWorker, [actor], concurrency_group=SAVES if saves else "")


def put_batch(batch: TrainingInputBatch, together: Together) -> TrainingInputBatch:
    """Return a batch whose arrays are in the store, in pieces of whole prompts, and what its rows share within a unit of
    `together`; as it is where its arrays are there."""
    if isinstance(batch.token_columns, ReferencedColumns):
        return batch
    sharing = None
    if together != "row" and "position_ids" not in batch:
        merges = together == "trajectory"
        facts = facts_of(batch, layout="packed" if merges else "prefix_shared", merge_turns=merges)
        sharing = RowSharing(facts=facts, merge_turns=merges, rows=np.arange(batch.num_rows))
    spans = _spans(batch.row_offsets.numpy(), batch.metadata.prompt_end_indices or range(1, batch.num_rows + 1))
    pieces = [_put_rows(batch, start, stop) for start, stop in spans]
    dtypes = {name: column.dtype for name, column in batch.token_columns.items()}
    return by_reference(Layer.of(pieces, dtypes), batch, sharing)


def _read(given: Any) -> Any:
    """Return rows and rollouts with their arrays mapped, and anything else as it is."""
    return given.here() if isinstance(given, TrainingInputBatch | PlacedRollouts) else given


def _sent(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return arguments as they travel; None where arrays of some rollouts are here, so that what reads them stays, too."""
    given = [*args, *kwargs.values()]
    travels = [placed(each) if isinstance(each, RolloutBatch) else each for each in given]
    if any(there is None and each is not None for there, each in zip(travels, given)):
        return None
    travels = [_without_images(each) if isinstance(each, TrainingInputBatch) else each for each in travels]
    return tuple(travels[: len(args)]), dict(zip(kwargs, travels[len(args) :]))


def _without_images(batch: TrainingInputBatch) -> TrainingInputBatch:
    """Return the rows without their pixels, which only models read."""
    return replace(batch, metadata=replace(batch.metadata, images=())) if batch.metadata.images else batch


def _put_rows(batch: TrainingInputBatch, start: int, stop: int) -> Piece:
    offsets = batch.row_offsets[start : stop + 1].numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    arrays = {name: column[first:last].numpy() for name, column in batch.token_columns.items()}
    return Piece(put_arrays(arrays), offsets - first)


def _spans(bounds: NDArray[np.int64], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Return `[start, stop)` rows of each piece, which ends at one of `ends`; `bounds` are the tokens before each row."""
    spans, start = [], 0
    for end, following in zip(ends, (*ends[1:], None)):
        if following is None or bounds[following] - bounds[start] > _PIECE_TOKENS:
            spans.append((start, end))
            start = end
    return spans
