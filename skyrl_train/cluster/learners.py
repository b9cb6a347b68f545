"""`RayLearner`: a `Learner` whose ranks are Ray actors."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
from torch import Tensor

from skyrl_train.batch.minibatch import MiniBatch
from skyrl_train.batch.sharing import Together, computed_together
from skyrl_train.batch.stage import stage
from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.cluster.calls import HEALTH, Answer, RemoteActor, Watch, kill
from skyrl_train.cluster.dispatch import Shipped, pack
from skyrl_train.cluster.learner_worker import LearnerWorker, Role
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.session import RaySession
from skyrl_train.config.sequence_parallel import data_parallel_size
from skyrl_train.distributed.process_group import Rendezvous
from skyrl_train.errors import ModelError, SkyrlTrainError
from skyrl_train.telemetry.metrics import StepMetrics, merge_metrics
from skyrl_train.weight_sync.buckets import bucket_names, pack_bucket, unpack_bucket

if TYPE_CHECKING:
    from skyrl_train.batch.plan import BatchPlan
    from skyrl_train.config.schema import Config


class WorkerGroup:
    """The actors of one role, called together."""

    def __init__(self, config: Config, actors: Sequence[RemoteActor]) -> None:
        self.actors = tuple(actors)
        self._placement = config.placement

    def call(
        self, method: str, phase: str, *, each: Sequence[Any] | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        """`method` on every actor, with `args`, or with `each[rank]`; the answers by rank.

        Raises DeadlineError, ActorError, or what an actor raised on purpose.
        """
        refs = [
            getattr(actor.handle, method).remote(*(args if each is None else (each[rank],)))
            for rank, actor in enumerate(self.actors)
        ]
        return self.wait(method, phase, refs)

    def wait(self, method: str, phase: str, refs: Sequence[Any]) -> list[Any]:
        """The answers to calls that are under way, one on each actor."""
        starting = phase == "start"
        watch = Watch(
            phase=phase,
            what=method,
            timeout_s=self._placement.start_timeout_s if starting else self._placement.call_timeout_s,
            silence_timeout_s=self._placement.start_timeout_s if starting else self._placement.silence_timeout_s,
        )
        return watch.wait(self.actors, refs)

    def close(self) -> None:
        """Ends the actors at once: they hold nothing that is not saved."""
        kill(self.actors)


class WorkerWeights:
    """The current weights of a group: an iterator over whole tensors, which pass through this process.

    A transport that takes buckets asks for those instead: they stay in the object store.
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

    def buckets(self) -> list[tuple[tuple[str, ...], int]]:
        """(names, bytes) of each bucket, in the model's order."""
        facts = self.group.call("describe", "sync")[0]
        sizes = {name: _num_bytes(dtype, shape) for name, dtype, shape in facts}
        return [(names, sum(sizes[name] for name in names)) for names in bucket_names(list(sizes.items()))]

    def begin_bucket(self, names: tuple[str, ...]) -> list[Any]:
        """Has all ranks gather these parameters."""
        return [actor.handle.bucket.remote(names) for actor in self.group.actors]

    def finish_bucket(self, refs: list[Any]) -> Any:
        """Waits for the gathering; the reference to rank 0's answer, a `Bucket` in an `Answer`."""
        self.group.wait("bucket", "sync", refs)
        return refs[0]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for names, _ in self.buckets():
            yield from unpack_bucket(ray.get(self.finish_bucket(self.begin_bucket(names))).unwrap())


