"""Which tokens end a response."""

from __future__ import annotations

from skyrl_train.config.schema import ModelConfig
from skyrl_train.model.causal_lm import load_tokenizer, resolve_model_path


def stop_token_ids(model: ModelConfig) -> tuple[int, ...]:
    """By the model's generation config and by the tokenizer, as `generator=hf` does. Raises ModelError."""
    from transformers import GenerationConfig

    try:
        listed = GenerationConfig.from_pretrained(str(resolve_model_path(model.path, model.revision))).eos_token_id
    except OSError:
        listed = None
    ids = {load_tokenizer(model).eos_token_id} | (set(listed) if isinstance(listed, list) else {listed})
    return tuple(sorted(token_id for token_id in ids if token_id is not None))
