"""The configuration: one frozen dataclass per group under `conf/`, a docstring under each field.

Types carry their rules: `Literal` lists the choices, `Annotated[int, Range(1)]` the bounds, and `Forks[...]`, or another
class of `config/rules.py`, whether a run may go on from a checkpoint with another value. `config/load.py` turns a composed
Hydra config into these classes and reports every violation at once; rules between fields live in
`config/validate.py`. `docs/configuration.md` is generated from this file. The defaults here are those of `conf/`;
a test keeps the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.generation import GeneratorConfig
from skyrl_train.config.micro_batching import MicroBatchConfig
from skyrl_train.config.parts import (
    BATCH_RULES,
    CALLBACKS,
    DATA_READERS,
    ENVIRONMENTS,
    METRICS,
    MODEL_LOADERS,
    OPTIMIZERS,
    PROMPT_ORDERS,
    ROW_FORMATS,
    SCHEDULES,
    TRACKERS,
)
from skyrl_train.config.placement import PlacementConfig as PlacementConfig
from skyrl_train.config.placement import PlatformConfig as PlatformConfig
from skyrl_train.config.placement import StrategyConfig as StrategyConfig
from skyrl_train.config.rules import (
    CutsRows,
    EndsSchedule,
    Fixed,
    Forks,
    Fraction,
    Free,
    LayoutOnly,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    ReadWith,
    Seconds,
    StandsFor,
)
from skyrl_train.registry import PartSpec


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """`model.lora`: train a low-rank adapter in place of the weights. The reference is the model without it."""

    rank: Fixed[NonNegativeInt] = 0
    """Rank of the adapter; 0 trains all weights."""
    alpha: Forks[PositiveFloat] = 32.0
    """The adapter's output is multiplied by alpha / rank."""
    dropout: Forks[Annotated[float, Range(0.0, 0.95)]] = 0.0
    """Share of the adapter's inputs that is dropped (supervised training only)."""
    targets: Fixed[tuple[str, ...]] = ("all-linear",)
    """Names of the layers that are adapted, e.g. `[q_proj,v_proj]`; `all-linear` is all but the output head."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`model=`: the policy's model and tokenizer."""

    path: Fixed[str] = "builtin:tiny_qwen2"
    """Folder in Hugging Face format, a hub name, or `builtin:NAME` for a model inside the package."""
    tokenizer_path: Fixed[str | None] = None
    """Where the tokenizer is, if not with the model."""
    revision: Fixed[str | None] = None
    """Branch, tag or commit of a hub model."""
    dtype: Forks[Literal["float32", "bfloat16"]] = "float32"
    """Type of the forward pass; master weights and optimizer state are float32."""
    attention: LayoutOnly[Literal["auto", "sdpa", "eager", "flash_attention_2"]] = "auto"
    """Attention kernel for the padded layout; auto is sdpa."""
    gradient_checkpointing: LayoutOnly[bool] = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: LayoutOnly[bool] = False
    """Compile the decoder layers with torch.compile: one graph for all sizes; takes a while at the first forward."""
    trust_remote_code: Free[bool] = False
    """Run Python code that comes with the model. Off: such a model is refused."""
    loader: Forks[Annotated[PartSpec, MODEL_LOADERS]] = "transformers"
    """What reads the weights of every model that is trained, scored, or generates in this process."""
    lora: Annotated[LoraConfig, ReadWith("rank")] = field(default_factory=LoraConfig)
    """Train an adapter."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`data=`: prompts for training and for evaluation."""

    train: Free[tuple[str, ...]] = ("builtin:word_problems/train",)
    """Parquet or JSON-lines files, folders of them, hub names (`owner/name:split`, `owner/name/config:split`), or
    `builtin:NAME/SPLIT`."""
    validation: Free[tuple[str, ...]] = ("builtin:word_problems/validation",)
    """Held-out prompts; empty turns evaluation off."""
    reader: Free[Annotated[PartSpec, DATA_READERS]] = "by_name"
    """How an entry of `train` or `validation` is read: inferred from its name, as one kind of file whatever it is called,
    or by a custom function of the entry, which yields rows (mappings of columns to values)."""
    row_format: Free[Annotated[PartSpec, ROW_FORMATS]] = "prompt"
    """What rows without a `prompt` are: `gsm8k`, as its makers publish it, or a custom function of a `Row`
    (`data/rows.py`), which returns the columns that it should have. `prompt` refuses them."""
    max_train_prompts: Free[NonNegativeInt] = 0
    """Use only the first so many training prompts; 0 is all."""
    max_validation_prompts: Free[NonNegativeInt] = 0
    """Use only the first so many held-out prompts; 0 is all."""
    max_prompt_length: Free[PositiveInt] = 256
    """Tokens. A longer first prompt is handled by `over_long`."""
    over_long: Free[Literal["drop", "error"]] = "drop"
    """What becomes of a prompt over `max_prompt_length`: left out and counted, or refused before training."""
    shuffle: Forks[bool] = True
    """Another order each epoch, as `order` says; false: the order of the data."""
    order: Forks[Annotated[PartSpec, PROMPT_ORDERS]] = "by_seed"
    """Order of the training prompts in an epoch. by_seed: random, derived from `seed`."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """`environment=`: where answers are scored."""

    env_class: Forks[Annotated[PartSpec | None, ENVIRONMENTS]] = "word_problems"
    """A built-in name, one registered in skyrl-gym, or a custom class; scores all rows, whatever they name. Its settings
    stand beside it, e.g. `{_target_: text2sql, db_path: /databases}`. null (`environment=by_row`) takes each row's own
    `env_class`."""
    step_timeout_s: Free[Seconds] = 60.0
    """Deadline of each `init`, `step` and `close`. An environment that exceeds it fails its trajectory, not the run."""
    isolation: Free[Literal["auto", "process", "thread"]] = "auto"
    """Where environments run. process: in worker processes, which are killed at the deadline and take nothing else down;
    thread: on threads of this process, for trusted, cheap code; auto: threads for the bundled environment, processes for all
    others."""
    placement: Free[Literal["local", "ray"]] = "local"
    """Where worker processes are: on this machine, or on every node of the Ray cluster."""
    num_workers: Free[PositiveInt] = 16
    """Environment calls at a time: threads, or worker processes at most. A process hosts many environments in turn."""
    worker_memory_gb: Free[PositiveFloat] = 4.0
    """What a worker process may allocate. Beyond it is a MemoryError, which fails the trajectory."""
    allowed: Free[tuple[str, ...]] = ()
    """Custom environments (`package.module:attr`) that data rows may name in `env_class`, which otherwise name registered
    ones alone: whoever writes data does not choose what code runs."""
    max_failed_fraction: Free[Fraction] = 0.5
    """Stop the run when a larger share of a batch's trajectories failed: something is broken for good."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    name: Annotated[PartSpec, OPTIMIZERS] = "adamw"
    """sgd has no momentum: its update is the gradient, which makes runs easy to compare."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's averaging coefficients."""
    eps: PositiveFloat = 1e-8
    """AdamW's denominator term."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay; not applied to biases and norms."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip the global gradient norm; 0 is off."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps from 0 to the peak learning rate."""
    schedule: Annotated[PartSpec, SCHEDULES] = "constant"
    """After warm-up, over the optimizer steps that the batch plan announces."""
    min_lr_ratio: Fraction = 0.0
    """Where linear and cosine end, as a share of `lr`."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """`trainer.policy`: how the policy is updated."""

    optimizer: Forks[OptimizerConfig] = field(default_factory=OptimizerConfig)
    """The policy's optimizer."""


