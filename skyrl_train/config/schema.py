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
    """What one forward computes: rows side by side, back to back, or each shared prefix once; auto predicts the
    cheapest for each step. Changes speed and memory, never the gradient."""
    micro_batching: CutsRows[Annotated[PartSpec, MICRO_BATCH_STRATEGIES]] = "fixed"
    """How rows are cut into forwards: `fixed` rows, `token_budget`, `auto` (sizes itself), or a custom planner, which sizes
    itself too where it declares that it reads `memory_budget`."""
    micro_train_batch_size_per_gpu: CutsRows[BatchSize] = 32
    """Rows per forward and backward on one rank (fixed)."""
    micro_forward_batch_size_per_gpu: LayoutOnly[BatchSize] = 64
    """Rows per forward-only pass on one rank (fixed)."""
    max_tokens_per_microbatch: CutsRows[PositiveInt] = 8192
    """Hard cap on computed token positions of a forward and backward on one rank (token_budget, packed rows of
    supervised training)."""
    max_tokens_per_forward_microbatch: LayoutOnly[PositiveInt] = 16384
    """The same for forward-only passes."""
    max_positions: Annotated[LayoutOnly[PositiveInt], _SIZED] = 65536
    """Most token positions of a forward and backward on one rank, however much
    memory there is: beyond, no speed is gained. A forward alone may have twice as many; a longer row goes alone."""
    memory_budget_gb: Annotated[LayoutOnly[NonNegativeFloat], _SIZED] = 0.0
    """GiB that the models of one process may hold. 0: what the CUDA device has free. Must be given on a CPU,
    where tensors are counted; on CUDA a cap, for a device that others use too."""
    memory_margin: LayoutOnly[Annotated[float, Range(0.0, 0.5)]] = 0.05
    """Share by which a micro-batch may need more than was measured at the start (auto)."""
    memory_probe: Annotated[
        LayoutOnly[Literal["measure", "trace", "xla", "both"]],
        Of(".micro_batching", reads="memory_budget", values=("trace", "both"), why="a plan reads xla"),
    ] = "measure"
    """Where micro-batches know their memory from. measure: forwards and backwards of growing
    size at the start. trace: torch's own graph of the real step, on tensors without memory; nothing is run. xla:
    what XLA plans for a model of the same sizes in JAX (extra `jax`); nothing is run. both: measured, beginning at what
    was traced, and the difference is told. A plan traces one step of a model and remembers it; xla has it compile."""
    memory_retries: Annotated[LayoutOnly[NonNegativeInt], _SIZED] = 3
    """How often one mini-batch is cut smaller and recomputed if memory runs out nevertheless."""

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
    checkpoint_url: Free[str] = ""
    """Bring each checkpoint to this URL as well, from which the run goes on where its output folder is lost:
    `s3://bucket/run`, `gs://bucket/run`, `file:///mnt/run`, or another that fsspec knows."""
    checkpoint_timeout_s: Free[PositiveFloat] = 1800.0
    """Deadline of bringing one checkpoint to `checkpoint_url`, or from it."""
    background_checkpoints: Free[bool] = True
    """Write checkpoints while the run goes on, from copies of models and optimizer states in the memory of the hosts that
    compute them. false, or a host without the room: the run waits."""
    max_failed_saves: Free[PositiveInt] = 3
    """Steps in a row at which the disk or `checkpoint_url` refuses, after which the run ends; until then it goes on and
    tries again after each step."""
    resume_mode: Free[Literal["latest", "none", "from_path", "fork"]] = "latest"
    """latest: from this output folder, if it holds a checkpoint. from_path: from `resume_path`. fork: a new run begins at
    `resume_path`, with other settings."""
    resume_path: Annotated[Free[str], Of(".resume_mode", ("from_path", "fork"))] = ""
    """A checkpoint folder (`.../checkpoints/step_000010`), or a run's output folder, or its `checkpoint_url`."""
    max_restarts: Free[NonNegativeInt] = 3
    """How often a run on Ray goes on from its last checkpoint by itself when a worker or node died or hangs; 0 ends it."""
    profile_steps: Free[tuple[PositiveInt, ...]] = ()
    """Steps whose optimizer steps are profiled on each rank, e.g. `[3,4]`: traces in `profiles/`, and on CUDA snapshots of
    memory."""
    capsules: Free[NonNegativeInt] = 0
    """Of so many of the last steps keep all that it takes to execute them again (`skyrl-capsule`): the models before and
    after, and the batch. Each step then takes the time of a checkpoint more. A step that is refused leaves one always."""
    docs_per_step: Forks[NonNegativeInt] = 0
    """Close an optimizer step at so many rollouts, or examples, instead of where their number is fixed: micro-batches are
    filled until a step has at least so many; 0 is off."""
    docs_per_step_exact: Annotated[Forks[bool], Of(".docs_per_step")] = False
    """Cut the last micro-batch so that a step has exactly `docs_per_step` of them."""
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
    train_batch_size: Forks[BatchSize] = 32
    """Prompts per training batch (rollout)."""
    policy_mini_batch_size: Forks[BatchSize] = 16
    """Prompts per optimizer step of the policy; must divide `train_batch_size`."""
    critic_mini_batch_size: Forks[BatchSize] = 16
    """Prompts per optimizer step of the critic; must divide `train_batch_size`."""
    update_epochs_per_batch: Forks[PositiveInt] = 1
    """Passes over each training batch."""
    auto_micro_batch_size: CutsRows[bool] = False
    """The same as `micro_batching=auto`: no size is stated, each model runs the largest micro-batches that fit."""
    max_staleness: Annotated[Forks[Annotated[int, Range(0, 1000)]], _ENGINE] = 0
    """By how many updates the weights that sampled a trained token may be older than those that are updated. 0: rollouts
    are made with the weights of the update before, and wait for them."""
    stale_groups: Annotated[
        Forks[Literal["wait", "drop"]],
        _STALE,
        Of(".take_groups", ("first_finished",), why="it drops no prompt for taking long"),
    ] = "wait"
    """What a batch does about a prompt whose samples would be too old for the next one and have not all
    ended: wait for them, or drop them, with a count."""
    oversample: Annotated[Forks[Annotated[float, Range(1.0)]], _STALE] = 1.0
    """Prompts that are kept in flight for each that the batches to come have room for. Above 1 a batch has
    the first to finish, and what is too many is dropped, with a count."""
    take_groups: Annotated[Forks[Literal["first_finished", "in_order"]], _STALE] = "first_finished"
    """first_finished: a batch has prompts whose samples have ended, which prefers short ones wherever some
    are dropped. in_order: it has the prompts that began first, and waits for them."""
    in_flight_updates: Annotated[Forks[bool], _STALE, _BETWEEN_TOKENS] = False
    """true: engines take new weights between two tokens of the responses that they are at. false: an update
    waits for these to end, and further ones for the update."""
    in_flight_cache: Annotated[
        Forks[Literal["recompute", "keep"]], Of(".in_flight_updates", write="trainer.in_flight_updates=true")
    ] = "recompute"
    """What becomes of the keys and values of a response that an update reaches. recompute: those of all
    its tokens so far are computed again. keep: they stay as older weights made them, at no cost, and what is sampled after
    them is of no model alone."""
    batch_validation: LayoutOnly[Literal["strict", "relaxed"]] = "strict"
    """strict refuses uneven divisions over ranks and micro-batches; relaxed pads them and says what it costs."""
    batch_rules: Free[tuple[Annotated[PartSpec, BATCH_RULES], ...]] = ("sizes",)
    """What is checked of batch sizes before a run; custom rules are added (`[sizes, my_code:rule]`) or take its place."""
    moe_routing_replay: Forks[bool] = False
    """Mixtures of experts: true: the trained policy sends each token to the experts that the engine recorded when it sampled
    it, in place of its own choice; their weights stay the policy's own."""
    algorithm: Forks[AlgorithmConfig] = field(default_factory=AlgorithmConfig)
    """Advantages, losses, KL."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The policy's optimizer."""
    eval_batch_size: Free[BatchSize] = 256
    """Held-out prompts generated together."""
    dump_rollouts: Free[bool] = True
    """Write every trajectory to `rollouts/`, a Parquet file a step."""
    export_hf: Free[bool] = True
    """Write the final policy in Hugging Face format to `export/`."""
    look: Free[Literal["auto", "off", "full"]] = "auto"
    """A first look at two prompts' samples, rewards and times, of a run that begins (docs/recipes.md): auto before a first
    step that is expected to take over 30 s; full always, and where rewards, tools or the environment ask a server, too."""

    def __post_init__(self) -> None:
        if self.auto_micro_batch_size and self.micro_batching == "fixed":
            object.__setattr__(self, "micro_batching", "auto")


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
    tags: tuple[str, ...] = ()
    """Shown with the run, to find it by."""
    group: str | None = None
    """Runs of one group are shown together."""
    notes: str = ""
    """Text shown with the run."""
    samples: NonNegativeInt = 10
    """Rollouts of each evaluation in a table, with prompts, responses and rewards; 0 hands over none."""
    git: bool = False
    """Show the commit of the folder that the run was started in, and whether files differed from it."""
    console: bool = False
    """Hand over `run.log`, which has no secrets."""


