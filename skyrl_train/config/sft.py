"""The configuration of supervised training (`conf/sft.yaml`): one frozen dataclass per section, as in `schema.py`.

What it shares with reinforcement learning is declared there, in `RunConfig` and `LoopConfig`; here are its own settings, and
defaults that differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from skyrl_train.config.data.sources import SourcesConfig
from skyrl_train.config.fields.fields import (
    BatchSize,
    CutsRows,
    EndsSchedule,
    Forks,
    Free,
    LayoutOnly,
    NonNegativeFloat,
    NonNegativeInt,
    Of,
    PositiveInt,
    Range,
    ReadWith,
    Rule,
    Seconds,
)
from skyrl_train.config.models.engines import SamplingConfig
from skyrl_train.config.models.models import OptimizerConfig
from skyrl_train.config.models.placement import PlacementConfig, StrategyConfig
from skyrl_train.config.rules.batch_rules import data_parallel_size
from skyrl_train.config.rules.validate import SHARED_RULES
from skyrl_train.config.schema import Config, LoopConfig, RunConfig
from skyrl_train.errors import Violation
from skyrl_train.parts import MICRO_BATCH_STRATEGIES
from skyrl_train.registry import PartSpec

Weight = Annotated[float, Range(0.0)]


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig(SourcesConfig):
    """`data` (`sft_data=`): examples to learn from, and held-out ones."""

    weights: Forks[tuple[Weight, ...]] = ()
    """Uses of each entry's rows per epoch (0.5: half, alternating); empty: once."""
    max_train_rows: Free[NonNegativeInt] = 0
    """The first so many; 0 is all."""
    max_validation_rows: Free[NonNegativeInt] = 0
    """The first so many of each held-out set; 0 is all."""
    format: Free[Literal["auto", "chat", "prompt_completion", "alpaca", "text"]] = "auto"
    """Columns of rows; auto looks at each row."""
    prompt_column: Free[str] = "prompt"
    """Prompt (text or messages), dots into nested columns."""
    completion_column: Free[str] = "completion"
    """Answer (text or messages), such as `extra_info.answer`."""
    chat_template: Free[bool] = True
    """Texts become chat messages; false: plain text."""
    template_kwargs: Free[Mapping[str, Any]] = field(default_factory=dict)
    """For the chat template, such as `{enable_thinking: false}`."""
    loss_on: Free[Literal["last", "all"]] = "all"
    """Train on a conversation's last assistant message, or all."""
    max_length: Forks[PositiveInt] = 1024
    """Tokens of an example."""
    over_long: Forks[Literal["truncate", "drop", "error"]] = "truncate"
    """Longer examples are cut, left out, or refused before training; counted."""
    incomplete_step: Forks[Literal["keep", "drop", "wrap"]] = "wrap"
    """An epoch's remainder: a short step, left out, or filled from the next epoch."""
    cache: Free[bool] = True
    """Keep tokenised sources on disk for other runs."""
    cache_dir: Free[str] = ""
    """Where; empty: `$SKYRL_TRAIN_CACHE`, or `skyrl_train` in the user's cache folder."""


