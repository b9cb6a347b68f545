"""What the composition root asks for where `placement.backend=ray`: a session, its placement, and what runs in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.cluster import Placement, RayLearner, RayScorer, RaySession, RayWorkers, RemoteActor, start_learner
from skyrl_train.config import AnyConfig, Config, layout_of_run
from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.derived import LearnerSettings, RunModels, learner_settings, roles_of
from skyrl_train.config.models import ModelConfig, PlacementConfig
from skyrl_train.config.placement import Layout, Role, count_engines, num_cpus
from skyrl_train.learner import BaseOfAdapter
from skyrl_train.model.sizes import largest_parameter, weight_bytes
from skyrl_train.rollout.hosts import WorkerSettings
from skyrl_train.trainers import Learners
from skyrl_train.weight_sync import DeviceSharing
from skyrl_train.weights import BUCKET_BYTES

if TYPE_CHECKING:
    from skyrl_train.cluster import EngineGroup
    from skyrl_train.model.files import ScorerSettings
    from skyrl_train.trainers import Learners

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


def cluster_settings(config: AnyConfig) -> ClusterSettings:
    """Return what a run reserves: for its models, and for engines with devices of their own."""
    models = [config.model]
    if isinstance(config, Config):
        models = [learner_settings(config, role).model for role in roles_of(config)]
        models += [config.model] * bool(count_engines(config.generator, config.placement))
    return ClusterSettings(
        run_name=config.run_name,
        output_dir=Path(config.output_dir),
        placement=_with_time_to_load(config.placement, models),
        layout=layout_of_run(config),
        model=config.model,
    )


def _with_time_to_load(placement: PlacementConfig, models: Iterable[ModelConfig]) -> PlacementConfig:
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

    def environment_workers(self, environment: EnvironmentConfig) -> RayWorkers:
        """Return what starts worker processes of environments, on all nodes."""
        timeout_s = self.settings.placement.start_timeout_s
        return RayWorkers(WorkerSettings.of(environment), self.session, timeout_s=timeout_s)

    def load_reward_model(self, settings: ScorerSettings) -> RayScorer:
        """Return a reward model in an actor of its own, once it is loaded. Raises ModelError, ActorLostError."""
        return RayScorer(settings, self.session, timeout_s=self.settings.placement.start_timeout_s)

    def build_learners(
        self,
        models: RunModels,
        stack: ExitStack,
        *,
        sharing: DeviceSharing | None = None,
        engines: EngineGroup | None = None,
    ) -> Learners:
        """Start all models together, then wait for each. Where they share the engines' devices they start one after the
        other, on devices that the engines have left."""
        sharing = sharing or DeviceSharing()
        placement = self.settings.placement

        def start(settings: LearnerSettings) -> Callable[[], RayLearner]:
            slots = self.placement.slots(settings.role)
            output_dir = self.settings.output_dir
            return start_learner(settings, placement, self.session, slots, sharing=sharing, output_dir=output_dir)

        learners: dict[Role, RayLearner] = {}
        sharing.models()
        if placement.colocate_all:
            for each in models.learners:
                learners[each.role] = start(each)()
        else:
            waits = {each.role: start(each) for each in models.learners}
            learners = {role: wait() for role, wait in waits.items()}
        for learner in learners.values():
            stack.callback(learner.close)
        policy = learners["policy"]
        groups: dict[str, Sequence[RemoteActor]] = {role: learner.group.actors for role, learner in learners.items()}
        if engines is not None:
            engines.wait_ready()
            groups["engine"] = engines.actors
        self._write_actors(groups)
        base = BaseOfAdapter(policy.forward_base) if models.base_is_reference else None
        return Learners(policy=policy, reference=base or learners.get("reference"), critic=learners.get("critic"))

    def _write_actors(self, groups: Mapping[str, Sequence[RemoteActor]]) -> None:
        """Write `actors.json`: where each process is, for whoever looks after the run."""
        content = {
            role: [vars(actor.identity) for actor in actors if actor.identity is not None]
            for role, actors in groups.items()
        }
        file = self.settings.output_dir / "actors.json"
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
