"""`generator` (`generator=hf|vllm|http|replay|agent`): how rollouts are made. Part of the schema; see `config/schema.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from skyrl_train.config.fields.fields import (
    BatchSize,
    Forks,
    Fraction,
    Free,
    Interchangeable,
    LayoutOnly,
    NonNegativeCount,
    NonNegativeFloat,
    NonNegativeInt,
    Of,
    PositiveCount,
    PositiveFloat,
    PositiveInt,
    Range,
    ReadWith,
    Resume,
    Seconds,
    Usual,
)
from skyrl_train.config.models.placement import PlacementConfig
from skyrl_train.parts import AGENT_LOOPS, ENGINES, TRAJECTORY_ROWS, WEIGHT_TRANSPORTS
from skyrl_train.registry import PartSpec


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How responses are sampled."""

    temperature: Annotated[NonNegativeFloat, Usual(3.0, "answers become noise")] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Range(0.0, 1.0, exclusive_min=True)] = 1.0
    """Keep the smallest set of tokens with this much probability."""
    top_k: Annotated[int, Range(-1)] = -1
    """Keep the k likeliest tokens; -1 keeps all."""
    min_p: Fraction = 0.0
    """Drop tokens below this share of the likeliest token's probability."""
    max_generate_length: PositiveInt = 64
    """New tokens per turn."""
    stop: tuple[str, ...] = ()
    """Stop strings."""


