"""Small models of many kinds, the rows of a tree, and what a layout makes of them."""

from __future__ import annotations

from typing import Any

import torch

from skyrl_train.batch import TrainingInputBatch, batch_of_lengths
from skyrl_train.batch.layouts import Layout
from skyrl_train.model import hidden_states, quiet_transformers

SIZE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
EXACT = [
    ("qwen2", {}),
    ("qwen2", {"rope_parameters": YARN}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen3", {}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}),
    ("llama", {}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 4}),
    ("gemma", {}),
    ("gemma2", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    ("gemma3_text", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    ("olmo2", {}),
    ("phi3", {}),
    ("granite", {}),
]


def build(kind: str, extra: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with quiet_transformers():
        config = AutoConfig.for_model(kind, **{**SIZE, **extra})
        attention = "eager" if kind == "mamba2" else "sdpa"
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()


def tree() -> TrainingInputBatch:
    """Rows longer than the windows above, that branch at several depths."""
    rows = [
        [5, 6, 7, 8, 9, 10, 11, 12],
        [5, 6, 7, 8, 9, 3, 4],
        [5, 6, 7, 20, 21, 22, 23, 24, 25],
        [30, 31, 32, 33, 34, 35],
        [5, 6, 7, 8, 9, 3, 4, 30, 31, 32],
    ]
    ids = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
    return batch_of_lengths([len(row) for row in rows]).with_columns(input_ids=ids)


def states_and_gradient(model: Any, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden state of every token, and the gradient of a sum over them with fixed weights."""
    model.zero_grad()
    states = hidden_states(model, layout)[layout.position_of_token]
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    (states * weights).sum().backward()
    found = [p.grad.flatten() for p in model.base_model.parameters() if p.grad is not None]
    return states.detach(), torch.cat(found)
