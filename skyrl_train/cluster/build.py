"""What the composition root asks for where `placement.backend=ray`: a session, its placement, and what runs in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.cluster.calls import RemoteActor
from skyrl_train.cluster.engines import EnginePool
from skyrl_train.cluster.learner_worker import Role
from skyrl_train.cluster.learners import start_learner
from skyrl_train.cluster.placement import Placement, num_cpus, plan_layout
from skyrl_train.cluster.probe import WeightSyncProbe
from skyrl_train.cluster.session import RaySession
from skyrl_train.cluster.transport import RayTransport
from skyrl_train.config.algorithm import needs_reference
from skyrl_train.model.causal_lm import load_tokenizer

if TYPE_CHECKING:
    from skyrl_train.batch.plan import BatchPlan
    from skyrl_train.config.schema import Config
    from skyrl_train.interfaces import InferenceEngine, Learner, WeightTransport
    from skyrl_train.trainers.steps import Learners


class Cluster:
    """A session with room reserved in it. Everything in it ends when `stack` closes."""

    def __init__(self, config: Config, stack: ExitStack) -> None:
        self.config = config
        self.roles: tuple[Role, ...] = (
            "policy",
            *(("reference",) if needs_reference(config.trainer.algorithm) else ()),
            *(("critic",) if config.critic.model.path else ()),
        )
        num_engines = config.generator.vllm.num_engines if config.generator.backend == "vllm" else 0
        layout = plan_layout(config, roles=self.roles, num_engines=num_engines)
        self.session = RaySession(config.placement, num_cpus=num_cpus(layout), name=config.run_name)
        stack.callback(self.session.close)
        self.placement = Placement(layout, timeout_s=config.placement.start_timeout_s)
        self._transport: RayTransport | None = None

    def build_engine(self, stack: ExitStack) -> tuple[InferenceEngine, WeightTransport]:
        """vLLM engines and what feeds them. Returns while they load."""
        pool = EnginePool(self.config, self.session, self.placement.slots("engine"))
        stack.callback(pool.close)
        self._transport = RayTransport(pool, Path(self.config.output_dir) / "weight_sync.jsonl")
        return pool, self._transport

    def build_learners(self, plan: BatchPlan, stack: ExitStack) -> Learners:
        """Starts all models together, then waits for each."""
        from skyrl_train.trainers.steps import Learners

        waits = {
            role: start_learner(
                self.config,
                plan,
                self.session,
                self.placement.slots(role),
                role=role,
                before_compute=self._make_room,
            )
            for role in self.roles
        }
        learners = {role: wait() for role, wait in waits.items()}
        for learner in learners.values():
            stack.callback(learner.close)
        self._verify_syncs(learners["policy"])
        self._write_actors({role: learner.group.actors for role, learner in learners.items()})
        return Learners(policy=learners["policy"], reference=learners.get("reference"), critic=learners.get("critic"))

    def _make_room(self) -> None:
        """Where all share the devices, engines give theirs up until the next request or sync wakes them."""
        if self._transport is not None and self.config.placement.colocate_all and self.config.platform.name == "gpu":
            self._transport.pool.sleep()

    def _write_actors(self, groups: Mapping[str, tuple[RemoteActor, ...]]) -> None:
        """`actors.json`: where each process is, for whoever looks after the run."""
        if self._transport is not None:
            self._transport.pool.wait_ready()
            groups = {**groups, "engine": tuple(self._transport.pool.actors)}
        content = {
            role: [vars(actor.identity) for actor in actors if actor.identity is not None]
            for role, actors in groups.items()
        }
        (Path(self.config.output_dir) / "actors.json").write_text(
            json.dumps(content, indent=1) + "\n", encoding="utf-8"
        )

    def _verify_syncs(self, policy: Learner) -> None:
        if self._transport is not None and self.config.generator.verify_weight_sync:
            vocabulary = len(load_tokenizer(self.config.model))
            self._transport.verify = WeightSyncProbe(
                pool=self._transport.pool, policy=policy, config=self.config, vocabulary=vocabulary
            )
