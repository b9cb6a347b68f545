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
    """Keep the smallest token set of this probability."""
    top_k: Annotated[int, Range(-1)] = -1
    """Keep the likeliest tokens; -1 keeps all."""
    min_p: Fraction = 0.0
    """Drop tokens below this share of the likeliest's probability."""
    max_generate_length: PositiveInt = 64
    """New tokens per turn."""
    stop: tuple[str, ...] = ()
    """Stop strings."""


@dataclass(frozen=True, kw_only=True)
class VLLMConfig:
    """`generator.vllm`: engines on Ray, or one of this machine without it (`placement=inline`)."""

    num_engines: NonNegativeCount = 0
    """Data-parallel engines. 0: as many as the policy's devices (`placement.colocate_all`) or
    `placement.inference_num_nodes` hold, else one."""
    tensor_parallel_size: PositiveCount = 1
    """Devices of one engine."""
    dtype: Forks[Literal["auto", "float32", "bfloat16"]] = "auto"
    """auto is `model.dtype`, which agrees with the trainer's log-probabilities."""
    kv_cache_gib: NonNegativeFloat = 0.0
    """Keys and values of one engine; 0: a quarter GiB on a CPU, what `gpu_memory_utilization` leaves on a GPU."""
    gpu_memory_utilization: Fraction = 0.8
    """Share of a GPU's memory for an engine, less where models stay beside it (`placement.offload=auto`)."""
    max_num_seqs: BatchSize | None = None
    """Sequences one engine generates together. null: 1,024 on GPUs of 70 GiB and more, else 256."""
    enforce_eager: bool | None = None
    """false compiles and captures graphs: slower start, faster on a GPU. null: true on a CPU, false on a GPU."""
    prefix_caching: bool = True
    """Keep keys and values of repeated prompts until the next weight sync."""
    lora_sync: Annotated[Literal["merged", "adapter"], Of("model.lora.rank", write="model.lora.rank=16")] = "merged"
    """Engines get all weights merged, or the adapter alone: far fewer bytes, somewhat slower generation."""
    max_restarts: Free[NonNegativeInt] = 1
    """Restarts of a dead engine before going on without it (Ray)."""
    engine_args: Forks[Mapping[str, Any]] = field(default_factory=dict)
    """Further `vllm.EngineArgs`, such as {quantization: fp8}; not those the trainer sets."""

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
    """Base address, such as `http://127.0.0.1:8000`."""
    model: str = ""
    """The name there; empty asks the server."""
    api_key_env: str = "SKYRL_TRAIN_API_KEY"
    """Environment variable with the server's token."""
    max_retries: NonNegativeInt = 3
    """Retries of unanswered requests."""


SAME_SAMPLES = Interchangeable(
    ("vllm", "http"), "vLLM draws the same tokens for the same seed, in engines of this run or behind a server"
)
"""hf draws others from the same distribution, so that a run that goes on with it would not repeat its steps."""


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """`generator=hf|vllm|http|replay|agent`: how rollouts are made."""

    backend: Annotated[PartSpec, ENGINES, Resume.FORKS, SAME_SAMPLES] = "hf"
    """hf: the model in this process. vllm: engines on Ray, or one here. http: an OpenAI-compatible server. replay:
    recordings."""
    n_samples_per_prompt: Forks[BatchSize] = 8
    """Trajectories per training prompt: the group over which GRPO compares."""
    agent_loop: Forks[Annotated[PartSpec, AGENT_LOOPS]] = "multi_turn"
    """multi_turn: engine and environment alternate. agent: a program asks for answers by itself (docs/agents.md)."""
    max_turns: Forks[PositiveInt] = 2
    """Generations per trajectory."""
    max_context_length: Forks[PositiveInt] = 512
    """Tokens of prompt, responses and observations; a full trajectory ends."""
    privileged_context: Forks[str] = ""
    """algorithm=self_distillation: column that the teacher alone sees, such as `reward_spec.ground_truth`."""
    step_wise_trajectories: Forks[bool] = False
    """true: `trajectory_rows=per_turn`."""
    trajectory_rows: Forks[Annotated[PartSpec, TRAJECTORY_ROWS]] = "per_trajectory"
    """Training rows: one per trajectory, per turn, or custom."""
    merge_stepwise: LayoutOnly[Literal["auto", "off"]] = "auto"
    """auto computes turns that extend the last in one row; training stays the same."""
    sampling: Forks[SamplingConfig] = field(default_factory=SamplingConfig)
    """For training rollouts."""
    eval_sampling: Free[SamplingConfig] = field(default_factory=SamplingConfig)
    """For evaluation; what is not stated, but the temperature, is as in `generator.sampling`."""
    eval_n_samples_per_prompt: Free[BatchSize] = 1
    """Trajectories per held-out prompt, for pass@n."""
    seeds: Annotated[Forks[Literal["request", "engine"]], Of(".backend", ("vllm", "http"))] = "request"
    """request: one per response; a resumed run samples alike. engine: one for all; it does not."""
    max_batch_size: Annotated[LayoutOnly[BatchSize], ReadWith(".backend", ("hf",))] = 256
    """Sequences generated together."""
    request_timeout_s: Free[Seconds] = 600.0
    """Deadline of one request."""
    quantization: Forks[Literal["none", "int8", "fp8"]] = "none"
    """Rounds the engine's matrices at each sync (docs/algorithms.md). Only fp8 with vllm on a GPU computes in it; else
    nothing is saved."""
    vllm: Annotated[LayoutOnly[VLLMConfig], Of(".backend", ("vllm",))] = field(default_factory=lambda: VLLMConfig())
    """The vllm backend."""
    http: Annotated[Free[HTTPConfig], Of(".backend", ("http",))] = field(default_factory=lambda: HTTPConfig())
    """The http backend."""
    weight_transport: Free[Annotated[PartSpec, WEIGHT_TRANSPORTS]] = "auto"
    """How weights reach the engine. auto: shared_memory on a CPU or in one process, files to a server, cuda_ipc between
    shared GPUs, else broadcast."""
    full_sync_every: Free[BatchSize] = 1
    """One of so many syncs sends all weights, the others changed values; 1 sends all. For Ray engines by shared_memory
    or broadcast on slow networks (docs/weight_sync.md)."""
    weight_change_tolerance: Forks[Annotated[float, Range(0.0)]] = 0.0
    """With full_sync_every: leave values unsent that differ at most this much; 0 sends all."""
    verify_weight_sync: Annotated[Free[bool | None], Of(".backend", reads="own_devices", values=(True,))] = None
    """Stop where a probe's log-probabilities moved otherwise in engine and trainer (docs/weight_sync.md). null: after
    the first ten syncs and every 50th. true: after each, within `weight_sync_tolerance`. false: the first alone. For
    engines on their own devices."""
    weight_sync_tolerance: Annotated[Free[PositiveFloat], Of(".backend", reads="own_devices")] = 0.001
    """Largest accepted difference; bfloat16 needs about 0.2."""
    replay_path: Annotated[Forks[str], Of(".backend", ("replay",))] = ""
    """Parquet or JSON-lines rollouts, a folder such as a run's `rollouts/`, or a run's `journal/`."""

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