@dataclass(frozen=True, kw_only=True)
class TensorboardConfig:
    """`tracker=tensorboard`."""

    enabled: bool = False
    """Write event files to `tensorboard/` in the output folder."""


@dataclass(frozen=True, kw_only=True)
class TrackioConfig:
    """`tracker=trackio`, with the extra `trackio`."""

    enabled: bool = False
    """Log to Trackio, on this machine unless `space` is stated; `trackio show` opens its dashboard."""
    project: str = "skyrl_train"
    """Project name."""
    group: str | None = None
    """Runs of one group are shown together."""
    space: str | None = None
    """A Hugging Face Space, e.g. `me/runs`, in place of this machine."""
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
    """Where to log, e.g. `http://127.0.0.1:5000`; empty is what MLFLOW_TRACKING_URI says, else `mlflow/` in the output
    folder."""
    samples: NonNegativeInt = 10
    """As `tracker.wandb.samples`."""


@dataclass(frozen=True, kw_only=True)
class AlertsConfig:
    """`alerts`: told once where it begins to hold, as a warning, by trackers that have alerts, and to functions of yours."""

    stalled_after_s: NonNegativeFloat = 0.0
    """Seconds without a finished step; 0 does not watch."""
    failed: bool = False
    """The run ends in its steps by an error, or loses a worker, after which it may go on."""
    entropy_below: Annotated[float, Range(0.0)] | None = None
    """`policy/entropy`, in nats: the policy collapses."""
    reward_below: float | None = None
    """`reward/mean`."""
    reward_above: float | None = None
    """`reward/mean`: too good to be true."""
    length_below: Annotated[float, Range(0.0)] | None = None
    """`response_length/mean`, in tokens."""
    length_above: Annotated[float, Range(0.0)] | None = None
    """`response_length/mean`, in tokens."""
    failures_above: Annotated[float, Range(0.0, 1.0)] | None = None
    """`failures/fraction`."""
    mismatch_above: Annotated[float, Range(0.0, 1.0)] | None = 0.3
    """`mismatch/ratio_outside_10_percent`, where no token is of older weights: engine and trainer compute differently."""
    mismatch_growth_above: PositiveFloat | None = 10.0
    """How many times that of the first five steps, or 0.001 nats, the mean of `mismatch/logprob_diff` is by now."""
    kl_at_lr_0_above: Annotated[float, Range(0.0)] | None = 0.01
    """`policy/approx_kl` of a step whose learning rate was 0."""
    findings: bool = True
    """What the rules of `skyrl-doctor` find in the run so far and call a problem: after 20 steps, and each time that
    there are twice as many."""
    on_alert: tuple[Annotated[PartSpec, ALERTS], ...] = ()
    """Functions that are called with each alert (`telemetry/alerts.py: Alert`), which may send a message, say."""


