"""The parts that every kind of run is built of: engines, what makes rollouts, models, where their processes are.

They know only each other's Protocols. Nothing outside `runs/` constructs a trainer, an engine or a transport; a learner is
constructed by `learner/build.py`, in whichever process it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from skyrl_train.batch.plane import DataPlane
from skyrl_train.config import AnyConfig, Config, TrainerConfig
from skyrl_train.config.data import DataConfig
from skyrl_train.config.derived import (
    RunModels,
    layout_of,
    learner_settings,
    roles_of,
    run_models,
)
from skyrl_train.config.environment import with_reward_components
from skyrl_train.config.models import ModelConfig
from skyrl_train.config.placement import Role, count_engines, leaves_devices
from skyrl_train.config.rules import data_parallel_size, mixed_datasets
from skyrl_train.data import Curriculum
from skyrl_train.data.sources import IMAGES
from skyrl_train.inference import EngineSettings
from skyrl_train.inference.vllm import make_tool_parser
from skyrl_train.interfaces import Generator, InferenceEngine, WeightTransport
from skyrl_train.learner import (
    BaseOfAdapter,
    CriticLearner,
    LearnerOnSharedDevice,
    PolicyLearner,
    build_learner,
    build_strategy,
)
from skyrl_train.learner.memory import size_run
from skyrl_train.model import load_tokenizer
from skyrl_train.model.files import SequenceScorer, image_reader, image_reading, vocabulary_size
from skyrl_train.plan import BatchPlan, plan_batches
from skyrl_train.registry import PartSpec, split_spec
from skyrl_train.rollout import FILE, ChatTokens, Journal, RolloutGenerator
from skyrl_train.rollout.stream import ReplayGenerator, RolloutStream
from skyrl_train.runs.construction.engines import Engines, build_engines
from skyrl_train.runs.resolving import reward_models
from skyrl_train.runs.task import prepare_process
from skyrl_train.telemetry import RunFolder
from skyrl_train.telemetry.logs import RunConsole
from skyrl_train.trainers import Learners, PromptBatches, RolloutLog, sampling_params, steps
from skyrl_train.trainers.checkpoints import TrainerState, oldest_step
from skyrl_train.trainers.evaluation import Evaluator
from skyrl_train.types import Prompt, RolloutBatch, Tokenizer
from skyrl_train.weight_sync import DeviceSharing, NoTransport

if TYPE_CHECKING:
    from skyrl_train.cluster import GroupRollouts
    from skyrl_train.runs.construction.on_ray import Cluster


STORED_BYTES_A_TOKEN = 60
"""Of a rollout (ids, log-probabilities, mask, text: 17) and of all columns that rows may get (43), by their types."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where models and engines of a run are."""

    cluster: Cluster | None = None
    """Ray's session and what is reserved in it; None in one process."""
    engines: Engines | None = None
    """None where nothing is generated."""


def build_rollouts(
    config: Config,
    recording: ReplayGenerator | None,
    stack: ExitStack,
    on_progress: Callable[[int, int], None],
    host: Host,
) -> tuple[Generator, WeightTransport]:
    """Return what makes rollouts with the engine of `host`, or reads them from a recording, and how it gets new weights.
    `stack` closes it."""
    engines, IMAGES.folder = host.engines, RunFolder(Path(config.output_dir)).images
    if recording is not None:
        return recording, NoTransport()
    assert engines is not None, "whatever is no recording is an engine"
    _load_reward_models(config, host, stack)
    generator: GroupRollouts | RolloutGenerator
    if host.cluster is not None and config.placement.rollouts == "engines":
        folder = RunFolder(Path(config.output_dir).absolute()).segments
        generator = host.cluster.rollouts(engines, folder, config.environment)
    else:
        generator = rollout_generator(config, engines.engine, host)
    generator.on_progress = on_progress
    stack.callback(generator.close)
    return generator, engines.transport


def rollout_generator(config: Config, engine: InferenceEngine, host: Host) -> RolloutGenerator:
    """Return what makes rollouts with the `engine`, in environments of its own, which end with it."""
    tokenizer = load_tokenizer(config.model)
    return RolloutGenerator(
        engine,
        tokenizer,
        config.generator,
        config.environment,
        config.seed,
        vocabulary_size=vocabulary_size(config.model),
        workers=None
        if host.cluster is None or config.environment.placement != "ray"
        else host.cluster.environment_workers(config.environment),
        log=Path(config.output_dir) / "environments.log",
        parse_calls=make_tool_parser(config.environment.tool_format, tokenizer),
        chat=chat_tokens(config.data, tokenizer, config.model),
        mix=mixed_datasets(config.data, config.environment, config.generator.sampling)[0],
    )


