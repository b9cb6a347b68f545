"""The work that every trainer in `update.py` does: models and rollouts, from a seed. Knows no trainer.

Qwen2-style models with random weights, or a model from a folder. `mid` spends about a quarter of its matrix products in the
output head, as Qwen2.5-0.5B does. Rollouts are random tokens of realistic lengths: groups of samples with long-tailed
responses, and conversations of several turns whose history only grows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAD, EOS, FIRST_TOKEN = 0, 2, 4


@dataclass(frozen=True)
class ModelSize:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    folder: str = ""
    """Where its weights are; empty: random ones."""
    head_dim: int = 0
    """Numbers of a head's query; 0: the hidden size over the heads."""

    @property
    def head(self) -> int:
        """Numbers of one head's query, key or value."""
        return self.head_dim or self.hidden // self.heads


SIZES = {
    "tiny": ModelSize(128, 4, 4, 2, 384, 320),
    "small": ModelSize(256, 6, 8, 2, 704, 2048),
    "mid": ModelSize(384, 6, 6, 2, 1024, 8192),
    "large": ModelSize(512, 8, 8, 2, 1408, 16384),
    "qwen2.5-0.5b": ModelSize(896, 24, 14, 2, 4864, 151936),
}


def size_of(model: str) -> ModelSize:
    """Of a name in SIZES, or of a folder of Hugging Face's with the weights of a decoder, or a GGUF file."""
    if model in SIZES:
        return SIZES[model]
    from skyrl_train.model.sizes import local_folder, model_sizes

    folder = local_folder(model)
    if folder is None:
        raise SystemExit(
            f"--model {model}: neither one of {', '.join(SIZES)} nor a folder with config.json and weights"
        )
    found = model_sizes(str(folder))
    return ModelSize(
        found.hidden_size,
        found.num_layers,
        found.num_heads,
        found.num_kv_heads,
        found.intermediate_size,
        found.vocabulary_size,
        str(folder),
        found.head_dim,
    )


_SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Sizes that a mixture has, too."""


def model_config(size: ModelSize, **changes: Any) -> Any:
    """A transformers config, without dropout."""
    from transformers import Qwen2Config

    settings = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    return Qwen2Config(**{**settings, **changes})


def save_model(folder: Path | str, size: ModelSize, **changes: Any) -> int:
    """Save a model with random weights and these changes to its config; return the bytes of its weights."""
    import torch
    from transformers import Qwen2ForCausalLM

    from skyrl_train.model import quiet_transformers

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(model_config(size, **changes))
    with quiet_transformers():
        model.save_pretrained(folder)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def build_model(size: ModelSize, seed: int = 0, *, experts: int = 0) -> Any:
    """Random weights in float32, or those of `size.folder`; the same in every process. With `experts` a mixture of so many,
    of which a token takes a quarter, each of a quarter of the width."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if size.folder:
        return AutoModelForCausalLM.from_pretrained(size.folder, dtype=torch.float32, attn_implementation="sdpa")
    torch.manual_seed(seed)
    config = model_config(size)
    if experts:
        mixture = {"num_experts": experts, "num_experts_per_tok": max(1, experts // 4)}
        own = {name: value for name, value in config.to_dict().items() if name in _SHARED}
        sizes = {"moe_intermediate_size": size.intermediate // 4, "head_dim": size.hidden // size.heads}
        mixed = Qwen3MoeConfig(**own, **sizes, **mixture, norm_topk_prob=True)
        mixed._attn_implementation = "sdpa"
        return Qwen3MoeForCausalLM(mixed).float()
    config._attn_implementation = "sdpa"
    return Qwen2ForCausalLM(config).float()


@dataclass(frozen=True)
class Conversation:
    """One trajectory: a prompt, then turns of a response and what was observed after it."""

    prompt: int
    """Number of its prompt."""
    prompt_ids: list[int]
    turns: list[tuple[list[int], list[int]]]
    """(response, observation); the last observation is empty."""
    advantage: float

    def rows(self) -> list[tuple[list[int], list[int]]]:
        """(context, response) of each turn."""
        history, found = list(self.prompt_ids), []
        for response, observation in self.turns:
            found.append((list(history), response))
            history += response + observation
        return found

    def merged(self) -> tuple[list[int], list[int], list[int]]:
        """(prompt, everything after it, 1 where the policy sampled it)."""
        ids = [token for response, observation in self.turns for token in response + observation]
        mask = [flag for response, observation in self.turns for flag in [1] * len(response) + [0] * len(observation)]
        return self.prompt_ids, ids, mask


def single_turn(
    vocabulary: int,
    *,
    prompts: int = 4,
    samples: int = 8,
    seed: int = 1,
    prompt_tokens: Sequence[int] = (120, 280),
    response_median: int = 180,
    longest_response: int = 800,
) -> list[Conversation]:
    """Prompts of the stated least and most tokens; responses of 20 tokens or more, log-normal."""
    lengths, tokens = random.Random(seed), random.Random(seed + 1000)
    found = []
    for prompt in range(prompts):
        prompt_ids = _ids(tokens, lengths.randint(*prompt_tokens), vocabulary)
        for advantage in _advantages(lengths, samples):
            length = _long_tailed(lengths, 20, longest_response, response_median, 0.9)
            response = [*_ids(tokens, length - 1, vocabulary), EOS]
            found.append(Conversation(prompt, prompt_ids, [(response, [])], advantage))
    return found


def step_wise(
    vocabulary: int, *, prompts: int = 2, samples: int = 4, turns: int = 5, seed: int = 2, response_median: int = 60
) -> list[Conversation]:
    """Responses of 15 to 300 tokens, log-normal; observations of 20 to 160."""
    lengths, tokens = random.Random(seed), random.Random(seed + 1000)
    found = []
    for prompt in range(prompts):
        prompt_ids = _ids(tokens, lengths.randint(120, 280), vocabulary)
        for advantage in _advantages(lengths, samples):
            exchange = []
            for turn in range(turns):
                response = [*_ids(tokens, _long_tailed(lengths, 15, 300, response_median, 0.8) - 1, vocabulary), EOS]
                observed = _ids(tokens, lengths.randint(20, 160), vocabulary) if turn + 1 < turns else []
                exchange.append((response, observed))
            found.append(Conversation(prompt, prompt_ids, exchange, advantage))
    return found


KINDS = {"single": single_turn, "step": step_wise}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "typical": ("single", {}),
    "long prompt short answer": ("single", {"prompt_tokens": (700, 1000), "response_median": 60}),
    "short prompt long answer": (
        "single",
        {"prompt_tokens": (30, 60), "response_median": 400, "longest_response": 1600},
    ),
    "one group of 8": ("single", {"prompts": 1}),
    "short group of 8": (
        "single",
        {"prompts": 1, "prompt_tokens": (40, 80), "response_median": 40, "longest_response": 120},
    ),
    "3 turns": ("step", {"turns": 3}),
    "8 turns": ("step", {"turns": 8}),
    "32 turns": ("step", {"turns": 32, "prompts": 1, "samples": 2}),
}
"""Name to the kind of rollouts and what is stated of them."""


def _long_tailed(rng: random.Random, low: int, high: int, median: float, sigma: float) -> int:
    return int(min(high, max(low, round(median * math.exp(rng.gauss(0.0, sigma))))))


def _ids(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, vocabulary) for _ in range(count)]


def _advantages(rng: random.Random, samples: int) -> list[float]:
    """Of rewards 0 and 1, at least one of each where there are two samples."""
    rewards = [1.0, 0.0][:samples] + [float(rng.random() < 0.4) for _ in range(samples - 2)]
    rng.shuffle(rewards)
    mean = sum(rewards) / samples
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / max(samples - 1, 1))
    return [(reward - mean) / (deviation + 1e-4) for reward in rewards]
