"""What the composition root asks for where `placement.backend=ray`: a session, its placement, and what runs in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.batch.steps import computed_together
from skyrl_train.cluster import (
    EngineGroup,
    GroupEngine,
    GroupRollouts,
    MakesRollouts,
    Placement,
    RayLearner,
    RayModels,
    RayPlane,
    RayScorer,
    RaySession,
    RayWorkers,
    RemoteActor,
    start_learner,
)
from skyrl_train.config import TrainerConfig
from skyrl_train.config.data import EnvironmentConfig, ImagesConfig
from skyrl_train.config.derived import LearnerSettings, RunModels
from skyrl_train.config.models import WEIGHT_BUCKET_BYTES, GeneratorConfig, ModelConfig, PlacementConfig
from skyrl_train.config.placement import Layout, Role, num_cpus, plan_layout
from skyrl_train.inference import EngineSettings
from skyrl_train.learner import BaseOfAdapter
from skyrl_train.model import load_tokenizer
from skyrl_train.model.sizes import largest_parameter, weight_bytes
from skyrl_train.runs.construction.engines import Engines, device_sharing, request_gate, weight_sync
from skyrl_train.serve import Models, served_images
from skyrl_train.trainers import Learners
from skyrl_train.weight_sync import DeviceSharing

if TYPE_CHECKING:
    from skyrl_train.model.files import SequenceScorer

_SLOWEST_LOAD = 50e6
"""Bytes a second at which weights arrive at least: from a busy network file system, or from the hub."""


def with_time_to_load(placement: PlacementConfig, models: Iterable[ModelConfig]) -> PlacementConfig:
    """Return the placement whose `start_timeout_s` has a second more for every 50 MB of the `models` that are read."""
    num_bytes = sum(weight_bytes(model.path, revision=model.revision) for model in models)
    return replace(placement, start_timeout_s=placement.start_timeout_s + num_bytes / _SLOWEST_LOAD)


class Cluster:
    """A session with room reserved in it. Everything in it ends when `stack` closes."""

    def __init__(
        self,
        settings: PlacementConfig,
        layout: Layout,
        policy: ModelConfig,
        stack: ExitStack,
        *,
        run_name: str,
        output_dir: Path,
        batch_bytes: int = 0,
    ) -> None:
        """`layout` is what is reserved. An engine is sent the largest parameter of the `policy` at once; the rollouts and
        rows of a step take `batch_bytes` at most."""
        self._settings, self._stack, self._output_dir = settings, stack, output_dir
        largest = largest_parameter(policy.path, revision=policy.revision)
        self.session = RaySession(
            settings,
            num_cpus=num_cpus(layout),
            name=run_name,
            largest_bucket_bytes=max(WEIGHT_BUCKET_BYTES, 4 * largest),
            batch_bytes=batch_bytes,
        )
        stack.callback(self.session.close)
        self.placement = Placement(
            layout,
            timeout_s=settings.start_timeout_s,
            wait_for_nodes_s=settings.wait_for_nodes_s if settings.ray_address else 0.0,
        )

    def build_engines(
        self, settings: EngineSettings, trainer: TrainerConfig, rollouts: MakesRollouts | None = None
    ) -> Engines:
        """Return the engines, in actors, while they load; `rollouts` makes rollouts beside each, where they are made there.
        Raises EngineError, ModelError."""
        vllm = settings.generator.vllm
        group = EngineGroup(
            settings.generator.backend,
            settings,
            self._settings,
            self.session,
            self.placement.slots("engine"),
            num_threads=settings.platform.num_threads,
            max_restarts=vllm.max_restarts,
            rollouts=rollouts,
        )
        self._stack.callback(group.close)
        sharing = device_sharing(settings, self._settings, group.living, wait_ready=group.wait_ready)
        gate = request_gate(settings.generator, trainer)
        sync = weight_sync(
            settings,
            self._settings,
            sharing,
            group.living,
            group.for_update,
            vocabulary=len(load_tokenizer(settings.model)),
            node_folder=self.session.folder,
            quiet=lambda: nullcontext() if gate is None else engine.quiet(),
        )
        engine = GroupEngine(
            group,
            sharing,
            sync,
            silence_timeout_s=self._settings.silence_timeout_s,
            gate=gate,
            room=vllm.most_sequences(on_gpu=settings.platform.on_gpu),
        )
        return Engines(engine=engine, transport=sync, sharing=sharing, group=group)

    def data_plane(self, policy: LearnerSettings) -> RayPlane:
        """Return what has the arrays of training rows, with a worker on each node; ranks compute them as `policy` says."""
        together = computed_together(policy.micro_batching.layout, merge_turns=policy.merge_turns)
        plane = RayPlane(self.session, self._settings, num_threads=policy.platform.num_threads, together=together)
        self._stack.callback(plane.close)
        return plane

    def rollouts(self, engines: Engines, folder: Path, environment: EnvironmentConfig) -> GroupRollouts:
        """Return what has the engines make rollouts, whose segments are in `folder`."""
        assert isinstance(engines.engine, GroupEngine), "engines are in actors"
        return GroupRollouts(engines.engine, folder, max_failed_fraction=environment.max_failed_fraction)

    def environment_workers(self, environment: EnvironmentConfig) -> RayWorkers:
        """Return what starts worker processes of environments, on all nodes."""
        return RayWorkers(environment, self.session, timeout_s=self._settings.start_timeout_s)

    def load_reward_model(self, load: Callable[[], SequenceScorer], *, path: str, device: str) -> RayScorer:
        """Return a reward model in an actor of its own, once it is loaded. Raises ModelError, ActorLostError."""
        timeout_s = self._settings.start_timeout_s
        return RayScorer(load, self.session, path=path, device=device, timeout_s=timeout_s)

    def build_learners(self, models: RunModels, *, sharing: DeviceSharing, engines: EngineGroup | None) -> Learners:
        """Start all models together, then wait for each. Where they share the engines' devices they start one after the
        other, on devices that the engines have left. `actors.json` says where each process is."""

        def start(settings: LearnerSettings) -> Callable[[], RayLearner]:
            slots = self.placement.slots(settings.role)
            return start_learner(
                settings, self._settings, self.session, slots, sharing=sharing, output_dir=self._output_dir
            )

        learners: dict[Role, RayLearner] = {}
        sharing.models()
        if self._settings.colocate_all:
            for each in models.learners:
                learners[each.role] = start(each)()
        else:
            waits = {each.role: start(each) for each in models.learners}
            learners = {role: wait() for role, wait in waits.items()}
        for learner in learners.values():
            self._stack.callback(learner.close)
        policy = learners["policy"]
        groups: dict[str, Sequence[RemoteActor]] = {role: learner.group.actors for role, learner in learners.items()}
        if engines is not None:
            engines.wait_ready()
            groups["engine"] = engines.actors
        identities = {
            role: [vars(actor.identity) for actor in actors if actor.identity is not None]
            for role, actors in groups.items()
        }
        file = self._output_dir / "actors.json"
        file.write_text(json.dumps(identities, indent=1) + "\n", encoding="utf-8")
        base = BaseOfAdapter(policy.forward_base) if models.base_is_reference else None
        return Learners(policy=policy, reference=base or learners.get("reference"), critic=learners.get("critic"))


def start_served_models(
    bases: Mapping[str, tuple[LearnerSettings, GeneratorConfig, ImagesConfig]],
    placement: PlacementConfig,
    folder: Path,
    stack: ExitStack,
    *,
    run_name: str,
) -> dict[str, RayModels]:
    """Return the base models of a server once they are loaded, each in workers of its own, as many as the policy has ranks.
    `stack` ends them, and the session. Raises SkyrlTrainError where there is no room for them."""
    placement = with_time_to_load(placement, [settings.model for settings, _, _ in bases.values()])
    on_gpu = next(iter(bases.values()))[0].platform.name == "gpu"
    layout = plan_layout(placement, roles=["policy"], gpu=on_gpu)
    session = RaySession(placement, num_cpus=num_cpus(layout) * len(bases), name=run_name)
    stack.callback(session.close)
    found = {}
    for name, (settings, generator, images) in bases.items():
        waits_s = placement.wait_for_nodes_s if placement.ray_address else 0.0
        places = Placement(layout, timeout_s=placement.start_timeout_s, wait_for_nodes_s=waits_s)
        found[name] = RayModels(
            partial(Models, settings, generator),
            session,
            placement,
            places.slots("policy"),
            num_threads=settings.platform.num_threads,
            folder=folder,
            tokenizer=load_tokenizer(settings.model),
            images=served_images(settings, images),
        )
        stack.callback(found[name].close)
    return found
