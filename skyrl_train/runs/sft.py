"""Supervised fine-tuning as the driver runs it: examples, their plan, and the parts of `trainers/sft.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.batch.planner import training_limit
from skyrl_train.config import SFTConfig, SFTDataConfig, SFTTrainerConfig
from skyrl_train.config.data import NO_HELD_OUT
from skyrl_train.config.derived import RunModels, sft_learner_settings
from skyrl_train.config.models import ModelConfig
from skyrl_train.config.rules import data_parallel_size
from skyrl_train.data import BatchLoader, find_sources
from skyrl_train.data.sft import (
    Collator,
    DefaultCollator,
    EpochOrder,
    ExampleSet,
    Loaded,
    PackedDataCollator,
    StepStream,
    by_documents,
    by_rows,
    by_tokens,
    load_examples,
)
from skyrl_train.errors import counted, every
from skyrl_train.inference import HFEngine, load_for_engine
from skyrl_train.interfaces import Learner
from skyrl_train.learner.memory import size_run
from skyrl_train.model import load_tokenizer
from skyrl_train.model.files import check_special_tokens, check_token_ids, image_reading, vocabulary_size
from skyrl_train.plan import SFTPlan
from skyrl_train.registry import part_name
from skyrl_train.rollout import CheckedEngine
from skyrl_train.runs.construction.engines import sync_within_process
from skyrl_train.runs.construction.parts import Host, build_learners, open_cluster
from skyrl_train.runs.prompts import require_exact_images
from skyrl_train.runs.task import Attempt, Task, open_checkpoints
from skyrl_train.telemetry import RunFolder
from skyrl_train.telemetry.logs import RunConsole
from skyrl_train.telemetry.trackers import draw_loss_curve
from skyrl_train.trainers import SFTResult, SFTTrainer, Start, sampling_params
from skyrl_train.trainers.checkpoints import CheckpointStore, DataFingerprint
from skyrl_train.trainers.evaluation import SampleWriter, SFTEvaluator, cut_samples_after


@dataclass(frozen=True, kw_only=True)
class SFTData:
    """The tokenised examples of a run."""

    train: ExampleSet
    weights: tuple[float, ...]
    """One for each of its sources."""
    validation: dict[str, ExampleSet]
    """Held-out sets by name."""
    fingerprint: DataFingerprint
    notes: tuple[str, ...]
    """What was cut or left out, one line each."""

    @property
    def has_images(self) -> bool:
        """Whether an example has an image."""
        return any(part.store.images for each in (self.train, *self.validation.values()) for part in each.parts)


def load_sft_data(config: SFTDataConfig, model: ModelConfig, *, on_progress: Callable[[str, int], None]) -> SFTData:
    """Reads, tokenises and measures all examples. Raises DataError, ModelError (the tokenizer), ConfigError."""
    notes: list[str] = []
    check_special_tokens(model)
    train = _load(config, model, config.train, config.max_train_rows, on_progress)
    notes += _notes("training", train, config)
    validation = {}
    for spec, name in zip(config.held_out, _set_names(config)):
        held_out = _load(config, model, (spec,), config.max_validation_rows, on_progress)
        notes += _notes(name, held_out, config)
        validation[name] = held_out.examples
    if config.validation is None and not config.held_out:
        notes.append(NO_HELD_OUT)
    each = config.weights or (1.0,) * len(config.train)
    weights = [weight for spec, weight in zip(config.train, each) for _ in find_sources([spec], config.reader)]
    return SFTData(
        train=train.examples,
        weights=tuple(weights[: len(train.examples.parts)]),
        validation=validation,
        fingerprint=DataFingerprint(num_prompts=len(train.examples), sha256=train.sha256),
        notes=tuple(notes),
    )


def _load(
    data: SFTDataConfig,
    model: ModelConfig,
    specs: tuple[str, ...],
    limit: int,
    on_progress: Callable[[str, int], None],
) -> Loaded:
    images = image_reading(model, data.images)
    loaded = load_examples(specs, load_tokenizer(model), data, limit=limit, on_progress=on_progress, images=images)
    for part in loaded.examples.parts:
        check_token_ids(int(part.store.input_ids.max(initial=0)), model, part.name)
    return loaded


def _set_names(data: SFTDataConfig) -> list[str]:
    """Short, and different: the file's own name where no other set has it."""
    names = []
    for spec in data.held_out:
        sources = find_sources([spec], data.reader)
        names.append(sources[0].name if len(sources) == 1 else Path(spec).name)
    return [name if names.count(name) == 1 else spec for name, spec in zip(names, data.held_out)]


