"""What an inference engine is made from, whichever it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformers import GenerationConfig

from skyrl_train.config.models import (
    GeneratorConfig,
    LoraConfig,
    ModelConfig,
    PlatformConfig,
    quantizes_itself,
    ships_adapter,
)
from skyrl_train.model import load_tokenizer, resolve_model_path


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What every engine is given first, built-in or custom; each reads what it needs."""

    model: ModelConfig
    """The policy's model; its current weights are given before the first request."""
    generator: GeneratorConfig
    """How rollouts are made."""
    platform: PlatformConfig
    """What the machine offers."""
    seed: int = 0
    """Seed of an engine that draws by itself."""
    deterministic: bool = False
    """Whether a response may not depend on what else is in the batch, on a GPU."""
    in_actor: bool = False
    """Whether the engine is made in a process that does nothing else, rather than in the trainer's."""
    leaves_devices: bool = False
    """Whether it has to leave its devices to models between generations (`sleep`, `wake_up`)."""
    in_flight_cache: Literal["recompute", "keep"] | None = None
    """What becomes of the keys and values of responses that an update of the weights reaches (`trainer.in_flight_cache`);
    None where updates wait for running responses to end."""
    num_adapters: int = 1
    """Adapters that it answers with side by side, each by its name; 1: the policy's alone."""
    records_routing: bool = False
    """Whether answers of a mixture of experts say where its tokens were sent (`trainer.moe_routing_replay`)."""
    awaits_weights: bool = False
    """Whether requests wait for its first weights, as it takes the place of an engine that died and may be asked before."""
    output_dir: Path = Path()
    """Folder of the run."""

    @property
    def device(self) -> str:
        """torch device of an engine that computes in the loop's process, e.g. `cpu` or `cuda:0`."""
        return self.platform.device

    @property
    def max_context_length(self) -> int:
        """Tokens of a prompt and its response together."""
        return self.generator.max_context_length

    @property
    def adapter(self) -> LoraConfig | None:
        """What is synced: an adapter beside the model's weights; None for all weights."""
        return self.model.lora if ships_adapter(self.generator) else None

    @property
    def quantizes_fp8(self) -> bool:
        """Whether vLLM is to compute in fp8 by itself."""
        return quantizes_itself(self.generator, on_gpu=self.platform.name == "gpu")

    @property
    def rounding(self) -> Literal["none", "int8", "fp8"]:
        """What matrices are rounded to as they arrive (`weight_sync/rounding.py`)."""
        return "none" if self.quantizes_fp8 else self.generator.quantization


def stop_token_ids(model: ModelConfig) -> tuple[int, ...]:
    """Return the tokens that end a response, by the model's generation config and by the tokenizer. Raises ModelError."""
    try:
        listed = GenerationConfig.from_pretrained(str(resolve_model_path(model.path, model.revision))).eos_token_id
    except OSError:
        listed = None
    ids = {load_tokenizer(model).eos_token_id} | (set(listed) if isinstance(listed, list) else {listed})
    return tuple(sorted(token_id for token_id in ids if token_id is not None))
