"""The configuration: one frozen dataclass per group under `conf/`, a docstring under each field.

Types carry their rules: `Literal` lists the choices, `Annotated[int, Range(1)]` the bounds, `Of(".name", ("fsdp2",))` the
kinds of another setting that it is for, and `Forks[...]`, or another class of `config/fields/fields.py`, whether a run may
go on from a checkpoint with another value. `config/door/load.py`
turns a composed Hydra config into these classes and reports every violation at once; rules between fields live in
`config/rules/validate.py`. The sections that groups of `conf/` choose have files of their own, imported here.
`docs/configuration.md` is generated from all of them. The defaults here are those of `conf/`; a test keeps the two
equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from skyrl_train.config.algorithm.settings import AlgorithmConfig, starts_at_rollout
from skyrl_train.config.data.sources import DataConfig, EnvironmentConfig
from skyrl_train.config.fields.fields import (
    BatchSize,
    CutsRows,
    EndsSchedule,
    Forks,
    Free,
    LayoutChoice,
    LayoutOnly,
    NonNegativeFloat,
    NonNegativeInt,
    Of,
    PositiveFloat,
    PositiveInt,
    Range,
    ReadWith,
)
from skyrl_train.config.models.engines import GeneratorConfig
from skyrl_train.config.models.models import CriticConfig, ModelConfig, PolicyConfig, ReferenceConfig
from skyrl_train.config.models.placement import PlacementConfig, PlatformConfig, StrategyConfig
from skyrl_train.parts import ALERTS, BATCH_RULES, CALLBACKS, METRICS, MICRO_BATCH_STRATEGIES, TRACKERS
from skyrl_train.registry import PartSpec

_SIZED = Of(".micro_batching", reads="memory_budget")


@dataclass(frozen=True, kw_only=True)
class MicroBatchConfig:
    """The settings of `trainer` that decide what one forward computes."""

    layout: CutsRows[LayoutChoice] = "padded"
    """What one forward computes: rows side by side, back to back, or shared prefixes once; auto predicts the cheapest.
    Gradients are the same."""
    micro_batching: CutsRows[Annotated[PartSpec, MICRO_BATCH_STRATEGIES]] = "fixed"
    """How rows are cut into forwards: `fixed` rows, `token_budget`, `auto` (by memory), or a custom planner
    (docs/add_planner.md)."""
    micro_train_batch_size_per_gpu: CutsRows[BatchSize] = 32
    """Rows per forward and backward on one rank (fixed)."""
    micro_forward_batch_size_per_gpu: LayoutOnly[BatchSize] = 64
    """Rows per forward-only pass on one rank (fixed)."""
    max_tokens_per_microbatch: CutsRows[PositiveInt] = 8192
    """Cap on token positions of a forward and backward on one rank (token_budget; packed supervised rows)."""
    max_tokens_per_forward_microbatch: LayoutOnly[PositiveInt] = 16384
    """The same for forward-only passes."""
    max_positions: Annotated[LayoutOnly[PositiveInt], _SIZED] = 65536
    """Most token positions of a forward and backward on one rank; forward-only twice as many."""
    memory_budget_gb: Annotated[LayoutOnly[NonNegativeFloat], _SIZED] = 0.0
    """GiB for the models of one process. 0: what the CUDA device has free. Required on a CPU."""
    memory_margin: LayoutOnly[Annotated[float, Range(0.0, 0.5)]] = 0.05
    """Share by which need may exceed what was measured (auto)."""
    memory_probe: Annotated[
        LayoutOnly[Literal["measure", "trace", "xla", "both"]],
        Of(".micro_batching", reads="memory_budget", values=("trace", "both"), why="a plan reads xla"),
    ] = "measure"
    """How memory is known (docs/memory.md). measure: growing passes at the start. trace: torch's graph, not run. xla:
    XLA's plan (extra `jax`). both: measure, from trace on."""
    memory_retries: Annotated[LayoutOnly[NonNegativeInt], _SIZED] = 3
    """How often a mini-batch is cut smaller when memory runs out."""

    def most_positions(self, *, training: bool) -> int:
        """Return the most positions of one forward where micro-batches size themselves."""
        return self.max_positions * (1 if training else 2)

    @property
    def sizes_itself(self) -> bool:
        """Whether models are probed for the memory that their passes take: for `auto`, and for a custom planner that
        reads `memory_budget`."""
        return "memory_budget" in MICRO_BATCH_STRATEGIES.reads(self.micro_batching).columns