@dataclass(frozen=True, kw_only=True)
class PrometheusConfig:
    """`tracker=prometheus`, with the extra `prometheus`."""

    enabled: bool = False
    """Serve the last record's metrics under `http://127.0.0.1:PORT/metrics`, to this machine alone."""
    port: Annotated[int, Range(0, 65535)] = 9464
    """0 takes any that is free; the console says which."""


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
    """Custom trackers, e.g. `[{_target_: my_code:Lines, name: x}]`: each is made with the run's folder."""


@dataclass(frozen=True, kw_only=True)
class RolloutsConfig:
    """`rollouts`: what `trainer.dump_rollouts` keeps of rollouts on disk."""

    columns: tuple[Literal["advantages", "policy_logprobs", "reference_logprobs", "entropies"], ...] = (
        "advantages",
        "policy_logprobs",
        "reference_logprobs",
    )
    """What is written of each token beside its id, mask, version and the engine's log-probability, where a step has it.
    `entropies` makes scoring compute them: in the policy's forward where there is one, else by one of their own. Replay
    reads none of these."""
    columns_dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: they are rounded to it, and the file says so."""
    keep_last: NonNegativeInt = 0
    """Training steps, and evaluations with them, whose rollouts stay; older ones are deleted. No resume reads them, but
    neither replay nor anything else does then. Those of steps that failed stay. 0 keeps all."""
    sample_fraction: Annotated[float, Range(0.0, 1.0, exclusive_min=True)] = 1.0
    """Share of a training step's prompts whose rollouts are written, the same prompts whenever they come again. Below 1
    the run cannot be replayed."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """`plan`: read by `python -m skyrl_train.plan` only."""

    lengths: str = ""
    """Recorded rollouts (a file of them, or a run's `rollouts/`) whose lengths the plan is made for; empty guesses."""
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
    shows the time of each phase, and device-hours, by it. Recorded rollouts there are the lengths, unless `plan.lengths`
    says others. Empty: a CPU's rates are measured in a few seconds, once, and a GPU's are reckoned from its data sheet.
    none: no time is predicted."""
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
    seed: Forks[Annotated[int, Range(0)]] = 0
    """Every random choice is derived from it."""
    deterministic: LayoutOnly[bool] = False
    """On GPUs, take only kernels whose result does not vary from call to call, in training and in vLLM: a resumed run is
    then identical, as it always is on a CPU. Slower; without it rounding may differ, but not data, prompts and seeds."""
    output_dir: Free[str] = "outputs"
    """Where the run writes; Hydra's run folder unless stated (`hydra.run.dir=...` moves it)."""
    output_access: Free[Literal["owner", "umask"]] = "owner"
    """Who may read a new run folder and its files. owner: its owner alone (0700, 0600); umask: as the system says."""
    derived: Free[tuple[str, ...]] = ()
    """What nobody stated and follows from the model and the machine, and why: lines that the composition fills in."""
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
    """The metric whose last value a sweeper (`-m`) is given of each run (docs/metrics.md)."""


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
