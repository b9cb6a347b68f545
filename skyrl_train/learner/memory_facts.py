"""What of a model its memory depends on: sizes and parameter counts, from its config alone. Imports no torch.

    model.path --architectures.py--> config.json --here--> ModelFacts --memory.py--> bytes

Counts of the families in `GATED` follow from their config. Any other is built on the meta device, without weights, and
counted (`facts_of_model`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_train.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GATED = ("llama", "mistral", "qwen2", "qwen3")
"""Families of one block: norm, attention with rotary positions, norm, gated product of two linear layers; no dropout."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A causal language model's sizes; parameter counts are elements."""

    family: str
    """`model_type` of its config."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocabulary_size: int
    tied: bool
    """Whether the output head is the embedding."""
    qk_norm: bool
    """Whether queries and keys are normalised head by head."""
    parameters: int
    """All, a tied head once."""
    block_parameters: int
    """Of the largest decoder layer."""
    block_linear_parameters: int
    """Of these, the weights of linear layers: what autocast copies."""
    block_linear_features: int
    """Inputs and outputs of a block's linear layers together: an adapter has `rank` times so many parameters."""

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding, or of the output head."""
        return self.vocabulary_size * self.hidden_size

    @property
    def root_parameters(self) -> int:
        """What is in no decoder layer."""
        return self.parameters - self.num_layers * self.block_parameters

    @property
    def head_parameters(self) -> int:
        """What a value model lacks: the output head, unless it is the embedding."""
        return 0 if self.tied else self.embedding_parameters

    @property
    def query_size(self) -> int:
        """Of one position, over all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Of one position's keys, or of its values."""
        return self.num_kv_heads * self.head_dim

    def adapter_parameters(self, rank: int) -> int:
        """Of a low-rank adapter on every linear layer of every block."""
        return rank * self.num_layers * self.block_linear_features


def facts_from_config(config: Mapping[str, Any], *, name: str) -> ModelFacts:
    """Of a family in `GATED`, by arithmetic. Raises ModelError for another family or a missing size."""
    family = str(config.get("model_type", ""))
    if family not in GATED:
        raise ModelError(f"{name}: parameters of model_type={family!r} cannot be counted from its config alone")
    sizes = _sizes(config, name)
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    query, kv = sizes["num_heads"] * sizes["head_dim"], sizes["num_kv_heads"] * sizes["head_dim"]
    linear = hidden * (query + 2 * kv) + query * hidden + 3 * hidden * inner
    features = 3 * hidden + query + 2 * kv + (query + hidden) + 3 * (hidden + inner)
    with_bias = bool(config.get("attention_bias", False))
    bias = query + 2 * kv if family == "qwen2" else (query + 2 * kv + hidden) * with_bias
    bias += (2 * inner + hidden) * bool(config.get("mlp_bias", False))
    norms = 2 * hidden + (2 * sizes["head_dim"] if family == "qwen3" else 0)
    tied = bool(config.get("tie_word_embeddings", False))
    block = linear + bias + norms
    embedding = sizes["vocabulary_size"] * hidden
    return ModelFacts(
        family=family,
        **sizes,
        tied=tied,
        qk_norm=family == "qwen3",
        parameters=sizes["num_layers"] * block + hidden + embedding * (1 if tied else 2),
        block_parameters=block,
        block_linear_parameters=linear,
        block_linear_features=features,
    )


def facts_of_model(model: PreTrainedModel) -> ModelFacts:
    """Of a model that is there, on the meta device or any other, sharded or not. Raises ModelError without layers."""
    import torch

    from skyrl_train.distributed.fsdp import decoder_layers

    config = model.config.get_text_config()
    blocks = decoder_layers(model)
    if not blocks:
        raise ModelError(f"{type(model).__name__} does not say which of its modules are decoder layers")
    counts = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    largest = blocks[counts.index(max(counts))]
    linear = [part for part in largest.modules() if isinstance(part, torch.nn.Linear)]
    sizes = _sizes(config.to_dict(), type(model).__name__)
    return ModelFacts(
        family=str(config.model_type),
        **{**sizes, "num_layers": len(blocks)},
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        qk_norm=any(name.endswith("q_norm") for name, _ in largest.named_modules()),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        block_parameters=max(counts),
        block_linear_parameters=sum(part.weight.numel() for part in linear),
        block_linear_features=sum(part.in_features + part.out_features for part in linear),
    )


def _sizes(config: Mapping[str, Any], name: str) -> dict[str, int]:
    """Raises ModelError for one that is missing."""
    missing = [key for key in _REQUIRED if not config.get(key)]
    if missing:
        raise ModelError(f"{name}: its config has no {', '.join(missing)}; memory cannot be predicted without")
    heads = int(config["num_attention_heads"])
    return {
        "hidden_size": int(config["hidden_size"]),
        "num_layers": int(config["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        "intermediate_size": int(config.get("intermediate_size") or 4 * int(config["hidden_size"])),
        "vocabulary_size": int(config["vocab_size"]),
    }


_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