_STALE = Of(".max_staleness", write="trainer.max_staleness=1")
_BETWEEN_TOKENS = Of("generator.backend", reads="in_flight_updates", why="it takes no weights between two tokens")
_ENGINE = Of("generator.backend", ("hf", "vllm", "http"), why="recordings are there before the learner is")


@dataclass(frozen=True, kw_only=True)
class LoopConfig(MicroBatchConfig):
    """What `trainer` means alike in reinforcement learning and in supervised training; defaults may differ."""

    eval_before_train: Free[bool] = True
    """Evaluate before the first step."""
    eval_interval: Free[NonNegativeInt] = 10
    """Evaluate every so many steps; 0 only before and after."""
    ckpt_interval: Free[NonNegativeInt] = 10
    """Save every so many steps; 0 only at the end and on a signal."""
    stop_grace_s: Free[NonNegativeFloat] = 0.0
    """Seconds for the running step after SIGTERM, Ctrl-C, SIGHUP or SIGUSR1; then the run ends at the step before. 0:
    no limit. Leave time for a checkpoint before the kill."""
    max_ckpts_to_keep: Free[PositiveInt] = 2
    """Older checkpoints are deleted once a newer is complete."""
    checkpoint_url: Free[str] = ""
    """Also copy checkpoints there, against loss of the output folder: `s3://bucket/run`, `gs://bucket/run`,
    `file:///mnt/run`, or another of fsspec."""
    checkpoint_timeout_s: Free[PositiveFloat] = 1800.0
    """Deadline of one checkpoint to or from `checkpoint_url`."""
    background_checkpoints: Free[bool] = True
    """Write checkpoints while the run goes on, if host memory has room for copies."""
    max_failed_saves: Free[PositiveInt] = 3
    """Failed saves in a row, to disk or `checkpoint_url`, that end the run."""
    resume_mode: Free[Literal["latest", "none", "from_path", "fork"]] = "latest"
    """latest: this output folder's checkpoint, if any. from_path: `resume_path`. fork: a new run from `resume_path`,
    with other settings."""
    resume_path: Annotated[Free[str], Of(".resume_mode", ("from_path", "fork"))] = ""
    """Checkpoint (`.../checkpoints/step_000010`), output folder, or `checkpoint_url` of a run."""
    max_restarts: Free[NonNegativeInt] = 3
    """How often a Ray run resumes by itself after a dead or hung worker; 0 ends it."""
    profile_steps: Free[tuple[PositiveInt, ...]] = ()
    """Steps to profile, such as `[3,4]`: traces in `profiles/`, memory snapshots on CUDA."""
    capsules: Free[NonNegativeInt] = 0
    """Last steps kept for `skyrl-capsule` (docs/capsules.md), each at a checkpoint's time; a refused step always."""
    docs_per_step: Forks[NonNegativeInt] = 0
    """Close an optimizer step once micro-batches hold so many rollouts or examples; 0 is off."""
    docs_per_step_exact: Annotated[Forks[bool], Of(".docs_per_step")] = False
    """Cut the last micro-batch so that they are exactly so many."""
    metrics: Free[tuple[Annotated[PartSpec, METRICS], ...]] = ()
    """Functions of a step's training rows and rollouts (docs/add_metric.md)."""
    callbacks: Free[tuple[Annotated[PartSpec, CALLBACKS], ...]] = ()
    """Functions told of start, steps, evaluations, checkpoints and end; they change nothing."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(LoopConfig):
    """`trainer`: the loop, its batch sizes, and what is kept."""

    total_steps: EndsSchedule[NonNegativeInt] = 0
    """Training batches in all; 0 derives it from `epochs`."""
    epochs: EndsSchedule[PositiveInt] = 1
    """Passes over the training prompts, where `total_steps` is 0."""
    train_batch_size: Forks[BatchSize] = 32
    """Prompts per training batch."""
    policy_mini_batch_size: Forks[BatchSize] = 16
    """Prompts per optimizer step of the policy; must divide `train_batch_size`."""
    critic_mini_batch_size: Forks[BatchSize] = 16
    """Prompts per optimizer step of the critic; must divide `train_batch_size`."""
    update_epochs_per_batch: Forks[PositiveInt] = 1
    """Passes over each training batch."""
    auto_micro_batch_size: CutsRows[bool] = False
    """The same as `micro_batching=auto`."""
    max_staleness: Annotated[Forks[Annotated[int, Range(0, 1000)]], _ENGINE] = 0
    """Updates by which sampling weights may lag (docs/async.md). 0: rollouts wait for each update."""
    stale_groups: Annotated[
        Forks[Literal["wait", "drop"]],
        _STALE,
        Of(".take_groups", ("first_finished",), why="it drops no prompt for taking long"),
    ] = "wait"
    """Unfinished prompts, too old for the next batch: wait, or drop and count."""
    oversample: Annotated[Forks[Annotated[float, Range(1.0)]], _STALE] = 1.0
    """Prompts in flight per prompt needed; above 1 the first to finish are taken, the rest dropped and counted."""
    take_groups: Annotated[Forks[Literal["first_finished", "in_order"]], _STALE] = "first_finished"
    """first_finished: prompts whose samples ended, which favours short ones where some are dropped. in_order: those
    that began first."""
    in_flight_updates: Annotated[Forks[bool], _STALE, _BETWEEN_TOKENS] = False
    """true: engines take new weights amid responses. false: an update waits for their end."""
    in_flight_cache: Annotated[
        Forks[Literal["recompute", "keep"]], Of(".in_flight_updates", write="trainer.in_flight_updates=true")
    ] = "recompute"
    """Such responses' keys and values. recompute: computed again. keep: left, at no cost; what follows is of no single
    model."""
    batch_validation: LayoutOnly[Literal["strict", "relaxed"]] = "strict"
    """strict refuses uneven division over ranks and micro-batches; relaxed pads, and says the cost."""
    batch_rules: Free[tuple[Annotated[PartSpec, BATCH_RULES], ...]] = ("sizes",)
    """Checks of batch sizes; custom ones are added (`[sizes, my_code:rule]`) or replace it."""
    moe_routing_replay: Forks[bool] = False
    """Mixtures of experts: train with the experts recorded at sampling, weighted by the policy."""
    algorithm: Forks[AlgorithmConfig] = field(default_factory=AlgorithmConfig)
    """Advantages, losses, KL."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The policy's optimizer."""
    eval_batch_size: Free[BatchSize] = 256
    """Held-out prompts generated together."""
    dump_rollouts: Free[bool] = True
    """Write every trajectory to `rollouts/`."""
    export_hf: Free[bool] = True
    """Write the final policy to `export/`, in Hugging Face format."""
    look: Free[Literal["auto", "off", "full"]] = "auto"
    """First look at two prompts' samples (docs/recipes.md): auto before first steps expected over 30 s; full always,
    asking servers too."""

    def __post_init__(self) -> None:
        if self.auto_micro_batch_size and self.micro_batching == "fixed":
            object.__setattr__(self, "micro_batching", "auto")


