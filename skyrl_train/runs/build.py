"""The parts that every kind of run is built of: engines, what makes rollouts, models, where their processes are.

They know only each other's Protocols. Nothing outside `runs/` constructs a trainer, an engine or a transport; a learner is
constructed by `learner/build.py`, in whichever process it runs. Everything heavy is imported inside the functions.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from skyrl_train.registry import split_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skyrl_train.config.bundles import Role
    from skyrl_train.config.learners import RunModels
    from skyrl_train.config.schema import Config
    from skyrl_train.interfaces import Generator, WeightTransport
    from skyrl_train.learner.critic import CriticLearner
    from skyrl_train.learner.policy import PolicyLearner
    from skyrl_train.learner.shared_device import LearnerOnSharedDevice
    from skyrl_train.rollout.env_processes import WorkerHost
    from skyrl_train.rollout.replay import ReplayGenerator
    from skyrl_train.runs.build_engines import Engines
    from skyrl_train.runs.build_ray import Cluster
    from skyrl_train.trainers.evaluate import Evaluator
    from skyrl_train.trainers.rollout_sink import RolloutLog
    from skyrl_train.trainers.steps import Learners
    from skyrl_train.types import Prompt
    from skyrl_train.weight_sync.device_sharing import DeviceSharing


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where models and engines of a run are."""

    cluster: Cluster | None = None
    """Ray's session and what is reserved in it; None in one process."""
    engines: Engines | None = None
    """None where nothing is generated."""


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What makes rollouts, and how it gets new weights."""

    generator: Generator
    transport: WeightTransport


def build_rollouts(
    config: Config,
    recording: ReplayGenerator | None,
    stack: ExitStack,
    *,
    on_progress: Callable[[int, int], None],
    host: Host,
) -> RolloutParts:
    """Return what makes rollouts with the engine of `host`, or reads them from a recording. `stack` closes it."""
    engines = host.engines
    if recording is not None:
        from skyrl_train.weight_sync.transport import NoTransport

        return RolloutParts(generator=recording, transport=NoTransport())
    from skyrl_train.model.causal_lm import load_tokenizer, vocabulary_size
    from skyrl_train.rollout.generator import RolloutGenerator

    tokenizer = load_tokenizer(config.model)
    assert engines is not None, "whatever is no recording is an engine"
    generator = RolloutGenerator(
        engines.engine,
        tokenizer,
        config.generator,
        config.environment,
        config.seed,
        on_progress=on_progress,
        vocabulary_size=vocabulary_size(config.model),
        workers=_environment_workers(config, host),
        log=Path(config.output_dir) / "environments.log",
    )
    stack.callback(generator.close)
    return RolloutParts(generator=generator, transport=engines.transport)


def _environment_workers(config: Config, host: Host) -> WorkerHost | None:
    """Return where environments run, if that is on the nodes of a cluster."""
    if host.cluster is None or config.environment.placement != "ray":
        return None
    return host.cluster.environment_workers(config.environment)


def build_host(config: Config, stack: ExitStack) -> Host:
    """Return Ray's session, where `placement.backend=ray`, and the engine. `stack` ends them."""
    cluster = None
    if config.placement.backend == "ray":
        from skyrl_train.runs.build_ray import Cluster, cluster_settings

        cluster = Cluster(cluster_settings(config), stack)
    if config.generator.backend == "replay":
        return Host(cluster=cluster)
    from skyrl_train.runs.build_engines import build_engines

    return Host(cluster=cluster, engines=build_engines(config, stack, cluster))


def build_learners(models: RunModels, stack: ExitStack, host: Host) -> Learners:
    """Return the models of a run, on Ray or in this process. `stack` closes them."""
    engines = host.engines
    if host.cluster is None:
        return _inline_learners(models, stack, None if engines is None else engines.sharing)
    if engines is None:
        return host.cluster.build_learners(models, stack)
    return host.cluster.build_learners(models, stack, sharing=engines.sharing, engines=engines.group)


def _inline_learners(models: RunModels, stack: ExitStack, sharing: DeviceSharing | None) -> Learners:
    """Return the models in this process, which share their device with an engine, and each other, as `sharing` says."""
    import torch

    from skyrl_train.learner.build import build_learner, build_strategy
    from skyrl_train.learner.policy import BaseOfAdapter
    from skyrl_train.learner.shared_device import LearnerOnSharedDevice
    from skyrl_train.trainers.steps import Learners

    shared = sharing if sharing is not None and sharing.shared else None
    if shared is not None:
        shared.models()
    built: dict[Role, PolicyLearner | CriticLearner | LearnerOnSharedDevice] = {}
    for settings in models.learners:
        learner = build_learner(settings, strategy=build_strategy(settings, torch.device(settings.platform.device)))
        stack.callback(learner.close)
        built[settings.role] = learner if shared is None else LearnerOnSharedDevice(learner, shared)
    policy, reference = cast("PolicyLearner", built["policy"]), cast("PolicyLearner | None", built.get("reference"))
    base = BaseOfAdapter(policy.forward_base) if models.base_is_reference else None
    return Learners(policy=policy, reference=base or reference, critic=built.get("critic"))


def build_evaluator(
    config: Config, prompts: Sequence[Prompt], generator: Generator, rollout_log: RolloutLog | None
) -> Evaluator | None:
    """None where there are no held-out prompts, or where rollouts are replayed and nothing new can be generated."""
    from skyrl_train.trainers.evaluate import Evaluator
    from skyrl_train.trainers.steps import sampling_params

    if not prompts or generator.is_recorded:
        return None

    return Evaluator(
        generator,
        prompts,
        sampling=sampling_params(config.generator.eval_sampling),
        n_samples_per_prompt=config.generator.eval_n_samples_per_prompt,
        batch_size=config.trainer.eval_batch_size,
        env_class=None if config.environment.env_class is None else split_spec(config.environment.env_class)[0],
        on_rollouts=rollout_log.write_evaluation if rollout_log is not None else None,
    )