def build_stream(
    config: Config,
    prompts: PromptBatches,
    curriculum: Curriculum | None,
    generator: Generator,
    fingerprint: str,
    total_steps: int,
    stack: ExitStack,
    on_progress: Callable[[int, int], None],
) -> RolloutStream | None:
    """Return what makes rollouts while the learner updates; None with `trainer.max_staleness=0`. `stack` ends it.

    `fingerprint` is that of all `prompts`. Raises DataError where the run's folder has a journal of others.
    """
    trainer = config.trainer
    if not trainer.max_staleness:
        return None
    assert isinstance(generator, RolloutGenerator), "recordings are refused before"
    folder = RunFolder(Path(config.output_dir))
    journal = Journal(
        folder.journal / FILE,
        prompts=fingerprint,
        oldest_checkpoint=lambda: oldest_step(folder.checkpoints) if trainer.dump_rollouts else None,
    )
    stream = RolloutStream(
        generator,
        prompts,
        trainer,
        journal,
        total_batches=total_steps,
        n_samples_per_prompt=config.generator.n_samples_per_prompt,
        sampling=sampling_params(config.generator.sampling),
        max_failed_fraction=config.environment.max_failed_fraction,
        on_progress=on_progress,
        curriculum=curriculum,
    )
    stack.callback(stream.close)
    return stream


def chat_tokens(data: DataConfig, tokenizer: Tokenizer, model: ModelConfig) -> ChatTokens:
    """Return how the prompts of a run become tokens. Raises DataError for an unusable chat template, ModelError for a model
    of images without its processor."""
    images = image_reading(model, data.images)
    return ChatTokens(tokenizer, prompt_format=data.prompt_format, template_kwargs=data.template_kwargs, images=images)


def _load_reward_models(config: Config, host: Host, stack: ExitStack) -> None:
    """Load those that rewards name by a path, here or in actors. Raises ModelError."""
    mix = mixed_datasets(config.data, config.environment, config.generator.sampling)[0]
    environments = [config.environment, *(dataset.environment for dataset in mix)]
    found = {id(reward): reward for each in environments for _, reward in reward_models(each)}
    for reward in found.values():
        device = reward.device or config.platform.device
        load = partial(
            SequenceScorer,
            reward.path,
            revision=reward.revision,
            dtype=reward.dtype,
            device=device,
            max_batch_tokens=reward.max_batch_tokens,
            label=reward.label,
            weights=reward.weights,
        )
        on_ray = host.cluster if reward.placement == "ray" else None
        scorer = load() if on_ray is None else on_ray.load_reward_model(load, path=reward.path, device=device)
        stack.callback(scorer.close)
        reward.use(scorer.score)


def open_cluster(config: AnyConfig, stack: ExitStack) -> Cluster | None:
    """Return Ray's session, where `placement.backend=ray`. `stack` ends it."""
    if config.placement.backend != "ray":
        return None
    from skyrl_train.runs.construction.on_ray import Cluster, with_time_to_load

    placement = with_time_to_load(config.placement, loaded_models(config))
    return Cluster(
        placement,
        layout_of(config),
        config.model,
        stack,
        run_name=config.run_name,
        output_dir=Path(config.output_dir),
        batch_bytes=most_stored_bytes(config) if isinstance(config, Config) else 0,
    )


def most_stored_bytes(config: Config) -> int:
    """Return how much a step's rollouts and rows take at most where they are by reference."""
    num_samples = config.trainer.train_batch_size * config.generator.n_samples_per_prompt
    return num_samples * config.generator.max_context_length * STORED_BYTES_A_TOKEN


def loaded_models(config: AnyConfig) -> list[ModelConfig]:
    """Return the models that a run loads: those of its learners, and the policy's once more for engines with devices of
    their own."""
    if not isinstance(config, Config):
        return [config.model]
    engines = [config.model] * bool(count_engines(config.generator, config.placement))
    return [*(learner_settings(config, role).model for role in roles_of(config)), *engines]


def build_host(config: Config, stack: ExitStack) -> Host:
    """Return Ray's session and the engine, as far as there are any. `stack` ends them."""
    cluster, settings = open_cluster(config, stack), engine_settings(config)
    if config.generator.backend == "replay":
        return Host(cluster=cluster)
    if cluster is not None and config.generator.has_own_devices:
        beside = partial(rollouts_beside, config) if config.placement.rollouts == "engines" else None
        return Host(cluster=cluster, engines=cluster.build_engines(settings, config.trainer, beside))
    return Host(cluster=cluster, engines=build_engines(settings, config.placement, config.trainer, stack))


def rollouts_beside(config: Config, engine: InferenceEngine) -> RolloutGenerator:
    """Return what makes rollouts in the actor of an engine."""
    return rollout_generator(config, engine, Host())


