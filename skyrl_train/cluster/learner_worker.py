"""One rank of a learner: what runs inside a Ray actor.

Each public method answers with an `Answer`, so that what the project raises on purpose reaches the caller as itself.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skyrl_train.cluster.calls import Answer, Identity, node_address
from skyrl_train.cluster.dispatch import Shipped, unpack, unpack_mini_batch
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.weight_sync.buckets import unpack_bucket

if TYPE_CHECKING:
    from skyrl_train.config.learners import LearnerSettings
    from skyrl_train.distributed.process_group import Rendezvous
    from skyrl_train.learner.policy import PolicyLearner
    from skyrl_train.learner.sizing import SizingLimits, SizingReport


def answering(method: Callable[..., Any]) -> Callable[..., Answer]:
    """Turns what `method` returns, or raises on purpose, into an Answer."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Answer:
        try:
            return Answer(value=method(*args, **kwargs))
        except SkyrlTrainError as error:
            return Answer(error=error)

    return wrapped


class LearnerWorker:
    """A rank of the policy, of the reference or of the critic."""

    def __init__(self, settings: LearnerSettings, *, secrets: Mapping[str, str]) -> None:
        """`secrets`: environment variables that Ray must not see."""
        os.environ.update(secrets)
        self._settings, self._role = settings, settings.role

    def ping(self) -> bool:
        """A sign of life; runs beside whatever else runs."""
        return True

    @answering
    def identify(self) -> Identity:
        """Where this process is."""
        return Identity(node=node_address(), pid=os.getpid())

    @answering
    def free_port(self) -> int:
        """A port that nobody listens on at this moment, for the ranks to meet at."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    @answering
    def start(self, rendezvous: Rendezvous) -> str:
        """Meets the other ranks and loads the model; the layout that is exact for it."""
        import torch

        from skyrl_train.distributed.process_group import join
        from skyrl_train.learner.build import build_learner, build_strategy
        from skyrl_train.model.numerics import set_numerics
        from skyrl_train.weight_sync.sender import WeightSender

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        set_numerics(deterministic=self._settings.deterministic)
        device = torch.device("cuda:0" if self._settings.platform.name == "gpu" else "cpu")
        if self._settings.strategy.kind != "single":
            join(rendezvous, device)
        strategy = build_strategy(self._settings, device, num_ranks=rendezvous.num_ranks)
        self._learner = build_learner(self._settings, strategy=strategy)
        engine = self._learner.engine
        self._sender = WeightSender(
            engine.model, strategy, device, require_there=lambda: engine.residence.require(optimizer=False)
        )
        return engine.passes.layout

    @answering
    def forward(self, rows: Shipped) -> Any:
        """float `[tokens of the rows]` as numpy."""
        return self._learner.forward(unpack(rows)).numpy()

    @answering
    def forward_base(self, rows: Shipped) -> Any:
        """The same of the policy's model with its adapter off."""
        return self._policy().forward_base(unpack(rows)).numpy()

    @answering
    def forward_entropy(self, rows: Shipped) -> Any:
        """The policy's entropies."""
        return self._policy().forward_entropy(unpack(rows)).numpy()

    @answering
    def forward_sum_pi_squared(self, rows: Shipped) -> Any:
        """The policy's sums of squared probabilities."""
        return self._policy().forward_sum_pi_squared(unpack(rows)).numpy()

    @answering
    def forward_backward(self, rows: Shipped) -> Any:
        """The metrics of this rank's rows."""
        return self._learner.forward_backward(unpack_mini_batch(rows))

    @answering
    def size_micro_batches(self, limits: SizingLimits, stored: Sequence[SizingReport]) -> SizingReport:
        """Finds what fits, together with the other ranks; `stored` are the reports of an earlier run, by rank."""
        from skyrl_train.learner.sizing import make_meter, size_micro_batches

        engine = self._learner.engine
        own = stored[engine.strategy.rank] if len(stored) == engine.strategy.num_ranks else None
        return size_micro_batches(self._learner, make_meter(engine.passes.device, limits), limits, stored=own)

    @answering
    def learner(self, method: str, *args: Any) -> Any:
        """`method` of this rank's `Learner`, e.g. `optim_step` or `save`."""
        return getattr(self._learner, method)(*args)

    @answering
    def offload(self) -> None:
        """See `Residence.offload`."""
        self._learner.engine.residence.offload()

    @answering
    def onload(self, optimizer: bool) -> None:
        """See `Residence.onload`."""
        self._learner.engine.residence.onload(optimizer=optimizer)

    @answering
    def weights(self, method: str, *args: Any) -> Any:
        """`method` of this rank's `WeightSender`."""
        return getattr(self._sender, method)(*args)

    @answering
    def take_bucket(self, carried: Answer) -> int:
        """Replaces the parameters that are in the bucket; returns how many."""
        from skyrl_train.learner.state import take_weights

        engine = self._learner.engine
        engine.residence.require(optimizer=False)
        return take_weights(engine.model, engine.parameters, unpack_bucket(carried.unwrap()), role=self._role)

    def _policy(self) -> PolicyLearner:
        from skyrl_train.learner.policy import PolicyLearner

        if not isinstance(self._learner, PolicyLearner):
            raise SkyrlTrainError(f"the {self._role} model has no log-probabilities")
        return self._learner