def _notes(name: str, loaded: Loaded, config: SFTDataConfig) -> list[str]:
    limit = config.max_length
    notes = []
    if loaded.num_truncated:
        notes.append(
            f"cut to data.max_length={limit} tokens: {counted(loaded.num_truncated, f'{name} example')} "
            f"(the longest has {loaded.longest})"
        )
    if loaded.num_dropped:
        notes.append(
            f"left out: {counted(loaded.num_dropped, f'{name} example')} of more than data.max_length={limit} tokens "
            f"(the longest has {loaded.longest})"
        )
    if loaded.num_without_loss:
        notes.append(
            f"left out: {counted(loaded.num_without_loss, f'{name} example')} without a trained token in the first {limit}"
        )
    return notes


def plan_sft(config: SFTConfig, data: SFTData) -> SFTPlan:
    """Counts steps, exactly, by going through the epochs' orders. Raises ConfigError where nothing fills a step."""
    trainer = config.trainer
    stream = build_stream(config, data)
    return SFTPlan(
        num_examples=len(data.train),
        num_examples_per_epoch=stream.num_examples_per_epoch,
        num_tokens=int(data.train.lengths.sum()),
        total_steps=trainer.num_steps or stream.count_steps(trainer.num_epochs),
        step=_what_makes_a_step(trainer),
    )


def _what_makes_a_step(trainer: SFTTrainerConfig) -> str:
    if trainer.docs_per_step:
        return f"{'exactly' if trainer.docs_per_step_exact else 'at least'} {counted(trainer.docs_per_step, 'example')}"
    if trainer.tokens_per_step:
        return f"at most {counted(trainer.tokens_per_step, 'token')}"
    return counted(trainer.batch_size, "example")


def build_stream(config: SFTConfig, data: SFTData) -> StepStream:
    """The endless stream of examples, cut into steps."""
    order = EpochOrder(data.train.source_sizes, weights=data.weights, shuffle=config.data.shuffle, seed=config.seed)
    trainer = config.trainer
    closing = by_tokens(trainer.tokens_per_step) if trainer.tokens_per_step else by_rows(trainer.batch_size)
    if trainer.docs_per_step:
        closing = by_documents(
            trainer.docs_per_step,
            num_ranks=_num_shares(config),
            admits=training_limit(trainer),
            exact=trainer.docs_per_step_exact,
        )
    return StepStream(data.train.lengths, order, closing, config.data.incomplete_step)


def build_loader(config: SFTConfig, data: SFTData, stack: ExitStack) -> BatchLoader:
    """Return the batches. `stack` ends the thread that prefetches them."""
    trainer = config.trainer
    collator: Collator = DefaultCollator(data.train, align=trainer.pad_to_multiple_of)
    if trainer.layout == "packed":
        collator = PackedDataCollator(
            data.train,
            max_tokens_per_row=trainer.max_tokens_per_microbatch,
            align=trainer.pad_to_multiple_of,
            num_ranks=_num_shares(config),
        )
    is_async = trainer.async_batch_collation
    return stack.enter_context(BatchLoader(build_stream(config, data), data.train, collator, is_async=is_async))


def _num_shares(config: SFTConfig) -> int:
    """Return the number of data-parallel ranks."""
    return data_parallel_size(config.placement.policy_num_workers, config.strategy.ranks_per_share)


_ROWS_BETWEEN_NOTES = 512 * 40


