"""`RayLearner`: a `Learner` whose ranks are Ray actors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import ray
import torch
from torch import Tensor

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.layouts import CostModel
from skyrl_train.batch.plane import Layer
from skyrl_train.batch.steps import MiniBatch, Together, computed_together, stage
from skyrl_train.cluster.calls import HEALTH, SAVES, RemoteActor
from skyrl_train.cluster.endpoints import ActorGroup
from skyrl_train.cluster.images import SentImages
from skyrl_train.cluster.learner_worker import LearnerRank, LearnerWorker, ToScore, pack
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.session import RaySession, forwarded_environment
from skyrl_train.cluster.stored import put_batch
from skyrl_train.config.derived import LearnerSettings
from skyrl_train.config.models import PlacementConfig
from skyrl_train.config.rules import data_parallel_size
from skyrl_train.endpoints import Endpoint, Phase, Rendezvous, meeting_point
from skyrl_train.errors import ConfigError, ModelError, SaveError, SkyrlTrainError, Violation
from skyrl_train.interfaces import HeldState, ScoreMethod
from skyrl_train.system.files import FileSums
from skyrl_train.telemetry import StepMetrics, merge_metrics
from skyrl_train.weight_sync import DeviceSharing
from skyrl_train.weights import ModelWeights, WeightSender

if TYPE_CHECKING:
    from skyrl_train.learner.memory import SizingLimits, SizingReport

R = TypeVar("R")
S = TypeVar("S")


class RayLearner:
    """Implements `Learner`. Mini-batches arrive closed: their denominators travel with every rank's rows."""

    def __init__(
        self,
        group: ActorGroup,
        *,
        sharing: DeviceSharing,
        together: Together = "row",
        cost: CostModel | None = None,
        ranks_per_share: int = 1,
        images: SentImages | None = None,
    ) -> None:
        """
        Args:
            group: The actors of the ranks, which have loaded the model.
            sharing: Who else is on the devices, and when.
            together: Rows within one such unit share computation on a rank, and go to one where that is level.
            cost: What rows cost, by which ranks get equal work.
            ranks_per_share: So many consecutive ranks compute the same rows together.
            images: What was sent in this session, also to others.
        """
        self.group = group
        self._ranks = group.of(LearnerRank)
        self._together = together
        self._cost = cost
        self._images = images or SentImages()
        self._num_shares = data_parallel_size(len(group.actors), ranks_per_share)
        self._on_devices = partial(sharing.models, group.role)
        """Has the model brought to its devices, with its optimizer where asked for."""

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        """Return log-probabilities or values, `[num_tokens]` in the batch's order."""
        return self._scores("forward", batch)

    def forward_base(self, batch: TrainingInputBatch) -> Tensor:
        """Return what `forward` does with the policy's adapter off."""
        return self._scores("forward_base", batch)

    def forward_with_entropy(self, batch: TrainingInputBatch) -> Tensor:
        """Return log-probabilities and entropies, `[num_tokens, 2]`."""
        return self._scores("forward_with_entropy", batch, "entropies")

    def forward_sum_pi_squared(self, batch: TrainingInputBatch) -> Tensor:
        """Return sums of squared probabilities in place of log-probabilities."""
        return self._scores("forward_sum_pi_squared", batch)

    def hold_scores(self, batch: TrainingInputBatch, names: tuple[str, ...], method: ScoreMethod) -> Layer:
        """Have each rank score its rows and keep the numbers; see `HoldsScores`."""
        self._on_devices()
        staged = stage(batch, self._num_shares, cost=self._cost, together=self._together)
        shares = [ToScore(rows=pack(shard, self._images), method=method, names=names) for shard in staged.shards]
        pieces = _on_shares(self._ranks, LearnerRank.hold_scores, "score", shares)
        dtypes = dict.fromkeys(filter(None, names), torch.float32)
        found = Layer.of(pieces, dtypes, staged.order.numpy())
        return found.take(np.arange(batch.num_rows)) if staged.num_dummy_rows else found

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:
        """Have each rank add the gradient of its rows; the sums meet in `optim_step`, or in the backward pass."""
        self._on_devices(optimizer=True, trains=True)
        rows = put_batch(mini_batch.batch, self._together)
        staged = stage(rows, self._num_shares, cost=self._cost, together=self._together)
        shares = [pack(shard, self._images, mini_batch.denominators) for shard in staged.shards]
        return merge_metrics(_on_shares(self._ranks, LearnerRank.forward_backward, "update", shares))

    def optim_step(self) -> StepMetrics:
        """Take one step on all ranks, or on none: raises NonFiniteError before any weight moves."""
        return self._ranks.call(LearnerRank.optim_step, "update")[0]

    def weights(self) -> ModelWeights:
        """Return the weights, which the ranks hand over when they are read."""
        return ModelWeights(self.group.of(WeightSender), role=self.group.role, scores=self.forward)

    def load_weights(self, weights: ModelWeights) -> None:
        """Take those of another model, bucket by bucket. Raises ModelError where they do not fit."""
        others = () if weights.scores is None or weights.role == self.group.role else (weights.role,)
        self._on_devices(*others)
        count = 0
        for pending in weights.handed_over(weights.buckets()):
            count += self._ranks.call(LearnerRank.take_bucket, "update", pending.passed_on())[0]
        expected = sum(len(bucket.names) for bucket in self.weights().buckets())
        if count != expected:
            raise ModelError(f"a model of {expected} parameters got {count}")

    def size_micro_batches(
        self, limits: SizingLimits, stored: Mapping[str, tuple[SizingReport, ...]]
    ) -> list[SizingReport]:
        """Find what fits on every rank, and return the ranks' reports. `stored`: those of an earlier run, by model."""
        self._on_devices(optimizer=True, trains=True)
        return self._ranks.call(LearnerRank.size_micro_batches, "size", limits, stored.get(self.group.role, ()))

    def hold_state(self, *, copies: bool) -> HeldState:
        """Have each rank hold its part, and write and hash it: into a folder on a file system that all nodes share."""
        self._on_devices(optimizer=True)
        are_copied = all(self._ranks.call(LearnerRank.hold_state, "checkpoint", copies))
        ranks = self.group.of(LearnerRank, concurrency_group=SAVES) if are_copied else self._ranks

        def write(folder: Path) -> FileSums:
            # Each answers, whatever becomes of it: nobody writes any more when this returns.
            answers = ranks.call(LearnerRank.write_state, "checkpoint", folder.absolute(), copies)
            for answer in answers:
                if isinstance(answer, SaveError):
                    raise answer
            return {
                name: each for answer in answers if not isinstance(answer, SaveError) for name, each in answer.items()
            }

        return HeldState(is_copied=are_copied, write=write)

    def load(self, folder: Path) -> None:
        """Load a checkpoint, also one that another number of ranks wrote."""
        self._on_devices(optimizer=True, trains=True)
        self._ranks.call(LearnerRank.load, "load", folder.absolute())

    def export_hf(self, folder: Path) -> None:
        """Have rank 0 gather and write the model."""
        self._on_devices()
        self._ranks.call(LearnerRank.export_hf, "export", folder.absolute())

    def close(self) -> None:
        """End the processes of all ranks."""
        self.group.close()

    def _scores(self, method: ScoreMethod, batch: TrainingInputBatch, *more: str) -> Tensor:
        """Return the numbers that the ranks keep, `[num_tokens]`, or `[num_tokens, 2]` with one `more`."""
        held, names = put_batch(batch, self._together), ("old_logprobs", *more)
        scored = held.with_layer(self.hold_scores(held, names, method))
        columns = [scored[name] for name in names]
        return torch.stack(columns, dim=1) if more else columns[0]


