"""`RayLearner`: a `Learner` whose ranks are Ray actors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from skyrl_train.cluster.calls import HEALTH, Answer, RemoteActor
from skyrl_train.cluster.dispatch import Shipped, pack
from skyrl_train.cluster.learner_worker import LearnerWorker
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.session import RaySession, forwarded_environment
from skyrl_train.cluster.workers import (
    WorkerGroup,
    WorkerWeights,
    carried_buckets,
    meeting_point,
    planned_buckets,
)
from skyrl_train.config.batch_rules import data_parallel_size
from skyrl_train.config.learners import LearnerSettings
from skyrl_train.config.placement import PlacementConfig
from skyrl_train.distributed.process_group import Rendezvous
from skyrl_train.errors import ModelError, SkyrlTrainError
from skyrl_train.learner.turns import DeviceTurns
from skyrl_train.telemetry.metrics import StepMetrics, merge_metrics
from skyrl_train.weight_sync.buckets import pack_bucket

if TYPE_CHECKING:
    from skyrl_train.learner.sizing import SizingLimits, SizingReport


class RayLearner:
    """Implements `Learner`. Mini-batches arrive closed: their denominators travel with every rank's rows."""

    def __init__(
        self,
        group: WorkerGroup,
        *,
        turns: DeviceTurns | None = None,
        together: Together = "row",
        sequence_parallel_size: int = 1,
    ) -> None:
        """`turns`: where others share the devices. Rows within one `together` unit share computation on a rank, and go to
        one where that is level. So many consecutive ranks compute the same rows together."""
        self.group = group
        self._together = together
        self._num_shares = data_parallel_size(len(group.actors), sequence_parallel_size)
        self._turns = turns

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        """`[num_tokens]` in the batch's order."""
        return self._scores("forward", batch)

    def forward_base(self, batch: TrainingInputBatch) -> Tensor:
        """As `forward`, with the policy's adapter off."""
        return self._scores("forward_base", batch)

    def forward_entropy(self, batch: TrainingInputBatch) -> Tensor:
        """Entropies in place of log-probabilities."""
        return self._scores("forward_entropy", batch)

    def forward_sum_pi_squared(self, batch: TrainingInputBatch) -> Tensor:
        """Sums of squared probabilities in place of log-probabilities."""
        return self._scores("forward_sum_pi_squared", batch)

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:
        """Each rank adds the gradient of its rows; the sums meet in `optim_step`, or in the backward pass."""
        self._take_turn(optimizer=True, trains=True)
        staged = stage(mini_batch.batch, self._num_shares, together=self._together)
        shares = [pack(shard, mini_batch.denominators) for shard in staged.shards]
        return merge_metrics(self._on_shares("forward_backward", "update", shares))

    def optim_step(self) -> StepMetrics:
        """One step on all ranks, or on none: raises NonFiniteError before any weight moves."""
        metrics: StepMetrics = self.group.learner("optim_step", "update")[0]
        return metrics

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters in the model's order, tied ones once."""
        return WorkerWeights(self.group)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Those of another group, bucket by bucket through the object store, or of this process."""
        refs: Iterator[Any]
        if isinstance(weights, WorkerWeights):
            self._take_turn(weights.group.role)
            refs = carried_buckets(weights.group, planned_buckets(weights.group))
        else:
            self._take_turn()
            refs = (ray.put(Answer(value=pack_bucket([named]))) for named in weights)
        count = sum(self.group.call("take_bucket", "update", args=(ref,))[0] for ref in refs)
        expected = sum(len(bucket.names) for bucket in planned_buckets(self.group))
        if count != expected:
            raise ModelError(f"a model of {expected} parameters got {count}")

    def size_micro_batches(
        self, limits: SizingLimits, stored: Mapping[str, tuple[SizingReport, ...]]
    ) -> list[SizingReport]:
        """Finds what fits on every rank; the ranks' reports. `stored`: those of an earlier run, by model."""
        self._take_turn(optimizer=True, trains=True)
        return self.group.call("size_micro_batches", "size", args=(limits, stored.get(self.group.role, ())))

    def save(self, folder: Path) -> None:
        """Written by the ranks: the folder must be on a file system that all nodes share."""
        self._take_turn(optimizer=True)
        self.group.learner("save", "checkpoint", folder.absolute())

    def load(self, folder: Path) -> None:
        """Also of a checkpoint that another number of ranks wrote."""
        self._take_turn(optimizer=True, trains=True)
        self.group.learner("load", "load", folder.absolute())

    def export_hf(self, folder: Path) -> None:
        """Gathered and written by rank 0."""
        self._take_turn()
        self.group.learner("export_hf", "export", folder.absolute())

    def close(self) -> None:
        """Ends the workers."""
        self.group.close()

    def _scores(self, method: str, batch: TrainingInputBatch) -> Tensor:
        self._take_turn()
        staged = stage(batch, self._num_shares, together=self._together)
        results = self._on_shares(method, "score", [pack(shard) for shard in staged.shards])
        return staged.collect([torch.from_numpy(np.array(result)) for result in results])

    def _on_shares(self, method: str, phase: str, shares: Sequence[Shipped]) -> list[Any]:
        """`method` on every rank with its share; the answers by share, as ranks that compute together answer alike."""
        each, _ = divmod(len(self.group.actors), len(shares))
        answers = self.group.call(method, phase, each=[ref for ref in map(ray.put, shares) for _ in range(each)])
        return answers[::each]

    def _take_turn(self, *others: str, optimizer: bool = False, trains: bool = False) -> None:
        if self._turns is not None:
            self._turns.models(self.group.role, *others, optimizer=optimizer, trains=trains)