@dataclass(frozen=True, kw_only=True)
class CriticModelConfig:
    """`critic.model`: the value model."""

    path: Forks[str] = ""
    """Folder, hub name or `builtin:NAME`, `policy` for a copy of the policy's weights with a new value head, or empty
    for no critic. The `score` head of a reward model with one label is kept; a new head starts at 0."""
    lora: Annotated[LoraConfig, ReadWith("rank")] = field(default_factory=LoraConfig)
    """Train an adapter and the value head in place of all weights; independent of the policy's `model.lora`."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """`critic`: the value model of PPO."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """What it starts from."""
    optimizer: Forks[OptimizerConfig] = field(default_factory=OptimizerConfig)
    """Its own optimizer."""


@dataclass(frozen=True, kw_only=True)
class ReferenceModelConfig:
    """`reference.model`: what the policy is held near, or learns from."""

    path: Forks[str] = "policy"
    """Folder or hub name, or `policy` for the policy as it starts. It reads the policy's tokens, so it must share the
    policy's tokenizer."""


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """`reference`: the model of the KL terms, and the teacher of `algorithm=distillation`. Loaded only where used."""

    model: ReferenceModelConfig = field(default_factory=ReferenceModelConfig)
    """What it is."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig(MicroBatchConfig):
    """What `trainer` means alike in reinforcement learning and in supervised training; defaults may differ."""

    eval_before_train: Free[bool] = True
    """Evaluate once before the first step, so that curves start at the starting point."""
    eval_interval: Free[NonNegativeInt] = 10
    """Evaluate every so many steps; 0 only before and after."""
    ckpt_interval: Free[NonNegativeInt] = 10
    """Save every so many steps; 0 only at the end and on a signal."""
    stop_grace_s: Free[NonNegativeFloat] = 0.0
    """Seconds that the running step may still take after SIGTERM, Ctrl-C, SIGHUP or SIGUSR1; the run then ends at the step
    before. Less than the time until whoever sent the signal kills, by the time that a checkpoint takes. 0: no limit."""
    max_ckpts_to_keep: Free[PositiveInt] = 2
    """Older checkpoints are deleted after a newer one is complete."""
    max_failed_saves: Free[PositiveInt] = 3
    """Steps in a row at which the disk refuses, after which the run ends; until then it goes on and tries again after
    each step."""
    resume_mode: Free[Literal["latest", "none", "from_path", "fork"]] = "latest"
    """latest: from this output folder, if it holds a checkpoint. from_path: from `resume_path`. fork: a new run begins at
    `resume_path`, with other settings."""
    resume_path: Free[str] = ""
    """A checkpoint folder (`.../checkpoints/step_000010`), or a run's output folder."""
    max_restarts: Free[NonNegativeInt] = 3
    """How often a run on Ray goes on from its last checkpoint by itself when a worker or node died or hangs; 0 ends it."""
    metrics: Free[tuple[Annotated[PartSpec, METRICS], ...]] = ()
    """Custom metrics: functions of a step's training rows and, in reinforcement learning, of its rollouts."""
    callbacks: Free[tuple[Annotated[PartSpec, CALLBACKS], ...]] = ()
    """Functions that are told of the run's start, steps, evaluations, checkpoints and end. They read and change nothing."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(LoopConfig):
    """`trainer`: the loop, its batch sizes, and what is kept."""

    total_steps: EndsSchedule[NonNegativeInt] = 0
    """Training batches in all; 0 derives it from `epochs`."""
    epochs: EndsSchedule[PositiveInt] = 1
    """Passes over the training prompts, where `total_steps` is 0."""
    train_batch_size: Forks[PositiveInt] = 32
    """Prompts per training batch (rollout)."""
    policy_mini_batch_size: Forks[PositiveInt] = 16
    """Prompts per optimizer step of the policy; must divide `train_batch_size`."""
    critic_mini_batch_size: Forks[PositiveInt] = 16
    """Prompts per optimizer step of the critic; must divide `train_batch_size`."""
    update_epochs_per_batch: Forks[PositiveInt] = 1
    """Passes over each training batch."""
    auto_micro_batch_size: CutsRows[Annotated[bool, StandsFor("micro_batching", "auto")]] = False
    """The same as `micro_batching=auto`: no size is stated, each model runs the largest micro-batches that fit."""
    docs_per_step: Forks[NonNegativeInt] = 0
    """Close an optimizer step at so many rollouts instead of at a fixed number of prompts; 0 is off."""
    docs_per_step_exact: Forks[bool] = False
    """Cut the last micro-batch so that a step has exactly `docs_per_step` rollouts."""
    batch_validation: LayoutOnly[Literal["strict", "relaxed"]] = "strict"
    """strict refuses uneven divisions over ranks and micro-batches; relaxed pads them and says what it costs."""
    batch_rules: Free[tuple[Annotated[PartSpec, BATCH_RULES], ...]] = ("sizes",)
    """What is checked of batch sizes before a run; custom rules are added (`[sizes, my_code:rule]`) or take its place."""
    algorithm: Forks[AlgorithmConfig] = field(default_factory=AlgorithmConfig)
    """Advantages, losses, KL."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The policy's optimizer."""
    eval_batch_size: Free[PositiveInt] = 256
    """Held-out prompts generated together."""
    dump_rollouts: Free[bool] = True
    """Write every trajectory to `rollouts/` as JSON lines."""
    export_hf: Free[bool] = True
    """Write the final policy in Hugging Face format to `export/`."""


