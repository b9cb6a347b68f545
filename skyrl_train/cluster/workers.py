"""The actors of one role, called together, and what a weight sync asks of them."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from torch import Tensor

from skyrl_train.cluster.calls import RemoteActor, Watch, kill
from skyrl_train.distributed.process_group import Rendezvous
from skyrl_train.weight_sync.buckets import Bucket, bucket_names, size_of, unpack_bucket

if TYPE_CHECKING:
    from skyrl_train.config.schema import PlacementConfig
    from skyrl_train.weight_sync.sender import ParameterFact


class WorkerGroup:
    """The ranks of the policy, of the reference or of the critic.

    Calls may come from several threads: each reaches all ranks before the next does, so that ranks meet in collectives.
    """

    def __init__(self, placement: PlacementConfig, role: str, actors: Sequence[RemoteActor]) -> None:
        self.role = role
        self.actors = tuple(actors)
        self._placement = placement
        self._in_order = threading.Lock()

    def call(
        self, method: str, phase: str, *, each: Sequence[Any] | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        """`method` on every actor, with `args`, or with `each[rank]`; the answers by rank.

        Raises DeadlineError, ActorError, or what an actor raised on purpose.
        """
        arguments = [args] * len(self.actors) if each is None else [(one,) for one in each]
        return self.wait(method, phase, self._submit(method, arguments))

    def learner(self, method: str, phase: str, *args: Any) -> list[Any]:
        """`method` of every rank's `Learner`; the answers by rank. Raises as `call` does."""
        return self.wait(method, phase, self._submit("learner", [(method, *args)] * len(self.actors)))

    def begin(self, method: str, *args: Any) -> list[Any]:
        """Has every rank's `WeightSender` do `method`; references to the answers, for `wait`."""
        return self._submit("weights", [(method, *args)] * len(self.actors))

    def onload(self, optimizer: bool) -> None:
        """The model back on its devices, with its optimizer's state where asked for."""
        self.call("onload", "score", args=(optimizer,))

    def offload(self) -> None:
        """The model's memory to the hosts."""
        self.call("offload", "generate")

    def wait(self, method: str, phase: str, refs: Sequence[Any]) -> list[Any]:
        """The answers to calls that are under way, one on each actor."""
        return watch(self._placement, phase, method).wait(self.actors, refs)

    def close(self) -> None:
        """Ends the actors at once: they hold nothing that is not saved."""
        kill(self.actors)

    def _submit(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._in_order:
            return [getattr(actor.handle, method).remote(*given) for actor, given in zip(self.actors, arguments)]


def watch(placement: PlacementConfig, phase: str, what: str) -> Watch:
    """With the deadlines of a start (phases `start` and `restart`) or of a call."""
    starting = phase in ("start", "restart")
    return Watch(
        phase=phase,
        what=what,
        timeout_s=placement.start_timeout_s if starting else placement.call_timeout_s,
        silence_timeout_s=placement.start_timeout_s if starting else placement.silence_timeout_s,
    )


class WorkerWeights:
    """The current weights of a group: an iterator over whole tensors, which pass through this process.

    A transport that takes buckets asks the group for those instead: they do not.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self._iterator: Iterator[tuple[str, Tensor]] | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        if self._iterator is None:
            self._iterator = self._tensors()
        return next(self._iterator)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for ref in carried_buckets(self.group, planned_buckets(self.group)):
            yield from unpack_bucket(ray.get(ref).unwrap())


def planned_buckets(group: WorkerGroup, *, adapter_only: bool = False, dtype: str = "") -> list[Bucket]:
    """All weights of the group, or its adapter, in the model's order, in buckets that say what they will hold.

    `dtype`: what float32 matrices are rounded to on their way; empty leaves them. Vectors travel as they are: they are
    few bytes, and engines keep some of them in float32 whatever their matrices are in.
    """
    method = "describe_adapter" if adapter_only else "describe"
    facts: dict[str, ParameterFact] = {fact.name: fact for fact in group.wait(method, "sync", group.begin(method))[0]}
    types = {
        name: dtype if dtype and not adapter_only and fact.dtype == "float32" and len(fact.shape) > 1 else fact.dtype
        for name, fact in facts.items()
    }
    sizes = [(name, size_of(types[name], fact.shape)) for name, fact in facts.items()]
    return [
        Bucket(
            names=names,
            dtypes=tuple(types[name] for name in names),
            shapes=tuple(facts[name].shape for name in names),
        )
        for names in bucket_names(sizes)
    ]


def carried_buckets(group: WorkerGroup, buckets: Sequence[Bucket]) -> Iterator[Any]:
    """References to the answers of rank 0, each a bucket that carries its bytes, in the object store. While the caller
    uses one the ranks gather the next."""
    pending = group.begin("carry", buckets[0]) if buckets else []
    for index in range(len(buckets)):
        group.wait("carry", "sync", pending)
        ref = pending[0]
        if index + 1 < len(buckets):
            pending = group.begin("carry", buckets[index + 1])
        yield ref


@dataclass(frozen=True, kw_only=True)
class MeetingPoint:
    """Where processes of this run find each other."""

    init_method: str
    timeout_s: float

    def rendezvous(self, rank: int, num_ranks: int) -> Rendezvous:
        """Of one of them."""
        return Rendezvous(rank=rank, num_ranks=num_ranks, init_method=self.init_method, timeout_s=self.timeout_s)


def meeting_point(first: RemoteActor, actors: Sequence[RemoteActor], *, folder: Path, timeout_s: float) -> MeetingPoint:
    """A file in `folder` where all `actors` are on one node, else a port of the node of `first`, which is a learner's
    rank 0. Raises what asking for the port raises."""
    nodes = {actor.identity.node for actor in actors if actor.identity is not None}
    if len(nodes) == 1:
        return MeetingPoint(init_method=f"file://{folder}/skyrl-ranks-{uuid.uuid4().hex}", timeout_s=timeout_s)
    asking = Watch(phase="start", what="free_port", timeout_s=timeout_s, silence_timeout_s=timeout_s)
    port = asking.wait([first], [first.handle.free_port.remote()])[0]
    node = first.identity.node if first.identity else ""
    return MeetingPoint(init_method=f"tcp://{node}:{port}", timeout_s=timeout_s)