@dataclass(frozen=True, kw_only=True)
class ConsoleConfig:
    """`tracker=console`."""

    enabled: bool = False
    """One line a step; progress bars on a terminal."""


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """`tracker=wandb`."""

    enabled: bool = False
    """Log to Weights & Biases."""
    project: str = "skyrl_train"
    """Project name."""
    entity: str | None = None
    """Team or user; null: yours."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """auto: online with a key, else offline (`wandb sync` uploads later)."""
    tags: tuple[str, ...] = ()
    """Labels of the run."""
    group: str | None = None
    """Group of runs shown together."""
    notes: str = ""
    """Text shown with it."""
    samples: NonNegativeInt = 10
    """Rollouts per evaluation in a table; 0: none."""
    git: bool = False
    """Show the start folder's commit, and whether files differed."""
    console: bool = False
    """Hand over `run.log`, which has no secrets."""


@dataclass(frozen=True, kw_only=True)
class TensorboardConfig:
    """`tracker=tensorboard`."""

    enabled: bool = False
    """Write to `tensorboard/` in the output folder."""


@dataclass(frozen=True, kw_only=True)
class TrackioConfig:
    """`tracker=trackio`, with the extra `trackio`."""

    enabled: bool = False
    """Log on this machine unless `space` is stated; `trackio show` opens it."""
    project: str = "skyrl_train"
    """Project name."""
    group: str | None = None
    """Group of runs shown together."""
    space: str | None = None
    """Hugging Face Space instead, such as `me/runs`."""
    samples: NonNegativeInt = 10
    """As `tracker.wandb.samples`."""


