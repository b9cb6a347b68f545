"""The configuration of supervised training (`conf/sft.yaml`): one frozen dataclass per section, as in `schema.py`.

Model, optimizer, platform, strategy, placement and tracker are the sections of reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.generation import GeneratorConfig, SamplingConfig
from skyrl_train.config.rules import NonNegativeFloat, NonNegativeInt, PositiveInt, Range, Seconds
from skyrl_train.config.schema import (
    Config,
    ModelConfig,
    OptimizerConfig,
    PlacementConfig,
    PlatformConfig,
    PolicyConfig,
    StrategyConfig,
    TrackerConfig,
    TrainerConfig,
)
from skyrl_train.config.validate import LORA_DROPOUT, validate_config
from skyrl_train.errors import Violation

Weight = Annotated[float, Range(0.0)]


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig:
    """`data` (`sft_data=`): examples to learn from, and held-out ones."""

    train: tuple[str, ...] = ("builtin:word_problems/train",)
    """Parquet or JSON-lines files, folders of them, hub names (`owner/name:split`, `owner/name/config:split`), or
    `builtin:NAME/SPLIT`."""
    weights: tuple[Weight, ...] = ()
    """For each entry of `train`, how often its rows are used per epoch (0.5: half of them, in turns); empty is once."""
    validation: tuple[str, ...] = ("builtin:word_problems/validation",)
    """Held-out examples: each entry is a set with a loss of its own. Empty turns evaluation off."""
    max_train_rows: NonNegativeInt = 0
    """Read only the first so many training rows; 0 is all."""
    max_validation_rows: NonNegativeInt = 0
    """Read only the first so many rows of each held-out set; 0 is all."""
    format: Literal["auto", "chat", "prompt_completion", "alpaca", "text"] = "auto"
    """Which columns rows have; auto looks at each row."""
    prompt_column: str = "prompt"
    """Column with the prompt (text or messages), with dots into nested ones."""
    completion_column: str = "completion"
    """Column with the answer (text or messages), e.g. `answer` or `extra_info.answer`."""
    chat_template: bool = True
    """Prompt and answer given as texts become chat messages. false: they are trained as plain text."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Handed to the chat template, e.g. `{enable_thinking: false}`."""
    loss_on: Literal["last", "all"] = "all"
    """Of a conversation, train on the assistant's last message or on all of them."""
    max_length: PositiveInt = 1024
    """Tokens of an example. A longer one is handled by `over_long`."""
    over_long: Literal["truncate", "drop", "error"] = "truncate"
    """What becomes of a longer example: cut, left out, or refused before training. Counted in any case."""
    shuffle: bool = True
    """Another order each epoch, derived from `seed`."""
    incomplete_step: Literal["keep", "drop", "wrap"] = "wrap"
    """What is left of an epoch and fills no step: a short step, left out, or filled up from the next epoch."""
    cache: bool = True
    """Keep tokenised sources on disk, for later runs and for those that run at the same time."""
    cache_dir: str = ""
    """Where; empty is `$SKYRL_TRAIN_CACHE`, or `skyrl_train` in the user's cache folder."""


