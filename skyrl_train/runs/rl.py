"""One run of reinforcement learning from a validated config: data, plan, parts, training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from skyrl_train.algorithms import shape_rewards
from skyrl_train.batch import AssemblySettings
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.derived import run_models, scores_entropies
from skyrl_train.config.environment import with_reward_components
from skyrl_train.config.rules import data_parallel_size, mixed_datasets, part_violations, validate_config
from skyrl_train.data import Curriculum, MixedSource, PromptSource
from skyrl_train.errors import ConfigError, counted, every
from skyrl_train.model import pinned
from skyrl_train.model.files import check_special_tokens, image_reader, vocabulary_size
from skyrl_train.plan import BatchPlan, optimizer_steps_text, placement_lines, placement_report, plan_batches
from skyrl_train.registry import PartSpec, part_name
from skyrl_train.rollout import RolloutGenerator
from skyrl_train.rollout.envs import reward_lines
from skyrl_train.rollout.stream import ReplayGenerator
from skyrl_train.runs.cli.memory_settings import settle
from skyrl_train.runs.common import (
    OnEnd,
    Parts,
    begin,
    build_loop,
    first_lines,
    limit_threads,
    open_checkpoints,
    open_folder,
    prepare_process,
    resume_promise,
    say_goodbye,
    tell_nobody,
)
from skyrl_train.runs.construction.parts import (
    build_evaluator,
    build_host,
    build_learners,
    build_rollouts,
    build_stream,
    open_rollout_log,
    size_micro_batches,
    with_reward_weights,
)
from skyrl_train.runs.look import first_look
from skyrl_train.runs.prompts import (
    CheckedRows,
    check_recorded_images,
    has_images,
    measure_prompts,
    read_rows,
    require_exact_images,
)
from skyrl_train.runs.restarts import Restarts, run_with_restarts
from skyrl_train.system import Devices, local_devices
from skyrl_train.telemetry import RunFolder
from skyrl_train.telemetry.logs import RunConsole
from skyrl_train.telemetry.records import draw_timeline
from skyrl_train.telemetry.trackers import draw_learning_curve
from skyrl_train.trainers import (
    PPOSettings,
    PPOTrainer,
    PromptBatches,
    TrainingResult,
    checkpointed_models,
    sampling_params,
)
from skyrl_train.trainers.checkpoints import CapsuleWriter, CheckpointStore, DataFingerprint, Start, resume_settings
from skyrl_train.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Data:
    """Prompts, after those that are too long were left out."""

    train: PromptBatches
    fingerprint: DataFingerprint
    num_train: int
    validation: tuple[Prompt, ...]
    notes: tuple[str, ...]
    """What was left out, one line each."""
    curriculum: Curriculum | None = None
    """Chooses among the training prompts in place of `train`."""
    recording: ReplayGenerator | None = None
    """Recorded rollouts in place of an engine; `train` is then what it answers."""


def train(config: Config, *, on_end: OnEnd = tell_nobody, only_looks: bool = False) -> TrainingResult | None:
    """Trains, or goes on training, in `config.output_dir`; None where the run there is complete, or where it `only_looks`
    (`look.py`). `on_end` is called before parts are closed.

    Raises SkyrlTrainError for whatever the user can fix, before anything expensive where that can be known;
    StopRequested after a signal, with the checkpoint written.
    """
    config = settle(config)
    if violations := validate_config(config):
        raise ConfigError(violations)
    limit_threads(config)
    config = replace(config, model=pinned(config.model))
    if config.generator.backend != "replay":
        config = with_reward_weights(config)

    console = RunConsole(step_lines=config.tracker.console.enabled)
    folder = open_folder(config)
    console.header(f"skyrl_train: {config.run_name}", describe(config))
    rows = read_all_rows(config)
    prepare_process(config)

    checkpoints = open_checkpoints(folder.checkpoints, config.trainer)
    data = load_data(config, rows)

    def attempt(config: Config, restarts: Restarts) -> TrainingResult | None:
        plan = plan_batches(config, num_train_prompts=data.num_train)
        if not restarts.count:
            console.header("plan", [*_plan_lines(config, plan, data), *data.notes])
        resume = restarts.resume(resume_settings(config))
        start = begin(
            config,
            resume,
            folder,
            console,
            checkpoints,
            data=data.fingerprint,
            plan=plan,
            promise=_promise(config),
        )
        if start is None:
            return None
        restarts.begun(start.global_step, policy_num_workers=config.placement.policy_num_workers)
        with Parts(console, restarts.ends) as stack:
            return _train(
                config, resume.settings, plan, data, folder, console, start, checkpoints, restarts, stack, only_looks
            )

    with folder.locked():
        result = run_with_restarts(config, folder, console, attempt, on_end=on_end)
    if result is not None:
        say_goodbye(console, folder, step=result.global_step, is_exported=config.trainer.export_hf)
    return result


def _train(
    config: Config,
    recorded: Mapping[str, Any],
    plan: BatchPlan,
    data: Data,
    folder: RunFolder,
    console: RunConsole,
    start: Start,
    checkpoints: CheckpointStore,
    restarts: Restarts,
    stack: ExitStack,
    only_looks: bool,
) -> TrainingResult | None:
    host = build_host(config, stack)
    with console.phase("engine"):
        rollouts = build_rollouts(config, data.recording, stack, on_progress=console.on_progress, host=host)
    with console.phase("models"):
        learners = build_learners(run_models(config, plan.schedule), stack, host)
    with console.phase("probes"):
        size_micro_batches(config, plan, learners, folder, console)
    activity = rollouts.generator.activity if isinstance(rollouts.generator, RolloutGenerator) else None
    begins = start.checkpoint is None and not restarts.count
    first_look(config, ppo_settings, plan, data.train, host, learners, console, begins=begins, is_asked=only_looks)
    if activity is not None:
        activity.take()  # what the engine did for the look is none of the run's
    if only_looks:
        return None
    loop = build_loop(
        config,
        config.trainer,
        recorded,
        folder,
        console,
        stack,
        models=checkpointed_models(learners, start, ref_update_interval=config.trainer.algorithm.ref_update_interval),
        data=data.fingerprint,
        start=start,
        total_steps=plan.total_steps,
        checkpoints=checkpoints,
        draw=draw_learning_curve,
        draw_timeline=draw_timeline,
        activity=activity,
        num_restarts=restarts.count,
    )
    rollout_log = open_rollout_log(config, folder, stack)
    capsules = CapsuleWriter(
        folder,
        keep=config.trainer.capsules,
        seed=config.seed,
        total_steps=plan.total_steps,
        hold_state=loop.hold_state,
        console=console,
    )
    trainer = PPOTrainer(
        loop=loop,
        settings=ppo_settings(config),
        prompts=data.train,
        curriculum=data.curriculum,
        generator=rollouts.generator,
        learners=learners,
        transport=rollouts.transport,
        evaluator=build_evaluator(config, data.validation, rollouts.generator, rollout_log, loop.show_samples),
        rollout_log=rollout_log,
        stream=build_stream(
            config,
            data.train,
            data.curriculum,
            rollouts.generator,
            data.fingerprint.sha256,
            plan.total_steps,
            stack,
            console.on_progress,
        ),
        capsules=capsules,
    )
    return trainer.train()


def ppo_settings(config: Config) -> PPOSettings:
    """What the loop of reinforcement learning reads of `config`."""
    return PPOSettings(
        trainer=_trainer(config),
        assembly=assembly_settings(config),
        n_samples_per_prompt=config.generator.n_samples_per_prompt,
        sampling=sampling_params(config.generator.sampling),
        seed=config.seed,
        scores_entropies=scores_entropies(config),
    )


def assembly_settings(config: Config, *, rows: PartSpec | None = None) -> AssemblySettings:
    """What assembly reads of `config`; `rows` in place of `generator.trajectory_rows` where it is given."""

    def shares(num_workers: int) -> int:
        return data_parallel_size(num_workers, config.strategy.ranks_per_share)

    return AssemblySettings(
        rows=config.generator.rows if rows is None else rows,
        trainer=_trainer(config),
        policy_shares=shares(config.placement.policy_num_workers),
        critic_shares=shares(config.placement.critic_num_workers) if config.critic.model.path else None,
        max_staleness=None if config.generator.backend == "replay" else config.trainer.max_staleness,
        read_image=image_reader(config.model, config.data.images),
    )


def _trainer(config: Config) -> TrainerConfig:
    """Return `trainer` with the rewards whose components its algorithm compares."""
    return replace(config.trainer, algorithm=with_reward_components(config.trainer.algorithm, config.environment))


def describe(config: Config) -> list[str]:
    """The first lines of a run: where it runs, what it trains, what acts and what generates."""
    devices = local_devices() if config.platform.name == "gpu" and not config.placement.ray_address else Devices()
    placement = placement_lines(placement_report(config, devices)) if config.platform.name == "gpu" else ()
    environment, generator = part_name(config.environment.env_class or "of each row"), config.generator
    mix = mixed_datasets(config.data, config.environment, generator.sampling)[0]
    is_single = environment == "single_turn" and not config.environment.tools
    return first_lines(
        config,
        *(f"{name:<11} {rest.strip()}" for name, _, rest in (line.partition(" ") for line in placement)),
        f"environment {environment}, " + ("1 turn" if is_single else f"up to {counted(generator.max_turns, 'turn')}"),
        *reward_lines(config.environment),
        f"engine      {part_name(generator.backend)}, {counted(generator.sampling.max_generate_length, 'new token')} a turn",
        *([f"evaluation  samples with {generator.eval_differences}"] if generator.eval_differences else []),
        data=[f"{each.name} ({each.weight:g})" for each in mix] or config.data.train,
        promise=_promise(config),
    )


def _promise(config: Config) -> str:
    return resume_promise(
        config, engine_seeds=config.generator.seeds == "engine", max_staleness=config.trainer.max_staleness
    )


def _plan_lines(config: Config, plan: BatchPlan, data: Data) -> list[str]:
    trainer = config.trainer
    evaluated = every(trainer.eval_interval, "step") if trainer.eval_interval else "before and after"
    held_out = counted(len(data.validation), "held-out prompt")
    samples = counted(config.generator.n_samples_per_prompt, "sample")
    return [
        f"{counted(plan.total_steps, 'step')} of {counted(plan.num_prompts_per_batch, 'prompt')} x "
        f"{samples} = {counted(plan.num_samples_per_batch, 'trajectory')} each",
        f"{optimizer_steps_text(plan)}; micro-batches: {part_name(trainer.micro_batching)}, layout: {trainer.layout}",
        f"{counted(data.num_train, 'training prompt')}, {counted(plan.batches_per_epoch, 'batch')} an epoch; "
        + (f"{held_out}, evaluated {evaluated}" if data.validation else "no evaluation"),
        f"algorithm {part_name(trainer.algorithm.advantage_estimator)}, loss {part_name(trainer.algorithm.policy_loss)}, "
        f"reduction {part_name(trainer.algorithm.loss_reduction)}, lr {trainer.policy.optimizer.lr:g}",
    ]


def read_all_rows(config: Config) -> list[CheckedRows]:
    """Read and check the rows of a run, or of each data set of its mix: before torch is imported, which takes as long as
    everything before it, so that what is wrong with them is told at once. Raises DataError, ConfigError."""
    if config.generator.backend == "replay":
        return []
    mix = mixed_datasets(config.data, config.environment, config.generator.sampling)[0]
    datasets = [(each.data, each.environment) for each in mix] or [(config.data, config.environment)]
    return [read_rows(config.model, data, environment) for data, environment in datasets]


def load_data(config: Config, rows: Sequence[CheckedRows] | None = None) -> Data:
    """Measure all prompts, of `rows` if they are read already. Raises DataError, ModelError (the tokenizer), ConfigError."""
    check_special_tokens(config.model)
    if config.generator.backend == "replay":
        return _replayed_data(config)
    rows = read_all_rows(config) if rows is None else rows
    notes: list[str] = []
    batch_size, shuffle, seed, order = (
        config.trainer.train_batch_size,
        config.data.shuffle,
        config.seed,
        config.data.order,
    )
    source: PromptSource | MixedSource
    slots: Callable[[int], Sequence[int]]
    if mix := mixed_datasets(config.data, config.environment, config.generator.sampling)[0]:
        loaded = [
            (each, *measure_prompts(config.model, each.data, each.environment, own, notes, each.name))
            for each, own in zip(mix, rows)
        ]
        source = MixedSource(
            [(each.name, prompts, each.weight) for each, prompts, _ in loaded], batch_size, shuffle, seed, order
        )
        train = [prompt for _, prompts, _ in loaded for prompt in prompts]
        validation = [prompt for _, _, prompts in loaded for prompt in prompts]
        first, slots = source.first_epochs(), source.slots
    else:
        train, validation = measure_prompts(config.model, config.data, config.environment, rows[0], notes)
        source = PromptSource(train, batch_size, shuffle, seed, order=order)
        first, slots = [source.first_epoch()], lambda _: [0] * batch_size
    if has_images([*train, *validation]):
        violations = list(part_violations(config.model, config.generator, config.critic, config.reference))
        require_exact_images(config.model, config.trainer.layout, config.strategy, violations, config.generator.backend)
    curriculum = None
    if config.data.curriculum.enabled:
        curriculum = Curriculum(datasets=first, slots=slots, seed=seed, config=config.data.curriculum)
    return Data(
        train=source.batch,
        curriculum=curriculum,
        fingerprint=DataFingerprint.of(train),
        num_train=len(train),
        validation=tuple(validation),
        notes=tuple(notes),
    )


def _replayed_data(config: Config) -> Data:
    """The recording supplies the prompts of each step. Raises DataError, ConfigError."""
    recording = ReplayGenerator(
        config.generator.replay_path,
        vocabulary_size=vocabulary_size(config.model),
        max_context_length=config.generator.max_context_length,
        max_failed_fraction=config.environment.max_failed_fraction,
        shape=lambda rollouts: shape_rewards(rollouts, config.trainer.algorithm.filters),
    )
    recording.check(
        train_batch_size=config.trainer.train_batch_size,
        n_samples_per_prompt=config.generator.n_samples_per_prompt,
        total_steps=config.trainer.total_steps or config.trainer.epochs * recording.num_steps,
    )
    prompts = recording.prompts
    check_recorded_images(recording, config.model, config.data.images, config.trainer.layout, config.strategy)
    return Data(
        train=recording.batch,
        fingerprint=DataFingerprint.of(prompts),
        num_train=len(prompts),
        validation=(),
        notes=(f"rollouts are replayed from {config.generator.replay_path}; nothing is generated or evaluated",),
        recording=recording,
    )
