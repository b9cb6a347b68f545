"""What the composition root asks for where `placement.backend=ray`: a session, its placement, and what runs in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from skyrl_train.config.bundles import Layout, Role, count_engines, num_cpus, takes_turns
from skyrl_train.config.generation import ships_adapter
from skyrl_train.config.learners import LearnerSettings, RunModels, layout_of, learner_settings, roles_of
from skyrl_train.config.schema import ModelConfig, PlacementConfig
from skyrl_train.learner.architectures import largest_parameter, weight_bytes
from skyrl_train.learner.policy import BaseOfAdapter
from skyrl_train.learner.turns import DeviceTurns
from skyrl_train.model.causal_lm import load_tokenizer
from skyrl_train.weight_sync.buckets import BUCKET_BYTES
from skyrl_train.weight_sync.probe import WeightSyncProbe
from skyrl_train.weight_sync.transport import SyncRecords

if TYPE_CHECKING:
    from skyrl_train.config.schema import Config
    from skyrl_train.interfaces import InferenceEngine, WeightTransport
    from skyrl_train.trainers.steps import Learners
    from skyrl_train.types import GenerationOutput, GenerationRequest


_SLOWEST_LOAD = 50e6
"""Bytes a second at which weights arrive at least: from a busy network file system, or from the hub."""


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """What a run reserves on Ray, and how long it waits for it."""

    run_name: str
    output_dir: Path
    placement: PlacementConfig
    layout: Layout
    model: ModelConfig
    """The policy's, whose largest parameter an engine is sent at once."""


def cluster_settings(config: Config) -> ClusterSettings:
    """Of reinforcement learning: models, and vLLM engines where `generator.backend` asks for some."""
    models = [learner_settings(config, role).model for role in roles_of(config)]
    if count_engines(config.generator, config.placement):
        models.append(config.model)
    return ClusterSettings(
        run_name=config.run_name,
        output_dir=Path(config.output_dir),
        placement=with_time_to_load(config.placement, models),
        layout=layout_of(config),
        model=config.model,
    )


def with_time_to_load(placement: PlacementConfig, models: Iterable[ModelConfig]) -> PlacementConfig:
    """The placement whose `start_timeout_s` has a second more for every 50 MB of the `models` that the start reads."""
    num_bytes = sum(weight_bytes(model.path, revision=model.revision) for model in models)
    return replace(placement, start_timeout_s=placement.start_timeout_s + num_bytes / _SLOWEST_LOAD)


class Cluster:
    """A session with room reserved in it. Everything in it ends when `stack` closes."""

    def __init__(self, settings: ClusterSettings, stack: ExitStack) -> None:
        self.settings = settings
        placement = settings.placement
        self.session = RaySession(
            placement,
            num_cpus=num_cpus(settings.layout),
            name=settings.run_name,
            largest_bucket_bytes=max(
                BUCKET_BYTES, 4 * largest_parameter(settings.model.path, revision=settings.model.revision)
            ),
        )
        stack.callback(self.session.close)
        self.placement = Placement(
            settings.layout,
            timeout_s=placement.start_timeout_s,
            wait_for_nodes_s=placement.wait_for_nodes_s if placement.ray_address else 0.0,
        )
        self._transport: RayTransport | None = None
        self._policy: RayLearner | None = None
        self._turns = DeviceTurns(None, shared=False, record_file=self._output("device_turns.jsonl"))

    def build_engine(self, config: Config, stack: ExitStack) -> tuple[InferenceEngine, WeightTransport]:
        """vLLM engines and what feeds them. Returns while they load."""
        config = replace(config, placement=self.settings.placement)
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
                self._probe(config, fleet, self._turns),
                verify_each=config.generator.verify_weight_sync,
            ),
            adapter_only=ships_adapter(config.generator),
        )
        return pool, self._transport

    def build_learners(self, models: RunModels, stack: ExitStack) -> Learners:
        """Starts all models together, then waits for each. Where they share the engines' devices they start one after the
        other, on devices that the engines have left."""
        from skyrl_train.trainers.steps import Learners

        placement = self.settings.placement

        def start(settings: LearnerSettings) -> Callable[[], RayLearner]:
            slots = self.placement.slots(settings.role)
            return start_learner(settings, placement, self.session, slots, turns=self._turns)

        learners: dict[Role, RayLearner] = {}
        self._turns.models()
        if placement.colocate_all:
            for each in models.learners:
                learners[each.role] = start(each)()
        else:
            waits = {each.role: start(each) for each in models.learners}
            learners = {role: wait() for role, wait in waits.items()}
        for learner in learners.values():
            stack.callback(learner.close)
        policy = self._policy = learners["policy"]
        self._write_actors({role: learner.group.actors for role, learner in learners.items()})
        base = BaseOfAdapter(policy.forward_base) if models.base_is_reference else None
        return Learners(policy=policy, reference=base or learners.get("reference"), critic=learners.get("critic"))

    def _output(self, name: str) -> Path:
        return self.settings.output_dir / name

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

    def _probe(self, config: Config, fleet: EngineFleet, turns: DeviceTurns) -> WeightSyncProbe:
        """Of all engines that live, together."""

        def ask(request: GenerationRequest) -> list[tuple[str, GenerationOutput]]:
            turns.engines()
            names = [str(engine) for engine in fleet.living]
            return list(zip(names, fleet.call("generate", "sync", request)))

        return WeightSyncProbe(
            ask=ask,
            policy=lambda: self._policy,
            config=config,
            vocabulary=len(load_tokenizer(config.model)),
        )
