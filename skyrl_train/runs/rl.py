"""Reinforcement learning as the driver runs it: prompts, their plan, and the parts of `trainers/ppo.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from skyrl_train.algorithms import shape_rewards
from skyrl_train.config import Config
from skyrl_train.config.derived import run_models, scores_entropies
from skyrl_train.config.models import ships_adapter
from skyrl_train.config.rules import mixed_datasets, part_violations
from skyrl_train.data import Curriculum, MixedSource, PromptSource
from skyrl_train.errors import ConfigError, DataError, Violation, counted, every
from skyrl_train.interfaces import WeightTransport
from skyrl_train.learner import read_model
from skyrl_train.model.files import check_special_tokens, vocabulary_size
from skyrl_train.model.lora import adapter_tensors, as_they_are, base_with_adapter, merged_weights
from skyrl_train.plan import BatchPlan, optimizer_steps_text, plan_batches
from skyrl_train.registry import part_name
from skyrl_train.rollout import RolloutGenerator
from skyrl_train.rollout.stream import ReplayGenerator
from skyrl_train.runs.construction.parts import (
    assembler,
    build_evaluator,
    build_host,
    build_learners,
    build_rollouts,
    build_stream,
    most_stored_bytes,
    open_rollout_log,
    size_micro_batches,
    trainer_of,
)
from skyrl_train.runs.look import first_look
from skyrl_train.runs.prompts import check_recorded_images, has_images, measure_prompts, require_exact_images
from skyrl_train.runs.resolving import CheckedRows, read_all_rows
from skyrl_train.runs.restarts import OnEnd
from skyrl_train.runs.task import Attempt, Parts, Task, prepare_process
from skyrl_train.telemetry import RunFolder
from skyrl_train.telemetry.logs import RunConsole
from skyrl_train.telemetry.trackers import draw_learning_curve
from skyrl_train.trainers import PPOTrainer, PromptBatches, TrainingResult, checkpointed_models, sampling_params
from skyrl_train.trainers.checkpoints import CheckpointStore, DataFingerprint, TrainerState
from skyrl_train.trainers.evaluation import evaluation_table, write_evaluation
from skyrl_train.types import Prompt
from skyrl_train.weights import stored_weights


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


class ReinforcementLearning(Task[Config, BatchPlan, TrainingResult]):
    """Prompts in, a better policy out. With `only_looks` the first look is taken, and nothing is trained."""

    def __init__(
        self,
        config: Config,
        console: RunConsole,
        *,
        rows: Sequence[CheckedRows] | None = None,
        only_looks: bool = False,
    ) -> None:
        """Loads the prompts; raises what `load_data` raises."""
        del console  # measuring says nothing
        self.data = load_data(config, rows)
        self.fingerprint, self.notes, self._only_looks = self.data.fingerprint, self.data.notes, only_looks

    def plan(self, config: Config) -> BatchPlan:
        """The sizes of each batch, and their number."""
        return plan_batches(config, num_train_prompts=self.data.num_train)

    def plan_lines(self, config: Config, plan: BatchPlan) -> list[str]:
        """Steps and optimizer steps, prompts, algorithm."""
        trainer = config.trainer
        evaluated = every(trainer.eval_interval, "step") if trainer.eval_interval else "before and after"
        held_out = counted(len(self.data.validation), "held-out prompt")
        samples = counted(config.generator.n_samples_per_prompt, "sample")
        algorithm = trainer.algorithm
        return [
            f"{counted(plan.total_steps, 'step')} of {counted(plan.num_prompts_per_batch, 'prompt')} x "
            f"{samples} = {counted(plan.num_samples_per_batch, 'trajectory')} each",
            f"{optimizer_steps_text(plan)}; micro-batches: {part_name(trainer.micro_batching)}, layout: {trainer.layout}",
            f"{counted(self.data.num_train, 'training prompt')}, {counted(plan.batches_per_epoch, 'batch')} an epoch; "
            + (f"{held_out}, evaluated {evaluated}" if self.data.validation else "no evaluation"),
            f"algorithm {part_name(algorithm.advantage_estimator)}, loss {part_name(algorithm.policy_loss)}, "
            f"reduction {part_name(algorithm.loss_reduction)}, lr {trainer.policy.optimizer.lr:g}",
        ]

    def build(self, attempt: Attempt[Config, BatchPlan]) -> Callable[[], TrainingResult] | None:
        """Engine and models, then what is around them, in the order in which they need each other."""
        config, plan, data, console, stack = attempt.config, attempt.plan, self.data, attempt.console, attempt.stack
        host = build_host(config, stack)
        with console.phase("engine"):
            generator, transport = build_rollouts(config, data.recording, stack, console.on_progress, host)
        with console.phase("models"):
            models_of_run = run_models(config, plan.schedule)
            learners = build_learners(models_of_run, stack, host)
        with console.phase("probes"):
            size_micro_batches(config, plan, learners, attempt.folder, console)
        first_look(attempt, data.train, host, learners, is_asked=self._only_looks)
        activity = generator.activity if isinstance(generator, RolloutGenerator) else None
        if activity is not None:
            activity.take()  # what the engine did for the look is none of the run's
        if self._only_looks:
            return None
        interval = config.trainer.algorithm.ref_update_interval
        models = checkpointed_models(learners, attempt.start, ref_update_interval=interval)
        loop = attempt.loop(models, draw=draw_learning_curve, activity=activity)
        plane = None if host.cluster is None else host.cluster.data_plane(models_of_run.learners[0])
        if plane is not None and (warning := plane.room_warning(most_stored_bytes(config))):
            console.warn(warning)
        rollout_log = open_rollout_log(config, attempt.folder, stack, plane)
        return PPOTrainer(
            loop=loop,
            trainer=trainer_of(config),
            assemble=assembler(config),
            n_samples_per_prompt=config.generator.n_samples_per_prompt,
            sampling=sampling_params(config.generator.sampling),
            seed=config.seed,
            scores_entropies=scores_entropies(config),
            prompts=data.train,
            curriculum=data.curriculum,
            generator=generator,
            learners=learners,
            transport=transport,
            evaluator=build_evaluator(config, data.validation, generator, rollout_log, loop.trackers.log_samples),
            rollout_log=rollout_log,
            stream=build_stream(
                config,
                data.train,
                data.curriculum,
                generator,
                data.fingerprint.sha256,
                plan.total_steps,
                stack,
                console.on_progress,
            ),
            capsules=attempt.capsules(loop),
            plane=plane,
        ).train

    def goodbye(self, config: Config, result: TrainingResult, folder: RunFolder) -> list[str]:
        """The export, where there is one."""
        del result
        return [f"model           {folder.export}"] if config.trainer.export_hf else []


def load_data(config: Config, rows: Sequence[CheckedRows] | None = None) -> Data:
    """Measure all prompts, of `rows` if they are read already. Raises DataError, ModelError (the tokenizer), ConfigError."""
    check_special_tokens(config.model)
    if config.generator.backend == "replay":
        return _replayed_data(config)
    rows = read_all_rows(config) if rows is None else rows
    notes: list[str] = []
    batch_size, shuffle, seed = config.trainer.train_batch_size, config.data.shuffle, config.seed
    order = config.data.order
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


def evaluate_once(config: Config, rows: Sequence[CheckedRows], console: RunConsole, on_end: OnEnd) -> None:
    """Evaluate on the held-out prompts of `rows`, and write what was found. Raises SkyrlTrainError."""
    folder = RunFolder(Path(config.output_dir))
    prepare_process(config)
    data = load_data(config, rows)
    if not data.validation:
        raise DataError("there is nothing to evaluate on: data.validation is empty. Set data.validation=[FILE]")
    with folder.locked(), Parts(console, on_end) as stack:
        host = build_host(config, stack)
        generator, transport = build_rollouts(config, data.recording, stack, console.on_progress, host)
        step = _load_checkpoint_weights(config, folder, transport)
        rollout_log = open_rollout_log(config, folder, stack)
        evaluator = build_evaluator(config, data.validation, generator, rollout_log)
        if evaluator is None:
            remedy = "Use generator=hf or generator=vllm"
            raise ConfigError([Violation.of("generator.backend", "replay", "must generate, to evaluate", remedy)])
        kept = nullcontext() if rollout_log is None else rollout_log.failures_kept(step)
        with console.phase("evaluate"), kept:
            result = evaluator.evaluate(step)
        if rollout_log is not None:
            rollout_log.flush()
        write_evaluation(folder.evaluation_file, result)
    console.note(result.line())
    console.show(evaluation_table(result))
    console.note(f"written: {folder.evaluation_file}{'' if rollout_log is None else f', {folder.rollouts}'}")


def _load_checkpoint_weights(config: Config, folder: RunFolder, transport: WeightTransport) -> int:
    """Gives the engine the policy of the checkpoint `trainer.resume_path` and returns its step; 0 where none is stated.

    Raises CheckpointError where there is no whole checkpoint.
    """
    if config.trainer.resume_mode not in ("from_path", "fork"):
        return 0

    checkpoint = CheckpointStore(folder.checkpoints, keep=1).find(config.trainer.resume_path)
    step = TrainerState.read(checkpoint).global_step
    weights: Mapping[str, Tensor] = read_model(checkpoint / "policy")
    if config.model.lora.rank:
        model = base_with_adapter(config.model, weights)
        adapter = {name: parameter.detach() for name, parameter in adapter_tensors(model).items()}
        merged = merged_weights(model, as_they_are)
        weights = adapter if ships_adapter(config.generator) else dict(merged)
    transport.sync(stored_weights(weights), step)
    return step
