"""What the composition root asks for where `placement.backend=ray`: a session, its placement, and what runs in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.cluster.calls import RemoteActor
from skyrl_train.cluster.carriers import make_carrier
from skyrl_train.cluster.engines import EnginePool
from skyrl_train.cluster.fleet import EngineFleet
from skyrl_train.cluster.learners import RayLearner, start_learner
from skyrl_train.cluster.placement import Placement
from skyrl_train.cluster.session import RaySession
from skyrl_train.cluster.transport import RayTransport
from skyrl_train.config.algorithm import needs_reference
from skyrl_train.config.bundles import Role, count_engines, num_cpus, plan_layout, roles_of, takes_turns
from skyrl_train.config.generation import ships_adapter
from skyrl_train.learner.architectures import largest_parameter, weight_bytes
from skyrl_train.learner.reference import BaseOfAdapter
from skyrl_train.learner.turns import DeviceTurns
from skyrl_train.model.causal_lm import load_tokenizer
from skyrl_train.weight_sync.buckets import BUCKET_BYTES
from skyrl_train.weight_sync.probe import WeightSyncProbe
from skyrl_train.weight_sync.transport import SyncRecords

if TYPE_CHECKING:
    from skyrl_train.batch.plan import BatchPlan
    from skyrl_train.config.schema import Config
    from skyrl_train.interfaces import InferenceEngine, Reference, WeightTransport
    from skyrl_train.trainers.steps import Learners
    from skyrl_train.types import GenerationOutput, GenerationRequest


_SLOWEST_LOAD = 50e6
"""Bytes a second at which weights arrive at least: from a busy network file system, or from the hub."""


def with_time_to_load(config: Config) -> Config:
    """The config whose `start_timeout_s` has a second more for every 50 MB that its models and an engine read."""
    policy = config.model.path
    paths = [policy]
    if count_engines(config.generator, config.placement):
        paths.append(policy)
    if "reference" in roles_of(config):
        paths.append(policy if config.reference.model.path == "policy" else config.reference.model.path)
    if config.critic.model.path:
        paths.append(policy if config.critic.model.path == "policy" else config.critic.model.path)
    num_bytes = sum(weight_bytes(path, revision=config.model.revision if path == policy else None) for path in paths)
    timeout_s = config.placement.start_timeout_s + num_bytes / _SLOWEST_LOAD
    return replace(config, placement=replace(config.placement, start_timeout_s=timeout_s))


class Cluster:
    """A session with room reserved in it. Everything in it ends when `stack` closes."""

    def __init__(self, config: Config, stack: ExitStack) -> None:
        self.config = config = with_time_to_load(config)
        self._has_reference = needs_reference(config.trainer.algorithm)
        self.roles = roles_of(config)
        layout = plan_layout(config, roles=self.roles, num_engines=count_engines(config.generator, config.placement))
        self.session = RaySession(
            config.placement,
            num_cpus=num_cpus(layout),
            name=config.run_name,
            largest_bucket_bytes=max(
                BUCKET_BYTES, 4 * largest_parameter(config.model.path, revision=config.model.revision)
            ),
        )
        stack.callback(self.session.close)
        self.placement = Placement(
            layout,
            timeout_s=config.placement.start_timeout_s,
            wait_for_nodes_s=config.placement.wait_for_nodes_s if config.placement.ray_address else 0.0,
        )
        self._transport: RayTransport | None = None
        self._policy: RayLearner | None = None
        self._turns = DeviceTurns(None, shared=False, record_file=self._output("device_turns.jsonl"))

    def build_engine(self, stack: ExitStack) -> tuple[InferenceEngine, WeightTransport]:
        """vLLM engines and what feeds them. Returns while they load."""
        config = self.config
        fleet = EngineFleet(config, self.session, self.placement.slots("engine"))
        stack.callback(fleet.close)
        self._turns = DeviceTurns(
            fleet,
            shared=takes_turns(config.placement, config.generator, config.platform),
            record_file=self._output("device_turns.jsonl"),
        )
        pool = EnginePool(fleet, self._turns, silence_timeout_s=config.placement.silence_timeout_s)
        carrier = make_carrier(config, folder=self.session.folder)
        self._transport = RayTransport(
            pool,
            carrier,
            self._turns,
            SyncRecords(
                self._output("weight_sync.jsonl"),
                self._probe(fleet, self._turns),
                verify_each=config.generator.verify_weight_sync,
            ),
            adapter_only=ships_adapter(config.generator),
        )
        return pool, self._transport

    def build_learners(self, plan: BatchPlan, stack: ExitStack) -> Learners:
        """Starts all models together, then waits for each. Where they share the engines' devices they start one after the
        other, on devices that the engines have left."""
        from skyrl_train.trainers.steps import Learners

        def start(role: Role) -> Callable[[], RayLearner]:
            return start_learner(
                self.config, plan, self.session, self.placement.slots(role), role=role, turns=self._turns
            )

        learners: dict[Role, RayLearner] = {}
        self._turns.models()
        if self.config.placement.colocate_all:
            for role in self.roles:
                learners[role] = start(role)()
        else:
            waits = {role: start(role) for role in self.roles}
            learners = {role: wait() for role, wait in waits.items()}
        for learner in learners.values():
            stack.callback(learner.close)
        self._policy = learners["policy"]
        self._write_actors({role: learner.group.actors for role, learner in learners.items()})
        reference: Reference | None = learners.get("reference")
        if self._has_reference and reference is None:
            reference = BaseOfAdapter(learners["policy"])
        return Learners(policy=learners["policy"], reference=reference, critic=learners.get("critic"))

    def _output(self, name: str) -> Path:
        return Path(self.config.output_dir) / name

    def _write_actors(self, groups: Mapping[str, tuple[RemoteActor, ...]]) -> None:
        """`actors.json`: where each process is, for whoever looks after the run."""
        if self._transport is not None:
            self._transport.pool.fleet.wait_ready()
            groups = {**groups, "engine": tuple(self._transport.pool.fleet.actors)}
        content = {
            role: [vars(actor.identity) for actor in actors if actor.identity is not None]
            for role, actors in groups.items()
        }
        self._output("actors.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _probe(self, fleet: EngineFleet, turns: DeviceTurns) -> WeightSyncProbe:
        """Of all engines that live, together."""

        def ask(request: GenerationRequest) -> list[tuple[str, GenerationOutput]]:
            turns.engines()
            names = [str(engine) for engine in fleet.living]
            return list(zip(names, fleet.call("generate", "sync", request)))

        return WeightSyncProbe(
            ask=ask,
            policy=lambda: self._policy,
            config=self.config,
            vocabulary=len(load_tokenizer(self.config.model)),
        )