@dataclass(frozen=True, kw_only=True)
class SFTTrainerConfig:
    """`trainer`: the loop, what makes a step, and what is kept."""

    num_steps: NonNegativeInt = 0
    """Optimizer steps in all; 0 derives it from `num_epochs`."""
    num_epochs: PositiveInt = 1
    """Passes over the training examples, where `num_steps` is 0."""
    batch_size: PositiveInt = 32
    """Examples per optimizer step, over all ranks and micro-batches."""
    tokens_per_step: NonNegativeInt = 0
    """Instead: as many examples per optimizer step as hold at most so many tokens; 0 is off."""
    docs_per_step: NonNegativeInt = 0
    """Instead: fill micro-batches until a step has at least so many examples; 0 is off."""
    docs_per_step_exact: bool = False
    """Cut the last micro-batch so that a step has exactly `docs_per_step` examples."""
    layout: Literal["padded", "packed", "prefix_shared", "auto"] = "padded"
    """packed: several examples in a row, as many as a micro-batch takes. Changes speed and memory, not the gradient."""
    micro_batching: str = "token_budget"
    """`token_budget`, `fixed` rows, `auto` (sizes itself), or your own strategy as `package.module:attr`."""
    micro_train_batch_size_per_gpu: PositiveInt = 8
    """Rows per forward and backward on one rank (fixed)."""
    micro_forward_batch_size_per_gpu: PositiveInt = 16
    """Rows per forward-only pass on one rank (fixed)."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Hard cap on computed token positions of a forward and backward on one rank (token_budget, packed rows)."""
    max_tokens_per_forward_microbatch: PositiveInt = 16384
    """The same for forward-only passes."""
    memory_budget_gb: NonNegativeFloat = 0.0
    """GiB that the models of one process may hold (auto); 0 is what the CUDA device has free. Needed on a CPU."""
    memory_margin: Annotated[float, Range(0.0, 0.5)] = 0.05
    """Share by which a micro-batch may need more than was measured at the start (auto)."""
    memory_probe: Literal["measure", "trace", "both"] = "measure"
    """Where micro-batches that size themselves (auto) know their memory from. measure: forwards and backwards of growing
    size at the start. trace: the plan's prediction (layers counted for known families, traced on tensors without memory
    for others), with nothing run. both: measured, beginning at the prediction, and the difference is told."""
    memory_retries: NonNegativeInt = 3
    """How often one step is cut smaller and computed anew where memory runs out nevertheless (auto)."""
    pad_to_multiple_of: PositiveInt = 1
    """Fill rows up to a multiple of so many tokens; counted against the caps."""
    async_batch_collation: bool = True
    """Make the next batch on a thread while the current one trains. The batches are the same either way."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5, schedule="cosine"))
    """Optimizer and learning-rate schedule."""
    eval_before_train: bool = True
    """Evaluate once before the first step."""
    eval_interval: NonNegativeInt = 50
    """Evaluate every so many steps; 0 only before and after."""
    eval_batch_size: PositiveInt = 64
    """Held-out examples scored together."""
    eval_samples: NonNegativeInt = 0
    """Answers to generate at each evaluation, from the first examples of each held-out set; they go to `samples/`."""
    eval_sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    """How they are sampled; greedy unless stated."""
    eval_sample_timeout_s: Seconds = 600.0
    """Deadline for generating the samples of one evaluation."""
    early_stopping_patience: NonNegativeInt = 0
    """Stop after so many evaluations without a lower loss; 0 is off."""
    early_stopping_min_delta: NonNegativeFloat = 0.0
    """A lower loss counts from this difference on."""
    keep_best: bool = False
    """Keep the checkpoint with the lowest held-out loss in `best/`."""
    export: Literal["last", "best", "none"] = "last"
    """Which weights to write in Hugging Face format to `export/` at the end."""
    ckpt_interval: NonNegativeInt = 50
    """Save every so many steps; 0 only at the end and on a signal."""
    max_ckpts_to_keep: PositiveInt = 2
    """Older checkpoints are deleted after a newer one is complete."""
    resume_mode: Literal["latest", "none", "from_path"] = "latest"
    """latest: from this output folder, if it holds a checkpoint. from_path: from `resume_path`."""
    resume_path: str = ""
    """A checkpoint folder (`.../checkpoints/step_000010`), or a run's output folder."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Everything a supervised run depends on."""

    run_name: str = "sft"
    """Shown by trackers and in the output folder's name."""
    seed: NonNegativeInt = 0
    """Every random choice is derived from it."""
    deterministic: bool = False
    """On GPUs, take only kernels whose result does not vary from call to call: a resumed run is then identical, as it always
    is on a CPU. Slower; without it rounding may differ, while the data do not."""
    output_dir: str = "outputs"
    """Where the run writes; Hydra's run folder unless stated (`hydra.run.dir=...` moves it)."""
    platform: PlatformConfig = field(default_factory=PlatformConfig)
    """What the machine offers."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model to train."""
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    """Examples."""
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
    """The loop."""
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    """How the model is spread over ranks."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Which processes run where."""
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    """Where metrics go."""


AnyConfig = Config | SFTConfig
"""The root of either kind of run."""


def learner_config(config: SFTConfig, *, total_steps: int = 0) -> Config:
    """What a learner of this run is built from: reinforcement learning's configuration with the loss `cross_entropy`.

    Each example is a prompt with one sample, and each training batch one optimizer step.
    """
    trainer = config.trainer
    shared = {name: getattr(trainer, name) for name in _SHARED}
    return Config(
        run_name=config.run_name,
        seed=config.seed,
        deterministic=config.deterministic,
        output_dir=config.output_dir,
        platform=config.platform,
        model=config.model,
        strategy=config.strategy,
        placement=config.placement,
        tracker=config.tracker,
        generator=GeneratorConfig(n_samples_per_prompt=1, merge_stepwise="off"),
        trainer=TrainerConfig(
            total_steps=total_steps,
            train_batch_size=trainer.batch_size,
            policy_mini_batch_size=trainer.batch_size,
            critic_mini_batch_size=trainer.batch_size,
            batch_validation="relaxed",
            policy=PolicyConfig(optimizer=trainer.optimizer),
            algorithm=AlgorithmConfig(
                advantage_estimator="reinforce++", policy_loss="cross_entropy", loss_reduction="token_mean"
            ),
            **shared,
        ),
    )


