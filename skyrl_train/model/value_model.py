"""A value model: a language model's backbone with a head of one number in place of its output head.

    V_t = weight @ hidden[t - 1] + bias        value of the state from which token t is sampled: the tokens before it

The head is called `score`, as in the reward models of transformers (one label), so that a critic may start from one;
where the weights hold no such head it starts at 0, and so does every value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.layouts import Layout, find_scored, spread_to_rows
from skyrl_train.errors import ModelError
from skyrl_train.model.causal_lm import (
    empty_causal_lm,
    place_model,
    read_causal_lm,
    refuse_missing,
    require_finite,
    resolve_model_path,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from skyrl_train.config.models import ModelConfig

HEAD = "score"
"""Attribute of the model, and first part of the names of the head's parameters."""


def load_value_model(
    model: ModelConfig, device: torch.device | str, *, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model on `device` with weights of `dtype`, without dropout, its output head replaced by one in float32. Raises
    ModelError."""
    loaded, missing = read_causal_lm(model, dtype)
    replaced = replace_head(loaded, model)
    refuse_missing(model, [name for name in missing if not name.startswith(f"{replaced}.")])
    stored = _stored_head(model)
    require_finite(stored.items(), model)
    with torch.no_grad():
        for name, parameter in getattr(loaded, HEAD).named_parameters():
            value = stored.get(f"{HEAD}.{name}", parameter)
            if value.shape != parameter.shape:
                raise ModelError(
                    f"model path {model.path!r}: {HEAD}.{name} has shape {list(value.shape)}, not "
                    f"{list(parameter.shape)}: a value is one number. Is it a reward model with one label?"
                )
            parameter.copy_(value)
    place_model(loaded, model, device)
    loaded.train()
    return loaded


def empty_value_model(model: ModelConfig, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of the same form for a rank that will receive its part of the weights: reads none, and costs no memory. See
    `empty_causal_lm`. Raises ModelError."""
    empty = empty_causal_lm(model, dtype=dtype)
    replace_head(empty, model)
    return empty


def replace_head(loaded: PreTrainedModel, model: ModelConfig) -> str:
    """Puts a head of one number, of zeros, in place of the output head, whose name it returns. Raises ModelError."""
    head = loaded.get_output_embeddings()  # type: ignore[no-untyped-call]
    names = [name for name, module in loaded.named_children() if module is head]
    if head is None or not names:
        raise ModelError(
            f"model path {model.path!r}: {type(loaded).__name__} keeps its output head where it cannot be replaced. "
            "Give another critic.model.path"
        )
    delattr(loaded, names[0])
    score = nn.Linear(loaded.config.get_text_config().hidden_size, 1)
    for parameter in score.parameters():
        nn.init.zeros_(parameter)
    setattr(loaded, HEAD, score)
    return names[0]


def token_values(hidden: Tensor, rows: TrainingInputBatch, layout: Layout, model: PreTrainedModel) -> Tensor:
    """`[rows, longest]` in float32 (float64 for float64 hidden states): the value before each token that `loss_mask`
    marks, 0 elsewhere.

    hidden `[positions, hidden]` is the forward of `layout`. Raises BatchError where `loss_mask` marks a row's first
    token, before which there is no state.
    """
    scored = layout.scored or find_scored(rows, layout)
    states = hidden.index_select(0, scored.states if scored.copies is None else scored.states[scored.copies])
    head: Any = getattr(model, HEAD)
    with torch.autocast(hidden.device.type, enabled=False):
        weight, bias = head.weight, head.bias
        precision = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        values = nn.functional.linear(states.to(precision), weight.to(precision), bias.to(precision)).squeeze(1)
    return spread_to_rows(layout.combine(values.new_zeros(rows.num_tokens).index_put((scored.tokens,), values)), rows)


def _stored_head(model: ModelConfig) -> dict[str, Tensor]:
    """`score.weight` and `score.bias` where the model's files hold them."""
    found: dict[str, Tensor] = {}
    folder = resolve_model_path(model.path, model.revision)
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                found |= {name: tensors.get_tensor(name) for name in tensors.keys() if name.startswith(f"{HEAD}.")}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelError(f"model path {model.path!r}: {file} cannot be read: {error}") from error
    return found
