"""The data of a supervised run: examples, the steps that they fill, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.batch.planner import training_limit
from skyrl_train.config import SFTConfig, SFTDataConfig, SFTTrainerConfig
from skyrl_train.config.data import NO_HELD_OUT
from skyrl_train.config.models import ModelConfig
from skyrl_train.config.rules import data_parallel_size
from skyrl_train.data import BatchLoader, find_sources
from skyrl_train.data.sft import (
    Closing,
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
from skyrl_train.errors import counted
from skyrl_train.model import load_tokenizer
from skyrl_train.model.files import check_special_tokens, check_token_ids, image_reading
from skyrl_train.trainers.checkpoints import DataFingerprint


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


@dataclass(frozen=True, kw_only=True)
class SFTPlan:
    """Sizes that follow from the configuration and the data; `plan.json`."""

    num_examples: int
    num_examples_per_epoch: int
    """Weights counted."""
    num_tokens: int
    """Of all examples."""
    total_steps: int
    """Optimizer steps."""
    step: str
    """What makes one."""


def load_sft_data(config: SFTDataConfig, model: ModelConfig, *, on_progress: Callable[[str, int], None]) -> SFTData:
    """Reads, tokenises and measures all examples. Raises DataError, ModelError (the tokenizer), ConfigError."""
    notes: list[str] = []
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
    check_special_tokens(model)

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
    return StepStream(data.train.lengths, order, _closing(config), config.data.incomplete_step)


def _closing(config: SFTConfig) -> Closing:
    trainer = config.trainer
    if trainer.docs_per_step:
        return by_documents(
            trainer.docs_per_step,
            num_ranks=_num_shares(config),
            admits=training_limit(trainer),
            exact=trainer.docs_per_step_exact,
        )
    return by_tokens(trainer.tokens_per_step) if trainer.tokens_per_step else by_rows(trainer.batch_size)


def build_loader(config: SFTConfig, data: SFTData, stack: ExitStack) -> BatchLoader:
    """Return the batches. `stack` ends the thread that prefetches them."""
    loader = BatchLoader(
        build_stream(config, data),
        data.train,
        _collator(config, data),
        is_async=config.trainer.async_batch_collation,
    )
    return stack.enter_context(loader)


def _collator(config: SFTConfig, data: SFTData) -> Collator:
    trainer = config.trainer
    if trainer.layout == "packed":
        return PackedDataCollator(
            data.train,
            max_tokens_per_row=trainer.max_tokens_per_microbatch,
            align=trainer.pad_to_multiple_of,
            num_ranks=_num_shares(config),
        )
    return DefaultCollator(data.train, align=trainer.pad_to_multiple_of)


def _num_shares(config: SFTConfig) -> int:
    """Return the number of data-parallel ranks."""
    return data_parallel_size(config.placement.policy_num_workers, config.strategy.ranks_per_share)
