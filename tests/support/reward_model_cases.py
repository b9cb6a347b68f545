"""A tiny reward model in a folder, and conversations for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from skyrl_train.model import quiet_transformers
from tests.support.fakes import make_tokenizer

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "1 + 1 = ?"}, {"role": "assistant", "content": answer}]
    for answer in ("2", "STOP", "#### 2", "1 2 3 4 5 6 7 8 9", "Try again", "2")
]


def save_reward_model(
    folder: Path,
    *,
    seed: int = 0,
    num_labels: int = 1,
    pad_token_id: int | None = 3,
    tokenizer: Any = None,
    template: bool = True,
) -> Path:
    """A random classifier of 2 layers whose padding is the token that ends each message, as in many published ones."""
    tokenizer = tokenizer or make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,  # 32 for each head, the least that vLLM computes on a CPU
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
        pad_token_id=pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    config.num_labels = num_labels
    torch.manual_seed(seed)
    with quiet_transformers():
        Qwen2ForSequenceClassification(config).save_pretrained(folder)
        if not template:
            tokenizer.chat_template = None
        tokenizer.save_pretrained(folder)
    return folder