@dataclass(frozen=True, kw_only=True)
class ConsoleConfig:
    """`tracker=console`."""

    enabled: bool = False
    """One line a step; progress bars inside long phases where the output is a terminal."""


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """`tracker=wandb`."""

    enabled: bool = False
    """Log to Weights & Biases."""
    project: str = "skyrl_train"
    """Project name."""
    entity: str | None = None
    """Team or user; None is your default."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """auto is online where a key is configured, else offline (`wandb sync` uploads later)."""


@dataclass(frozen=True, kw_only=True)
class TensorboardConfig:
    """`tracker=tensorboard`."""

    enabled: bool = False
    """Write event files to `tensorboard/` in the output folder."""


@dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """`tracker=console|wandb|tensorboard`, or several: `tracker=[console,wandb]`. `metrics.jsonl` is always written."""

    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    """Lines for a person."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""
    tensorboard: TensorboardConfig = field(default_factory=TensorboardConfig)
    """TensorBoard."""
    custom: tuple[Annotated[PartSpec, TRACKERS], ...] = ()
    """Custom trackers, e.g. `[{_target_: my_code:Lines, name: x}]`: each is made with the run's folder."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """`plan`: read by `python -m skyrl_train.plan` only."""

    lengths: str = ""
    """Recorded rollouts (a JSON-lines file, or a run's `rollouts/`) whose lengths the plan is made for; empty guesses."""
    num_train_prompts: NonNegativeInt = 0
    """How many training prompts there are, where the data is not on this machine; 0 counts them."""
    device_memory_gb: NonNegativeFloat = 0.0
    """Memory of one device in GB (10^9 bytes): the plan then shows what each pass holds and the largest micro-batch that
    fits. 0 leaves memory out."""
    architecture: str = ""
    """A model whose sizes stand for those of `model.path` where its config.json is not on this machine: a folder with
    one, or the name of a well-known model, e.g. `Qwen2.5-7B`."""
    rates: str = ""
    """The folder of a run whose `metrics.jsonl` says how fast one rank, with its share of the engines, is: the plan then
    shows the time of each phase, and device-hours. Recorded rollouts there are the lengths, unless `plan.lengths` says
    others."""
    generated_tokens_per_second: NonNegativeFloat = 0.0
    """Tokens that the engines of one rank sample, in place of a measured rate; 0 states none."""
    scored_tokens_per_second: NonNegativeFloat = 0.0
    """Positions that one rank computes in forwards alone; 0 is three times what it trains, or as measured."""
    trained_tokens_per_second: NonNegativeFloat = 0.0
    """Positions that one rank computes in forwards and backwards; 0 states none."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every kind of run depends on: reinforcement learning's `Config`, and `SFTConfig`."""

    run_name: Free[str] = "skyrl_train"
    """Shown by trackers and in the output folder's name."""
    seed: Forks[NonNegativeInt] = 0
    """Every random choice is derived from it."""
    deterministic: LayoutOnly[bool] = False
    """On GPUs, take only kernels whose result does not vary from call to call, in training and in vLLM: a resumed run is
    then identical, as it always is on a CPU. Slower; without it rounding may differ, but not data, prompts and seeds."""
    output_dir: Free[str] = "outputs"
    """Where the run writes; Hydra's run folder unless stated (`hydra.run.dir=...` moves it)."""
    platform: LayoutOnly[PlatformConfig] = field(default_factory=PlatformConfig)
    """What the machine offers."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model that is trained."""
    strategy: LayoutOnly[StrategyConfig] = field(default_factory=StrategyConfig)
    """How a model is spread over ranks."""
    placement: LayoutOnly[PlacementConfig] = field(default_factory=PlacementConfig)
    """Which processes run where."""
    tracker: Free[TrackerConfig] = field(default_factory=TrackerConfig)
    """Where metrics go."""


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Everything a run depends on."""

    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Where answers are scored."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """How rollouts are made."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The loop."""
    critic: Annotated[CriticConfig, ReadWith("model.path")] = field(default_factory=CriticConfig)
    """The value model."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """The reference model."""
    plan: Free[PlanConfig] = field(default_factory=PlanConfig)
    """What a plan is made for; nothing else reads it."""