@dataclass(frozen=True, kw_only=True)
class MlflowConfig:
    """`tracker=mlflow`, with the extra `mlflow`."""

    enabled: bool = False
    """Log to MLflow."""
    experiment: str = "skyrl_train"
    """Experiment name."""
    uri: str = ""
    """Such as `http://127.0.0.1:5000`; empty: MLFLOW_TRACKING_URI, else `mlflow/` in the output folder."""
    samples: NonNegativeInt = 10
    """As `tracker.wandb.samples`."""


@dataclass(frozen=True, kw_only=True)
class AlertsConfig:
    """`alerts`: told once where it begins to hold: as a warning, by trackers that have alerts, and to custom
    functions."""

    stalled_after_s: NonNegativeFloat = 0.0
    """Seconds without a finished step; 0 does not watch."""
    failed: bool = False
    """The run fails, or loses a worker."""
    entropy_below: Annotated[float, Range(0.0)] | None = None
    """`policy/entropy`, nats: the policy collapses."""
    reward_below: float | None = None
    """`reward/mean`."""
    reward_above: float | None = None
    """`reward/mean`: too good to be true."""
    length_below: Annotated[float, Range(0.0)] | None = None
    """`response_length/mean`, tokens."""
    length_above: Annotated[float, Range(0.0)] | None = None
    """`response_length/mean`, tokens."""
    failures_above: Annotated[float, Range(0.0, 1.0)] | None = None
    """`failures/fraction`."""
    mismatch_above: Annotated[float, Range(0.0, 1.0)] | None = 0.3
    """`mismatch/ratio_outside_10_percent` without older weights: engine and trainer compute differently."""
    mismatch_growth_above: PositiveFloat | None = 10.0
    """Mean `mismatch/logprob_diff` over that of the first five steps, or 0.001 nats."""
    kl_at_lr_0_above: Annotated[float, Range(0.0)] | None = 0.01
    """`policy/approx_kl` at learning rate 0."""
    findings: bool = True
    """Problems that `skyrl-doctor` finds, after 20 steps and each doubling."""
    on_alert: tuple[Annotated[PartSpec, ALERTS], ...] = ()
    """Functions called with each (`telemetry/alerts.py: Alert`)."""


@dataclass(frozen=True, kw_only=True)
class PrometheusConfig:
    """`tracker=prometheus`, with the extra `prometheus`."""

    enabled: bool = False
    """Serve the last metrics at `http://127.0.0.1:PORT/metrics`, to this machine alone."""
    port: Annotated[int, Range(0, 65535)] = 9464
    """0: any free one, which the console names."""


@dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """`tracker=console|wandb|tensorboard|trackio|mlflow|prometheus`, or several: `tracker=[console,wandb]`. `metrics.jsonl`
    is always written."""

    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    """Lines for a person."""
    wandb: Annotated[WandbConfig, Of(".wandb.enabled", write="tracker=wandb")] = field(default_factory=WandbConfig)
    """Weights & Biases."""
    tensorboard: TensorboardConfig = field(default_factory=TensorboardConfig)
    """TensorBoard."""
    trackio: Annotated[TrackioConfig, Of(".trackio.enabled", write="tracker=trackio")] = field(
        default_factory=TrackioConfig
    )
    """Trackio."""
    mlflow: Annotated[MlflowConfig, Of(".mlflow.enabled", write="tracker=mlflow")] = field(default_factory=MlflowConfig)
    """MLflow."""
    prometheus: Annotated[PrometheusConfig, Of(".prometheus.enabled", write="tracker=prometheus")] = field(
        default_factory=PrometheusConfig
    )
    """An endpoint for Prometheus."""
    custom: tuple[Annotated[PartSpec, TRACKERS], ...] = ()
    """Such as `[{_target_: my_code:Lines, name: x}]`."""