_SHARED = (
    "layout",
    "micro_batching",
    "micro_train_batch_size_per_gpu",
    "micro_forward_batch_size_per_gpu",
    "max_tokens_per_microbatch",
    "max_tokens_per_forward_microbatch",
    "memory_budget_gb",
    "memory_margin",
    "memory_probe",
    "memory_retries",
    "resume_mode",
    "resume_path",
)
"""Settings of `trainer` that mean the same in both kinds of run."""
_CHECKED = ("trainer.", "placement.", "strategy.", "output_dir", "model.", "platform.")
"""What reinforcement learning's rules say about these holds here too."""


def validate_sft(config: SFTConfig, *, refused: Collection[str] = ()) -> list[Violation]:
    """Every rule between fields that does not hold; `refused` as in `validate_config`."""
    names = {"trainer.policy.optimizer": "trainer.optimizer", "trainer.train_batch_size": "trainer.batch_size"}
    renamed = [field.replace("trainer.optimizer", "trainer.policy.optimizer") for field in refused]
    found = [
        replace(violation, field=_renamed(violation.field, names), remedy=_renamed(violation.remedy, names))
        for violation in validate_config(learner_config(config), refused=renamed)
        if violation.field.startswith(_CHECKED) and violation.field != LORA_DROPOUT
    ]
    own = [*_sources(config), *_steps(config), *_packing(config), *_evaluation(config)]
    return found + [violation for violation in own if violation.field not in refused]


def _renamed(text: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        text = text.replace(old, new)
    return text


def _sources(config: SFTConfig) -> list[Violation]:
    data, found = config.data, []
    if not data.train:
        found.append(
            Violation(field="data.train", rule="must name a source", value="[]", remedy="try sft_data=word_problems")
        )
    if data.weights and len(data.weights) != len(data.train):
        found.append(
            Violation(
                field="data.weights",
                rule=f"must be one for each of the {len(data.train)} entries of data.train",
                value=str(list(data.weights)),
                remedy="Drop data.weights to use each source once an epoch",
            )
        )
    return found


def _steps(config: SFTConfig) -> list[Violation]:
    trainer, found = config.trainer, []
    if trainer.tokens_per_step and trainer.docs_per_step:
        found.append(
            Violation(
                field="trainer.docs_per_step",
                rule=f"excludes trainer.tokens_per_step={trainer.tokens_per_step}: a step ends in one way",
                value=str(trainer.docs_per_step),
                remedy="Set one of them to 0",
            )
        )
    if trainer.docs_per_step_exact and not trainer.docs_per_step:
        found.append(
            Violation(
                field="trainer.docs_per_step_exact",
                rule="does nothing with trainer.docs_per_step=0",
                value="True",
                remedy="Set trainer.docs_per_step, or drop trainer.docs_per_step_exact",
            )
        )
    return found


def _packing(config: SFTConfig) -> list[Violation]:
    """A packed row holds whole examples and their padding within the cap."""
    trainer, length = config.trainer, config.data.max_length
    align = trainer.pad_to_multiple_of
    aligned = -(-length // align) * align
    if trainer.layout != "packed" or aligned <= trainer.max_tokens_per_microbatch:
        return []
    padded = f" ({aligned} with trainer.pad_to_multiple_of={align})" if aligned > length else ""
    return [
        Violation(
            field="trainer.max_tokens_per_microbatch",
            rule=f"must hold the longest example with trainer.layout=packed: data.max_length={length}{padded}",
            value=str(trainer.max_tokens_per_microbatch),
            remedy=f"Try trainer.max_tokens_per_microbatch={aligned}",
        )
    ]


def _evaluation(config: SFTConfig) -> list[Violation]:
    """What reads the held-out loss needs held-out examples."""
    if config.data.validation:
        return []
    trainer = config.trainer
    needing = {
        "trainer.early_stopping_patience": trainer.early_stopping_patience > 0,
        "trainer.keep_best": trainer.keep_best,
        "trainer.export": trainer.export == "best",
        "trainer.eval_samples": trainer.eval_samples > 0,
    }
    return [
        Violation(
            field=name,
            rule="needs held-out examples",
            value=str(getattr(trainer, name.rpartition(".")[2])),
            remedy="Set data.validation=[FILE]",
        )
        for name, is_set in needing.items()
        if is_set
    ]