def _on_shares(
    ranks: Endpoint[LearnerRank], method: Callable[[LearnerRank, S], R], phase: Phase, shares: Sequence[S]
) -> list[R]:
    """Have every rank do `method` with its share; the results by share, as ranks that compute together answer alike."""
    each = len(ranks.nodes) // len(shares)
    return ranks.begin_each(method, phase, [share for share in shares for _ in range(each)]).wait()[::each]


def start_learner(
    settings: LearnerSettings,
    placement: PlacementConfig,
    session: RaySession,
    slots: Sequence[Slot],
    *,
    sharing: DeviceSharing | None = None,
    output_dir: Path | None = None,
) -> Callable[[], RayLearner]:
    """Start one actor per slot, and return at once; what is returned waits until all ranks have loaded the model.

    Raises DeadlineError naming the rank that does not come up, ConfigError where a rank's node does not have the run's
    folder `output_dir`, ActorError, or what loading raises.
    """
    role, shared = settings.role, sharing or DeviceSharing()
    env = session.runtime_env(settings.platform.num_threads)
    secrets = forwarded_environment(secret=True)
    actors = [
        RemoteActor(
            handle=ray.remote(concurrency_groups={HEALTH: 1, SAVES: 1})(LearnerWorker)
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
    group = ActorGroup(placement, role, actors)
    workers = group.of(LearnerWorker)

    def wait() -> RayLearner:
        try:
            for actor, identity in zip(actors, workers.call(LearnerWorker.identify, "start")):
                actor.found_at(identity)
            if output_dir is not None:
                check_shared(output_dir, actors, lambda marker: workers.call(LearnerWorker.finds, "start", marker))
            places = _rendezvous(workers, session, settings.collective_timeout_s)
            layout, cost = workers.begin_each(LearnerWorker.start, "start", places).wait()[0]
        except BaseException:
            with suppress(SkyrlTrainError):
                group.close()
            raise
        together = computed_together(layout, merge_turns=settings.merge_turns)
        ranks = group.of(LearnerRank)
        shared.add(
            role,
            lambda optimizer: ranks.call(LearnerRank.onload, "score", optimizer),
            lambda: ranks.call(LearnerRank.offload, "generate"),
            lambda: ranks.call(LearnerRank.release, "generate"),
        )
        return RayLearner(
            group,
            sharing=shared,
            together=together,
            cost=cost,
            ranks_per_share=settings.strategy.ranks_per_share,
            images=session.images,
        )

    return wait


def check_shared(output_dir: Path, actors: Sequence[RemoteActor], ask: Callable[[Path], Sequence[str]]) -> None:
    """Raise ConfigError where an actor does not see the run's folder, to which it will write its part of each checkpoint;
    `ask` has each say what it `finds`."""
    marker = output_dir.absolute() / f".seen-by-all-nodes-{token_hex(8)}"
    marker.touch()
    try:
        problems = ask(marker)
    finally:
        marker.unlink(missing_ok=True)
    for actor, problem in zip(actors, problems):
        if problem:
            rule = "must be on a file system that all nodes share: each rank writes its part of a checkpoint there"
            remedy = "choose a folder on shared storage, or keep each model on one node (placement.policy_num_nodes=1)"
            value = f"{output_dir}, which {actor} {problem}"
            raise ConfigError([Violation(field="output_dir", rule=rule, value=value, remedy=remedy)])


def _rendezvous(workers: Endpoint[LearnerWorker], session: RaySession, timeout_s: float) -> list[Rendezvous]:
    # A file in the session's folder is removed with it; a cluster that was joined has none on this machine.
    place = meeting_point(
        workers.nodes,
        folder=session.folder or Path(tempfile.gettempdir()),
        port_of_first=lambda: workers.call(LearnerWorker.free_port, "start")[0],
        timeout_s=timeout_s,
    )
    return [place.rendezvous(rank, len(workers.nodes)) for rank in range(len(workers.nodes))]