@dataclass(frozen=True, kw_only=True)
class SFTTrainerConfig(LoopConfig):
    """`trainer`: the loop, what makes a step, and what is kept."""

    micro_batching: CutsRows[Annotated[PartSpec, MICRO_BATCH_STRATEGIES]] = "token_budget"
    micro_train_batch_size_per_gpu: CutsRows[BatchSize] = 8
    micro_forward_batch_size_per_gpu: LayoutOnly[BatchSize] = 16
    eval_interval: Free[NonNegativeInt] = 50
    ckpt_interval: Free[NonNegativeInt] = 50
    num_steps: EndsSchedule[NonNegativeInt] = 0
    """Optimizer steps in all; 0 derives it from `num_epochs`."""
    num_epochs: EndsSchedule[PositiveInt] = 1
    """Passes over the training examples, where `num_steps` is 0."""
    batch_size: Forks[BatchSize] = 32
    """Examples per optimizer step, in all."""
    tokens_per_step: Forks[NonNegativeInt] = 0
    """Instead: as many examples as hold at most so many tokens; 0 is off."""
    pad_to_multiple_of: CutsRows[PositiveInt] = 1
    """Fill rows to a multiple of so many tokens, which count against caps."""
    async_batch_collation: Free[bool] = True
    """Make the next batch on a thread; batches are the same."""
    optimizer: Forks[OptimizerConfig] = field(default_factory=lambda: OptimizerConfig(lr=1e-5, schedule="cosine"))
    """Optimizer and learning-rate schedule."""
    eval_batch_size: Free[BatchSize] = 64
    """Held-out examples scored together."""
    eval_samples: Free[NonNegativeInt] = 0
    """Answers per evaluation, from each held-out set's first examples, into `samples/`."""
    eval_sampling: Annotated[Free[SamplingConfig], ReadWith(".eval_samples")] = field(
        default_factory=lambda: SamplingConfig(temperature=0.0)
    )
    """How they are sampled; greedy unless stated."""
    eval_sample_timeout_s: Annotated[Free[Seconds], ReadWith(".eval_samples")] = 600.0
    """Deadline of one evaluation's samples."""
    early_stopping_patience: Free[NonNegativeInt] = 0
    """Stop after so many evaluations without a lower loss; 0 is off."""
    early_stopping_min_delta: Annotated[Free[NonNegativeFloat], Of(".early_stopping_patience")] = 0.0
    """Smallest decrease that counts."""
    keep_best: Free[bool] = False
    """Keep the checkpoint of lowest held-out loss in `best/`."""
    export: Free[Literal["last", "best", "none"]] = "last"
    """Weights to write to `export/` at the end, in Hugging Face format."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(RunConfig):
    """Everything a supervised run depends on."""

    run_name: Free[str] = "sft"
    sweep_metric: Free[str] = "eval/loss"
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    """Examples."""
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
    """The loop."""

    @property
    def longest_row(self) -> int:
        """The most tokens that a trained row may have."""
        return self.data.max_length


AnyConfig = Config | SFTConfig
"""The root of either kind of run."""


def _sources(data: SFTDataConfig) -> Iterator[Violation]:
    if not data.train:
        yield Violation.of("data.train", [], "must name a source", "try sft_data=word_problems")


def _weights(data: SFTDataConfig) -> Iterator[Violation]:
    if data.weights and len(data.weights) != len(data.train):
        rule = f"must be one for each of the {len(data.train)} entries of data.train"
        remedy = "Drop data.weights to use each source once an epoch"
        yield Violation.of("data.weights", list(data.weights), rule, remedy)


def _ends_of_steps(trainer: SFTTrainerConfig) -> Iterator[Violation]:
    if trainer.tokens_per_step and trainer.docs_per_step:
        rule = f"excludes trainer.tokens_per_step={trainer.tokens_per_step}: a step ends in one way"
        yield Violation.of("trainer.docs_per_step", trainer.docs_per_step, rule, "Set one of them to 0")


def _packing(trainer: SFTTrainerConfig, data: SFTDataConfig) -> list[Violation]:
    """A packed row holds whole examples and their padding within the cap."""
    length = data.max_length
    align = trainer.pad_to_multiple_of
    aligned = -(-length // align) * align
    if trainer.layout != "packed" or aligned <= trainer.max_tokens_per_microbatch:
        return []
    padded = f" ({aligned} with trainer.pad_to_multiple_of={align})" if aligned > length else ""
    return [
        Violation.of(
            "trainer.max_tokens_per_microbatch",
            trainer.max_tokens_per_microbatch,
            f"must hold the longest example with trainer.layout=packed: data.max_length={length}{padded}",
            f"Try trainer.max_tokens_per_microbatch={aligned}",
        )
    ]


def _needs_validation(trainer: SFTTrainerConfig, data: SFTDataConfig, name: str) -> Iterator[Violation]:
    """A setting of `trainer` that reads the held-out loss needs held-out examples."""
    value = getattr(trainer, name)
    if value and value not in ("last", "none") and not data.held_out:
        yield Violation.of(f"trainer.{name}", value, "needs held-out examples", "Set data.validation=[FILE]")


def _ranks(trainer: SFTTrainerConfig, placement: PlacementConfig, strategy: StrategyConfig) -> Iterator[Violation]:
    """Ranks come in whole groups, and each of them has an example of a step that counts examples."""
    field, workers, size = "placement.policy_num_workers", placement.policy_num_workers, strategy.ranks_per_share
    shares = data_parallel_size(workers, size)
    if workers % size:
        rule = f"must be a multiple of {strategy.stated_sharing}: so many ranks share each micro-batch"
        yield Violation.of(
            field, workers, rule, f"try {field}={size * shares} or {field}={size * (workers // size + 1)}"
        )
    elif trainer.batch_size < shares and not trainer.tokens_per_step and not trainer.docs_per_step:
        rule = f"must be at most the trainer.batch_size={trainer.batch_size} examples of a step: a rank would have none"
        yield Violation.of(
            field, workers, rule, f"try trainer.batch_size={shares}, or {field}={trainer.batch_size * size}"
        )


def _no_engines(placement: PlacementConfig) -> Iterator[Violation]:
    if placement.inference_num_nodes:
        rule, remedy = "is read by reinforcement learning only", "drop placement.inference_num_nodes"
        yield Violation.of("placement.inference_num_nodes", placement.inference_num_nodes, rule, remedy)


SFT_RULES: tuple[Rule, ...] = (
    *SHARED_RULES,
    _ranks,
    _no_engines,
    _sources,
    _weights,
    _ends_of_steps,
    _packing,
    *(
        partial(_needs_validation, name=name)
        for name in ("early_stopping_patience", "keep_best", "export", "eval_samples")
    ),
)
"""Every rule between fields of supervised training."""