@dataclass(frozen=True, kw_only=True)
class VLLMConfig:
    """`generator.vllm`: engines on Ray, or one of this machine without it (`placement=inline`)."""

    num_engines: NonNegativeCount = 0
    """Data-parallel engines; requests that share a prefix go to the same one. 0 is as many as their devices hold: those of
    the policy with `placement.colocate_all`, those of `placement.inference_num_nodes`; elsewhere one."""
    tensor_parallel_size: PositiveCount = 1
    """Devices of one engine."""
    dtype: Forks[Literal["auto", "float32", "bfloat16"]] = "auto"
    """auto is `model.dtype`. The trainer's own type is the one whose log-probabilities agree with the trainer's."""
    kv_cache_gib: NonNegativeFloat = 0.0
    """Keys and values of one engine; 0 is a quarter GiB on a CPU, and what `gpu_memory_utilization` leaves on a GPU."""
    gpu_memory_utilization: Fraction = 0.8
    """Share of the device's memory that an engine takes in all (GPU only), or less where models then stay beside it
    (`placement.offload=auto`)."""
    max_num_seqs: BatchSize | None = None
    """Sequences that one engine generates together. null: what vLLM takes on such a device by itself, 1,024 on GPUs of 70
    GiB and more, 256 on others and on a CPU."""
    enforce_eager: bool | None = None
    """false compiles and captures graphs: slower to start, faster on a GPU. null: true on a CPU, vLLM's own default
    on a GPU, which is false."""
    prefix_caching: bool = True
    """Keep the keys and values of prompts that come again. Reset at each weight sync."""
    lora_sync: Annotated[Literal["merged", "adapter"], Of("model.lora.rank", write="model.lora.rank=16")] = "merged"
    """With `model.lora`: engines get all weights with the adapter merged, or the adapter alone, which they apply beside
    the weights of `model.path`: far fewer bytes a sync, somewhat slower generation."""
    max_restarts: Free[NonNegativeInt] = 1
    """How often one dead engine is restarted before the run goes on without it (Ray)."""
    engine_args: Forks[Mapping[str, Any]] = field(default_factory=dict)
    """Anything else that the installed `vllm.EngineArgs` takes, e.g. {quantization: fp8}; not what the trainer sets."""

    def most_sequences(self, *, on_gpu: bool) -> int:
        """Return how many sequences one engine generates together at most; where vLLM decides, its number for large GPUs."""
        return self.max_num_seqs or (1024 if on_gpu else 256)

    @property
    def devices_per_engine(self) -> int:
        """The number of devices of one engine: tensor-parallel times pipeline-parallel."""
        return self.tensor_parallel_size * int(self.engine_args.get("pipeline_parallel_size", 1))

    def count(self, placement: PlacementConfig) -> int:
        """Engines: as many as are stated, or as the placement has devices for."""
        if self.num_engines:
            return self.num_engines
        size = max(1, self.devices_per_engine)
        if placement.colocate_all:
            return max(1, placement.policy_num_workers // size)
        return max(1, placement.inference_num_nodes * max(1, placement.inference_num_gpus_per_node // size))


@dataclass(frozen=True, kw_only=True)
class HTTPConfig:
    """`generator.http`: a server with vLLM's OpenAI-compatible interface, which takes and returns token ids."""

    url: str = ""
    """Base address of the server, e.g. `http://127.0.0.1:8000`."""
    model: str = ""
    """Name of the model there; empty asks the server."""
    api_key_env: str = "SKYRL_TRAIN_API_KEY"
    """Environment variable that holds the server's token, where it wants one."""
    max_retries: NonNegativeInt = 3
    """Attempts after the first, for requests that the server did not answer."""


SAME_SAMPLES = Interchangeable(
    ("vllm", "http"), "vLLM draws the same tokens for the same seed, in engines of this run or behind a server"
)
"""hf draws others from the same distribution, so that a run that goes on with it would not repeat its steps."""


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """`generator=hf|vllm|http|replay|agent`: how rollouts are made."""

    backend: Annotated[PartSpec, ENGINES, Resume.FORKS, SAME_SAMPLES] = "hf"
    """Where tokens come from. hf: the model in this process. vllm: engines on Ray, or one of this machine. http: an
    OpenAI-compatible server. replay: recordings. Or a custom engine in this process."""
    n_samples_per_prompt: Forks[BatchSize] = 8
    """Trajectories per training prompt: the group over which GRPO compares."""
    agent_loop: Forks[Annotated[PartSpec, AGENT_LOOPS]] = "multi_turn"
    """What makes one trajectory. multi_turn: the engine and the environment alternate until either has had enough. agent: a
    program that asks for answers by itself (`docs/agents.md`)."""
    max_turns: Forks[PositiveInt] = 2
    """Generations per trajectory."""
    max_context_length: Forks[PositiveInt] = 512
    """Tokens of prompt, responses and observations together; a trajectory that is full ends there."""
    privileged_context: Forks[str] = ""
    """algorithm=self_distillation: where in the data row stands what the teacher alone is shown, e.g.
    `reward_spec.ground_truth`; it is put after the last message."""
    step_wise_trajectories: Forks[bool] = False
    """true: one training row per turn, as `trajectory_rows=per_turn` says."""
    trajectory_rows: Forks[Annotated[PartSpec, TRAJECTORY_ROWS]] = "per_trajectory"
    """How the turns of a trajectory become training rows: in one row, one row per turn, or as a custom part says."""
    merge_stepwise: LayoutOnly[Literal["auto", "off"]] = "auto"
    """auto: turns whose prompt extends the turn before are computed in one row, and trained as the rows they are."""
    sampling: Forks[SamplingConfig] = field(default_factory=SamplingConfig)
    """For training rollouts."""
    eval_sampling: Free[SamplingConfig] = field(default_factory=SamplingConfig)
    """For evaluation: whatever is not stated, but for the temperature, is as in `generator.sampling`."""
    eval_n_samples_per_prompt: Free[BatchSize] = 1
    """Trajectories per held-out prompt; pass@n is reported for it."""
    seeds: Annotated[Forks[Literal["request", "engine"]], Of(".backend", ("vllm", "http"))] = "request"
    """request: each response has a seed of its own, so that a resumed run samples what it would have. engine:
    one seed for all, so that a resume is not identical."""
    max_batch_size: Annotated[LayoutOnly[BatchSize], ReadWith(".backend", ("hf",))] = 256
    """Sequences that the hf backend generates together."""
    request_timeout_s: Free[Seconds] = 600.0
    """Deadline of one generation request."""
    quantization: Forks[Literal["none", "int8", "fp8"]] = "none"
    """Numbers that the engine's matrices are rounded to at each weight sync, with a scale for each output (hf, vllm; see
    `docs/algorithms.md`). fp8 with vllm on a GPU: computed in them, by vLLM itself. Else the engine computes with rounded
    weights in its own type, which shows what rounding does and saves nothing."""
    vllm: Annotated[LayoutOnly[VLLMConfig], Of(".backend", ("vllm",))] = field(default_factory=lambda: VLLMConfig())
    """The vllm backend."""
    http: Annotated[Free[HTTPConfig], Of(".backend", ("http",))] = field(default_factory=lambda: HTTPConfig())
    """The http backend."""
    weight_transport: Free[Annotated[PartSpec, WEIGHT_TRANSPORTS]] = "auto"
    """How new weights get to the engine. auto: shared_memory on a CPU and within one process, files to a server, between
    GPUs cuda_ipc where engines share the trainer's, else broadcast."""
    full_sync_every: Free[BatchSize] = 1
    """Of so many weight syncs one sends all weights, the others those values alone whose bits, in the engines' type, are not
    those that were sent last. Each rank and each worker of an engine keeps a copy in host memory. 1 sends all. For engines
    on Ray by weight_transport=shared_memory or broadcast, where networks are slow for the model (docs/weight_sync.md)."""
    weight_change_tolerance: Forks[Annotated[float, Range(0.0)]] = 0.0
    """With full_sync_every: values that are at most so far from what the engines have of them are not sent either, so that
    engines are never further from the trainer. 0 sends every value that changed in any bit."""
    verify_weight_sync: Annotated[Free[bool | None], Of(".backend", reads="own_devices", values=(True,))] = None
    """Compare how far an engine's log-probabilities of a probe (16 tokens after 256) moved with how far the trainer's did,
    and stop where they did not move alike. null: after the first ten syncs and every 50th. true: after each, and the
    difference is held to `weight_sync_tolerance`. false: the first sync's difference alone. For engines on devices of their
    own, which a custom one says with `@reads(own_devices=True)`."""
    weight_sync_tolerance: Annotated[Free[PositiveFloat], Of(".backend", reads="own_devices")] = 0.001
    """Largest difference of a probe's log-probability that `verify_weight_sync` accepts; bfloat16 needs about 0.2. The
    probe of the first sync allows 0.5 where types are not float32 on a CPU."""
    replay_path: Annotated[Forks[str], Of(".backend", ("replay",))] = ""
    """Rollouts to train on: a Parquet or JSON-lines file, a folder of them, such as a run's `rollouts/`,
    or a run's `journal/`."""

    @property
    def has_own_devices(self) -> bool:
        """Whether engines compute on devices of their own: in actors on Ray, else in processes of this machine."""
        return ENGINES.reads(self.backend).own_devices

    @property
    def rows(self) -> PartSpec:
        """What makes rows of trajectories."""
        return "per_turn" if self.step_wise_trajectories else self.trajectory_rows

    @property
    def eval_differences(self) -> str:
        """What evaluation samples otherwise, e.g. `max_generate_length=64 (training: 16)`; empty where it does not."""
        pairs = {
            each.name: (getattr(self.eval_sampling, each.name), getattr(self.sampling, each.name))
            for each in fields(self.sampling)
        }
        return ", ".join(f"{name}={own} (training: {other})" for name, (own, other) in pairs.items() if own != other)

    @property
    def is_step_wise(self) -> bool:
        """Whether a trajectory may be several rows."""
        return TRAJECTORY_ROWS.name_of(self.rows) != "per_trajectory"


def quantizes_itself(generator: GeneratorConfig, *, on_gpu: bool) -> bool:
    """Whether the engine computes in the numbers of `generator.quantization`, rather than with weights rounded to them."""
    return generator.backend == "vllm" and generator.quantization == "fp8" and on_gpu


def ships_adapter(generator: GeneratorConfig) -> bool:
    """Whether engines get the adapter by itself rather than merged weights."""
    return generator.backend == "vllm" and generator.vllm.lora_sync == "adapter"