@dataclass(frozen=True, kw_only=True)
class RolloutsConfig:
    """`rollouts`: what `trainer.dump_rollouts` keeps of rollouts on disk."""

    columns: tuple[Literal["advantages", "policy_logprobs", "reference_logprobs", "entropies"], ...] = (
        "advantages",
        "policy_logprobs",
        "reference_logprobs",
    )
    """Written of each token beside id, mask, version and the engine's log-probability; `entropies` may cost a forward."""
    columns_dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 rounds them."""
    keep_last: NonNegativeInt = 0
    """Steps whose rollouts stay; deleted ones cannot be replayed, failed steps stay. 0 keeps all."""
    sample_fraction: Annotated[float, Range(0.0, 1.0, exclusive_min=True)] = 1.0
    """Share of prompts whose rollouts are written, always the same; below 1 nothing can be replayed."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """`plan`: read by `python -m skyrl_train.plan` only."""

    lengths: str = ""
    """Recorded rollouts (a file, or a run's `rollouts/`) with the lengths; empty guesses."""
    num_train_prompts: NonNegativeInt = 0
    """Training prompts, if the data is elsewhere; 0 counts them."""
    device_memory_gb: NonNegativeFloat = 0.0
    """One device's memory in GB (10^9 bytes), for the largest micro-batch that fits; 0 leaves memory out."""
    architecture: str = ""
    """Sizes in place of `model.path`, without its config.json: a folder, or a name such as `Qwen2.5-7B`."""
    rates: str = ""
    """Folder of a run with speeds (`metrics.jsonl`), and lengths unless `plan.lengths` has some. Empty: measured on a
    CPU, from the data sheet for a GPU. none: no times."""
    generated_tokens_per_second: NonNegativeFloat = 0.0
    """Tokens sampled by one rank's engines; 0: as measured."""
    scored_tokens_per_second: NonNegativeFloat = 0.0
    """Positions of one rank's forwards; 0: three times what it trains, or as measured."""
    trained_tokens_per_second: NonNegativeFloat = 0.0
    """Positions of one rank's forwards and backwards; 0: as measured."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every kind of run depends on: reinforcement learning's `Config`, and `SFTConfig`."""

    run_name: Free[str] = "skyrl_train"
    """Shown by trackers, and in the output folder's name."""
    seed: Forks[Annotated[int, Range(0)]] = 0
    """Every random choice is derived from it."""
    deterministic: LayoutOnly[bool] = False
    """Only repeatable GPU kernels, slower: a resumed run is identical, as on a CPU; otherwise rounding differs."""
    output_dir: Free[str] = "outputs"
    """Where the run writes; Hydra's run folder unless stated."""
    output_access: Free[Literal["owner", "umask"]] = "owner"
    """Readers of a new run folder. owner: its owner (0700, 0600); umask: as the system says."""
    derived: Free[tuple[str, ...]] = ()
    """What follows from model and machine, and why; filled in."""
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
    alerts: Free[AlertsConfig] = field(default_factory=AlertsConfig)
    """What somebody is told of."""
    sweep_metric: Free[str] = "eval/accuracy"
    """Metric whose last value a sweeper (`-m`) is given."""


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
    critic: Annotated[CriticConfig, ReadWith(".critic.model.path")] = field(default_factory=CriticConfig)
    """The value model."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """The reference model."""
    rollouts: Free[RolloutsConfig] = field(default_factory=RolloutsConfig)
    """What stays of rollouts on disk."""
    plan: Free[PlanConfig] = field(default_factory=PlanConfig)
    """What a plan is made for; nothing else reads it."""

    def __post_init__(self) -> None:
        algorithm = self.trainer.algorithm
        if self.generator.quantization == "none" or algorithm.off_policy.weight != "auto":
            return
        corrects = algorithm.proximal != "behaviour" and not starts_at_rollout(algorithm)
        off_policy = replace(algorithm.off_policy, weight="token" if corrects else "none")
        trainer = replace(self.trainer, algorithm=replace(algorithm, off_policy=off_policy))
        object.__setattr__(self, "trainer", trainer)

    @property
    def longest_row(self) -> int:
        """The most tokens that a trained row may have."""
        return self.generator.max_context_length
