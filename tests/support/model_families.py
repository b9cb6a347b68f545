"""Tiny random models of families that have no fused attention, or layers that carry a state from token to token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from skyrl_train.config.models import ModelConfig
from skyrl_train.model import load_tokenizer, quiet_transformers
from skyrl_train.types import ChatMessage

_SIZES: Mapping[str, Any] = {
    "vocab_size": 512,  # the bundled tokenizer has fewer entries
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ONE_OF_EACH = ["linear_attention", "full_attention"]
_DELTA: Mapping[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": _ONE_OF_EACH,
}
_EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA: Mapping[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2},
    "qwen3_next": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "mamba": {"state_size": 8, "expand": 2},
    "falcon_mamba": {"state_size": 8},
    "qwen3_5_text": _DELTA,
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "head_dim": 16, "mamba_d_ssm": 128},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
    },
    "zamba2": {
        "attention_head_dim": 32,
        "mamba_d_state": 16,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "layers_block_type": ["mamba", "hybrid"],
        "num_mem_blocks": 1,
        "num_key_value_heads": 4,
        "hybrid_layer_ids": [1],
        "use_mem_rope": True,
    },
    "nemotron_h": {
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "layers_block_type": ["mamba", "attention"],
    },
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
}
"""By `model_type`, what differs from `_SIZES`."""


def build_family(name: str, folder: Path) -> Path:
    """A random model of this family, with the bundled tokenizer, in `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with quiet_transformers(), torch.no_grad():
        config = AutoConfig.for_model(**{**_SIZES, **FAMILIES[name], "model_type": name})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(folder)
    load_tokenizer(ModelConfig()).save_pretrained(folder)
    return folder


class EvenCharacters:
    """An environment of one turn whose reward any model can earn: the share of characters with an even number."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        del env_config, extras

    def init(self, prompt: list[ChatMessage]) -> tuple[list[ChatMessage], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        reward = sum(ord(character) % 2 == 0 for character in action) / max(1, len(action))
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}

    def close(self) -> None:
        """Nothing is held."""

    def get_metrics(self) -> dict[str, float]:
        return {}
