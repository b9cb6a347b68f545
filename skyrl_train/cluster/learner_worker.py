"""One rank of a learner: what runs inside a Ray actor.

Each public method answers with an `Answer`, so that what the project raises on purpose reaches the caller as itself.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from skyrl_train.cluster.calls import Answer, Identity, node_address
from skyrl_train.cluster.dispatch import Shipped, unpack, unpack_mini_batch
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.weight_sync.buckets import Bucket, pack_bucket, unpack_bucket

if TYPE_CHECKING:
    import torch

    from skyrl_train.batch.plan import BatchPlan
    from skyrl_train.config.schema import Config
    from skyrl_train.distributed.process_group import Rendezvous
    from skyrl_train.distributed.strategy import ModelStrategy

Role = Literal["policy", "reference", "critic"]


def answering(method: Callable[..., Any]) -> Callable[..., Answer]:
    """Turns what `method` returns, or raises on purpose, into an Answer."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Answer:
        try:
            return Answer(value=method(*args, **kwargs))
        except SkyrlTrainError as error:
            return Answer(error=type(error).__name__, message=str(error))

    return wrapped


class LearnerWorker:
    """A rank of the policy, of the reference or of the critic."""

    def __init__(self, config: Config, plan: BatchPlan, role: Role) -> None:
        self._config, self._plan, self._role = config, plan, role

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
        from skyrl_train.learner.critic import CriticLearner, build_critic_learner
        from skyrl_train.learner.policy import PolicyLearner, build_policy_learner

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        device = torch.device("cuda:0" if self._config.platform.name == "gpu" else "cpu")
        if self._config.strategy.name != "single":
            join(rendezvous, device)
        strategy = _strategy(self._config, device)
        self._learner: PolicyLearner | CriticLearner
        if self._role == "critic":
            self._learner = build_critic_learner(self._config, self._plan, strategy=strategy)
        else:
            self._learner = build_policy_learner(self._config, self._plan, role=self._role, strategy=strategy)
        return self._learner.engine.layout

    @answering
    def forward(self, rows: Shipped) -> Any:
        """float `[tokens of the rows]` as numpy."""
        return self._learner.forward(unpack(rows)).numpy()

    @answering
    def forward_backward(self, rows: Shipped) -> Any:
        """The metrics of this rank's rows."""
        return self._learner.forward_backward(unpack_mini_batch(rows))

    @answering
    def optim_step(self) -> Any:
        """Metrics, the same on each rank."""
        return self._learner.optim_step()

    @answering
    def save(self, folder: Path) -> None:
        """See `Learner.save`."""
        self._learner.save(folder)

    @answering
    def load(self, folder: Path) -> None:
        """See `Learner.load`."""
        self._learner.load(folder)

    @answering
    def export_hf(self, folder: Path) -> None:
        """See `Learner.export_hf`."""
        self._learner.export_hf(folder)

    @answering
    def bucket(self, names: tuple[str, ...]) -> Bucket | None:
        """These parameters, whole, on rank 0; None elsewhere."""
        from skyrl_train.model.lora import weights_by_name

        strategy, weights = self._learner.engine.strategy, weights_by_name(self._learner.engine.model)
        whole = ((name, weights[name].whole(strategy.full)) for name in names)
        if strategy.rank == 0:
            return pack_bucket(whole)
        for _ in whole:
            pass  # each gather needs every rank
        return None

    @answering
    def take_bucket(self, packed: Answer) -> int:
        """Replaces the parameters that are in the bucket; returns how many."""
        from skyrl_train.learner.state import take_weights

        engine = self._learner.engine
        return take_weights(engine.model, engine.parameters, unpack_bucket(packed.unwrap()), role=self._role)

    @answering
    def describe(self) -> Any:
        """`(name, type, whole shape)` of every parameter, tied ones once, in the model's order."""
        from skyrl_train.model.lora import weights_by_name

        return tuple(
            (name, str(weight.parameter.dtype).removeprefix("torch."), tuple(weight.parameter.shape))
            for name, weight in weights_by_name(self._learner.engine.model).items()
        )


def _strategy(config: Config, device: torch.device) -> ModelStrategy:
    import torch

    from skyrl_train.distributed.sequence_parallel import SequenceGroup
    from skyrl_train.distributed.strategy import Replicated, Sharded, SingleProcess

    if config.strategy.name == "single":
        return SingleProcess()
    size = config.strategy.sequence_parallel_size
    group = SequenceGroup(size, timeout_s=config.placement.call_timeout_s) if size > 1 else None
    if config.strategy.name == "ddp":
        return Replicated(group)
    dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
    return Sharded(device=device, dtype=dtype, cpu_offload=config.strategy.cpu_offload, group=group)