def engine_settings(config: Config) -> EngineSettings:
    """Return what the run's engines are made from."""
    trainer = config.trainer
    return EngineSettings(
        model=config.model,
        generator=config.generator,
        platform=config.platform,
        seed=config.seed,
        deterministic=config.deterministic,
        in_actor=config.placement.backend == "ray",
        leaves_devices=leaves_devices(config.placement, config.generator, config.platform),
        in_flight_cache=trainer.in_flight_cache if trainer.in_flight_updates else None,
        records_routing=trainer.moe_routing_replay,
        output_dir=Path(config.output_dir).absolute(),
    )


def build_learners(models: RunModels, stack: ExitStack, host: Host) -> Learners:
    """Return the models of a run, on Ray, or in this process, where they share their device with an engine, and each other,
    as that says. `stack` closes them."""
    sharing = DeviceSharing() if host.engines is None else host.engines.sharing
    if host.cluster is not None:
        group = None if host.engines is None else host.engines.group
        return host.cluster.build_learners(models, sharing=sharing, engines=group)
    shared = sharing if sharing.shared else None
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


def size_micro_batches(
    config: Config, plan: BatchPlan, learners: Learners, folder: RunFolder, console: RunConsole
) -> None:
    """Size the micro-batches of the learners where they size themselves, as `memory.json` of the folder says or anew."""
    turns = config.generator.max_turns if config.generator.is_step_wise else 1

    lines = size_run(
        config.trainer,
        [each for each in (learners.policy, learners.reference, learners.critic) if each is not None],
        folder.memory_file,
        longest=config.generator.max_context_length,
        max_rows=plan.num_samples_per_batch * turns,
    )
    if lines:
        console.header("memory", lines)


def learners_here(config: Config, state: TrainerState, scratch: RunFolder, stack: ExitStack) -> Learners:
    """Return the models of a run of reinforcement learning, resolved to be executed again, with the weights that it began
    with; nothing is written to its folder. `stack` closes them."""
    prepare_process(config)
    plan = plan_batches(config, num_train_prompts=state.data.num_prompts)
    learners = build_learners(run_models(config, plan.schedule), stack, Host())
    size_micro_batches(config, plan, learners, scratch, RunConsole(step_lines=False))
    return learners


def build_evaluator(
    config: Config,
    prompts: Sequence[Prompt],
    generator: Generator,
    rollout_log: RolloutLog | None,
    show: Callable[[int, RolloutBatch], None] | None = None,
) -> Evaluator | None:
    """`show` is called with the step and the rollouts of each evaluation.

    None where there are no held-out prompts, or where rollouts are replayed and nothing new can be generated.
    """
    if not prompts or generator.is_recorded:
        return None
    own = None if config.data.mix else config.environment.env_class
    receivers = [*([rollout_log.write_evaluation] if rollout_log is not None else []), *([show] if show else [])]

    def hand_over(step: int, rollouts: RolloutBatch) -> None:
        for receive in receivers:
            receive(step, rollouts)

    return Evaluator(
        generator,
        prompts,
        sampling=sampling_params(config.generator.eval_sampling),
        n_samples_per_prompt=config.generator.eval_n_samples_per_prompt,
        batch_size=config.trainer.eval_batch_size,
        env_class=None if own is None else split_spec(own)[0],
        on_rollouts=hand_over,
    )


def open_rollout_log(
    config: Config, folder: RunFolder, stack: ExitStack, plane: DataPlane | None = None
) -> RolloutLog | None:
    """Return the log of rollouts, which `stack` closes; None with `trainer.dump_rollouts=false`. `plane`: of a run that
    trains, where its arrays are."""
    if not config.trainer.dump_rollouts:
        return None
    log = RolloutLog(folder.rollouts, config.rollouts, plane=plane)
    stack.callback(log.close)
    return log


def assembler(config: Config, *, rows: PartSpec | None = None) -> steps.Assemble:
    """Return what makes training rows of the run's rollouts; by `rows` in place of `generator.trajectory_rows` where it is
    given."""

    def shares(num_workers: int) -> int:
        return data_parallel_size(num_workers, config.strategy.ranks_per_share)

    return partial(
        steps.assemble,
        trainer=trainer_of(config),
        rows=config.generator.rows if rows is None else rows,
        policy_shares=shares(config.placement.policy_num_workers),
        critic_shares=shares(config.placement.critic_num_workers) if config.critic.model.path else None,
        max_staleness=None if config.generator.backend == "replay" else config.trainer.max_staleness,
        read_image=image_reader(config.model, config.data.images),
    )


def trainer_of(config: Config) -> TrainerConfig:
    """Return `trainer` with the rewards whose components its algorithm compares."""
    return replace(config.trainer, algorithm=with_reward_components(config.trainer.algorithm, config.environment))