class SupervisedLearning(Task[SFTConfig, SFTPlan, SFTResult]):
    """Examples in, a model that answers as they do out."""

    def __init__(self, config: SFTConfig, console: RunConsole) -> None:
        """Raises what `load_sft_data` raises, and ConfigError for images that rows would not show exactly."""

        def on_progress(name: str, rows: int) -> None:
            if rows % _ROWS_BETWEEN_NOTES == 0:  # a cached source is not tokenised at all
                console.note(f"{name}: {counted(rows, 'row')} tokenised")

        self.data = load_sft_data(config.data, config.model, on_progress=on_progress)
        if self.data.has_images:
            require_exact_images(config.model, config.trainer.layout, config.strategy)
        self.fingerprint, self.notes = self.data.fingerprint, self.data.notes

    def plan(self, config: SFTConfig) -> SFTPlan:
        """The number of steps, and what makes one."""
        return plan_sft(config, self.data)

    def plan_lines(self, config: SFTConfig, plan: SFTPlan) -> list[str]:
        """Return steps, examples and held-out sets as lines for a reader."""
        trainer = config.trainer
        ahead = "prefetched" if trainer.async_batch_collation else "made in the loop"
        evaluated = every(trainer.eval_interval, "step") if trainer.eval_interval else "before and after"
        mean_length = plan.num_tokens / max(1, plan.num_examples)
        held_out = sum(len(examples) for examples in self.data.validation.values())
        return [
            f"{counted(plan.total_steps, 'optimizer step')} of {plan.step}; "
            f"micro-batches: {part_name(trainer.micro_batching)}, layout: {trainer.layout}; batches are {ahead}",
            f"{counted(plan.num_examples, 'training example')} of {mean_length:.0f} tokens on average, "
            f"{plan.num_examples_per_epoch} an epoch, loss on {config.data.loss_on} assistant messages",
            f"{counted(held_out, 'held-out example')} in {counted(len(self.data.validation), 'set')}"
            + (f", evaluated {evaluated}" if held_out else "")
            + f"; {part_name(trainer.optimizer.schedule)} learning rate {trainer.optimizer.lr:g}",
        ]

    def build(self, attempt: Attempt[SFTConfig, SFTPlan]) -> Callable[[], SFTResult]:
        """The model, then what is around it."""
        config, console, folder, stack = attempt.config, attempt.console, attempt.folder, attempt.stack
        cut_samples_after(folder.samples, attempt.start.global_step)
        best = open_best(folder, config.trainer, attempt.start)
        settings = sft_learner_settings(config, total_steps=attempt.plan.total_steps)
        with console.phase("model"):
            host = Host(cluster=open_cluster(config, stack))
            policy = build_learners(RunModels(learners=(settings,)), stack, host).policy
        with console.phase("probes"):
            lines = size_policy(config, policy, folder)
        if lines:
            console.header("memory", lines)
        loop = attempt.loop({"policy": policy}, draw=draw_loss_curve)
        return SFTTrainer(
            loop=loop,
            settings=config.trainer,
            loader=build_loader(config, self.data, stack),
            policy=policy,
            evaluator=build_sft_evaluator(config, self.data),
            samples=build_samples(config, self.data, folder, stack),
            best=best,
            capsules=attempt.capsules(loop),
        ).train

    def goodbye(self, config: SFTConfig, result: SFTResult, folder: RunFolder) -> list[str]:
        """The best checkpoint and the export, where there are any."""
        best = f"best            step {result.history.best_step}, {folder.best}"
        has_best = config.trainer.keep_best and result.history.best_step is not None
        return [best] * has_best + [f"model           {folder.export}"] * (config.trainer.export != "none")


def size_policy(config: SFTConfig, policy: Learner, folder: RunFolder) -> list[str]:
    """Find how large micro-batches may be, where that is asked for; the lines that say so."""
    is_packed = config.trainer.layout == "packed"  # whose rows are filled before the budget is known
    return size_run(
        config.trainer,
        [policy],
        folder.memory_file,
        longest=config.trainer.max_tokens_per_microbatch if is_packed else config.data.max_length,
        max_rows=max(config.trainer.batch_size, config.trainer.eval_batch_size),
    )


def open_best(folder: RunFolder, trainer: SFTTrainerConfig, start: Start) -> CheckpointStore | None:
    """Return the checkpoint with the lowest held-out loss, here and at the run's URL; None where none is kept."""
    if not trainer.keep_best and trainer.export != "best":
        return None
    best = open_checkpoints(folder.best, trainer, keep=1)
    best.tidy()
    best.take_over(best.latest() if start.own and start.checkpoint is not None else None)
    return best


def build_sft_evaluator(config: SFTConfig, data: SFTData) -> SFTEvaluator | None:
    """Return what evaluates, or None if there are no held-out examples."""
    if not data.validation:
        return None
    return SFTEvaluator(
        data.validation, batch_size=config.trainer.eval_batch_size, is_async=config.trainer.async_batch_collation
    )


def build_samples(config: SFTConfig, data: SFTData, folder: RunFolder, stack: ExitStack) -> SampleWriter | None:
    """An engine of its own with a second copy of the model; None where no samples are asked for."""
    trainer = config.trainer
    if not trainer.eval_samples or not data.validation:
        return None

    tokenizer = load_tokenizer(config.model)
    model = load_for_engine(config.model, config.platform.device)
    engine = HFEngine(model, tokenizer, max_batch_size=trainer.eval_batch_size)
    stack.callback(engine.close)
    return SampleWriter(
        data.validation,
        engine=CheckedEngine(engine, vocabulary_size=vocabulary_size(config.model)),
        transport=sync_within_process(engine, folder.root),
        decode=lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False)),
        sampling=sampling_params(trainer.eval_sampling),
        num_samples=trainer.eval_samples,
        seed=config.seed,
        timeout_s=trainer.eval_sample_timeout_s,
        folder=folder.samples,
    )