class RayLearner:
    """Implements `Learner`. Mini-batches arrive closed: their denominators travel with every rank's rows."""

    def __init__(
        self,
        group: WorkerGroup,
        *,
        before_compute: Callable[[], None] = lambda: None,
        together: Together = "row",
        sequence_parallel_size: int = 1,
    ) -> None:
        """`before_compute` is called before a forward, for whoever shares the devices to make room. Rows within one
        `together` unit share computation on a rank, and go to one where that is level. So many consecutive ranks compute
        the same rows together."""
        self.group = group
        self._together = together
        self._num_shares = data_parallel_size(len(group.actors), sequence_parallel_size)
        self._before_compute = before_compute

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        """`[num_tokens]` in the batch's order."""
        self._before_compute()
        staged = stage(batch, self._num_shares, together=self._together)
        results = self._on_shares("forward", "score", [pack(shard) for shard in staged.shards])
        return staged.collect([torch.from_numpy(np.array(result)) for result in results])

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:
        """Each rank adds the gradient of its rows; the sums meet in `optim_step`, or in the backward pass."""
        self._before_compute()
        staged = stage(mini_batch.batch, self._num_shares, together=self._together)
        shares = [pack(shard, mini_batch.denominators) for shard in staged.shards]
        return merge_metrics(self._on_shares("forward_backward", "update", shares))

    def optim_step(self) -> StepMetrics:
        """One step on all ranks, or on none: raises NonFiniteError before any weight moves."""
        metrics: StepMetrics = self.group.call("optim_step", "update")[0]
        return metrics

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters in the model's order, tied ones once."""
        return WorkerWeights(self.group)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Those of another group, bucket by bucket through the object store, or of this process."""
        if isinstance(weights, WorkerWeights):
            refs = (weights.finish_bucket(weights.begin_bucket(names)) for names, _ in weights.buckets())
        else:
            refs = (ray.put(Answer(value=pack_bucket([named]))) for named in weights)
        count = sum(self.group.call("take_bucket", "update", args=(ref,))[0] for ref in refs)
        expected = len(self.group.call("describe", "update")[0])
        if count != expected:
            raise ModelError(f"a model of {expected} parameters got {count}")

    def save(self, folder: Path) -> None:
        """Written by the ranks: the folder must be on a file system that all nodes share."""
        self.group.call("save", "checkpoint", args=(folder.absolute(),))

    def load(self, folder: Path) -> None:
        """Also of a checkpoint that another number of ranks wrote."""
        self.group.call("load", "load", args=(folder.absolute(),))

    def export_hf(self, folder: Path) -> None:
        """Gathered and written by rank 0."""
        self.group.call("export_hf", "export", args=(folder.absolute(),))

    def close(self) -> None:
        """Ends the workers."""
        self.group.close()

    def _on_shares(self, method: str, phase: str, shares: Sequence[Shipped]) -> list[Any]:
        """`method` on every rank with its share; the answers by share, as ranks that compute together answer alike."""
        each, _ = divmod(len(self.group.actors), len(shares))
        answers = self.group.call(method, phase, each=[ref for ref in map(ray.put, shares) for _ in range(each)])
        return answers[::each]


def start_learner(
    config: Config,
    plan: BatchPlan,
    session: RaySession,
    slots: Sequence[Slot],
    *,
    role: Role,
    before_compute: Callable[[], None] = lambda: None,
) -> Callable[[], RayLearner]:
    """Starts one actor per slot, and returns at once; what is returned waits until all ranks have loaded the model.

    Raises DeadlineError naming the rank that does not come up, ActorError, or what loading raises.
    """
    env = session.runtime_env(config.platform.num_threads)
    actors = [
        RemoteActor(
            handle=ray.remote(concurrency_groups={HEALTH: 1})(LearnerWorker)
            .options(
                name=f"{role}-{rank}",
                max_restarts=0,
                runtime_env=env,
                **slot.options,
            )
            .remote(config, plan, role),
            role=f"{role} worker",
            rank=rank,
            log_folder=session.log_folder,
        )
        for rank, slot in enumerate(slots)
    ]
    group = WorkerGroup(config, actors)

    def wait() -> RayLearner:
        try:
            for actor, identity in zip(actors, group.call("identify", "start")):
                actor.identity = identity
            layout = group.call("start", "start", each=_rendezvous(config, group, session))[0]
        except BaseException:
            with suppress(SkyrlTrainError):
                group.close()
            raise
        merge_turns = config.generator.merge_stepwise == "auto"
        together = computed_together(layout, merge_turns=merge_turns)
        return RayLearner(
            group,
            before_compute=before_compute,
            together=together,
            sequence_parallel_size=config.strategy.sequence_parallel_size,
        )

    return wait


def _rendezvous(config: Config, group: WorkerGroup, session: RaySession) -> list[Rendezvous]:
    nodes = {actor.identity.node for actor in group.actors if actor.identity is not None}
    if len(nodes) == 1:
        # In the session's folder, which is removed with it; a cluster that was joined has none on this machine.
        init_method = f"file://{session.folder or tempfile.gettempdir()}/skyrl-ranks-{uuid.uuid4().hex}"
    else:
        port = group.call("free_port", "start")[0]
        first = group.actors[0].identity
        init_method = f"tcp://{first.node if first else ''}:{port}"
    return [
        Rendezvous(
            rank=rank,
            num_ranks=len(group.actors),
            init_method=init_method,
            timeout_s=config.placement.call_timeout_s,
        )
        for rank in range(len(group.actors))
    ]


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * torch.empty(0, dtype=getattr(torch, dtype)).element_size()