def start_learner(
    settings: LearnerSettings,
    placement: PlacementConfig,
    session: RaySession,
    slots: Sequence[Slot],
    *,
    turns: DeviceTurns | None = None,
) -> Callable[[], RayLearner]:
    """Starts one actor per slot, and returns at once; what is returned waits until all ranks have loaded the model.

    Raises DeadlineError naming the rank that does not come up, ActorError, or what loading raises.
    """
    role = settings.role
    env = session.runtime_env(settings.platform.num_threads)
    secrets = forwarded_environment(secret=True)
    actors = [
        RemoteActor(
            handle=ray.remote(concurrency_groups={HEALTH: 1})(LearnerWorker)
            .options(
                name=f"{role}-{rank}",
                max_restarts=0,
                runtime_env=env,
                **slot.options,
            )
            .remote(settings, secrets=secrets),
            role=f"{role} worker",
            rank=rank,
            log_folder=session.log_folder,
        )
        for rank, slot in enumerate(slots)
    ]
    group = WorkerGroup(placement, role, actors)

    def wait() -> RayLearner:
        try:
            for actor, identity in zip(actors, group.call("identify", "start")):
                actor.identity = identity
            layout = group.call("start", "start", each=_rendezvous(group, session, settings.collective_timeout_s))[0]
        except BaseException:
            with suppress(SkyrlTrainError):
                group.close()
            raise
        together = computed_together(layout, merge_turns=settings.merge_turns)
        if turns is not None:
            turns.add(group)
        return RayLearner(
            group,
            turns=turns,
            together=together,
            sequence_parallel_size=settings.strategy.sequence_parallel_size,
        )

    return wait


def _rendezvous(group: WorkerGroup, session: RaySession, timeout_s: float) -> list[Rendezvous]:
    # A file in the session's folder is removed with it; a cluster that was joined has none on this machine.
    folder = session.folder or Path(tempfile.gettempdir())
    place = meeting_point(group.actors[0], group.actors, folder=folder, timeout_s=timeout_s)
    return [place.rendezvous(rank, len(group.actors)) for rank in range(len(group.actors))]
