"""What an inference engine is made from, whichever it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from transformers import GenerationConfig

from skyrl_train.config.models import HTTPConfig, LoraConfig, ModelConfig, VLLMConfig
from skyrl_train.model import load_tokenizer, resolve_model_path


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What every engine is given first, built-in or custom; each reads what it needs."""

    model: ModelConfig
    """The policy's model; its current weights are given before the first request."""
    device: str
    """torch device of an engine that computes in the loop's process, e.g. `cpu` or `cuda:0`."""
    max_batch_size: int
    """Sequences to generate together in the loop's process."""
    max_context_length: int
    """Tokens of a prompt and its response together."""
    temperature: float = 1.0
    """Temperature of training rollouts, whose log-probabilities are trained on."""
    seed: int = 0
    """Seed of an engine that draws by itself."""
    seeds_by_request: bool = True
    """Whether a response is drawn by the request's own seed, or by the engine's (`generator.seeds`)."""
    deterministic: bool = False
    """Whether a response may not depend on what else is in the batch, on a GPU."""
    on_gpu: bool = False
    """Whether an engine with devices of its own has GPUs."""
    in_actor: bool = False
    """Whether the engine is made in a process that does nothing else, rather than in the trainer's."""
    leaves_devices: bool = False
    """Whether it has to leave its devices to models between generations (`sleep`, `wake_up`)."""
    adapter: LoraConfig | None = None
    """What is synced: an adapter beside the model's weights; None for all weights."""
    in_flight_cache: Literal["recompute", "keep"] | None = None
    """What becomes of the keys and values of responses that an update of the weights reaches (`trainer.in_flight_cache`);
    None where updates wait for running responses to end."""
    records_routing: bool = False
    """Whether answers of a mixture of experts say where its tokens were sent (`trainer.moe_routing_replay`)."""
    awaits_weights: bool = False
    """Whether requests wait for its first weights, as it takes the place of an engine that died and may be asked before."""
    request_timeout_s: float = 600.0
    """Deadline of one request."""
    rounding: Literal["none", "int8", "fp8"] = "none"
    """What matrices are rounded to as they arrive (`weight_sync/rounding.py`)."""
    quantizes_fp8: bool = False
    """Whether vLLM is to compute in fp8 by itself."""
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    """`generator.vllm`."""
    http: HTTPConfig = field(default_factory=HTTPConfig)
    """`generator.http`."""
    output_dir: Path = Path()
    """Folder of the run."""


def stop_token_ids(model: ModelConfig) -> tuple[int, ...]:
    """Return the tokens that end a response, by the model's generation config and by the tokenizer. Raises ModelError."""
    try:
        listed = GenerationConfig.from_pretrained(str(resolve_model_path(model.path, model.revision))).eos_token_id
    except OSError:
        listed = None
    ids = {load_tokenizer(model).eos_token_id} | (set(listed) if isinstance(listed, list) else {listed})
    return tuple(sorted(token_id for token_id in ids if token_id is not None))
