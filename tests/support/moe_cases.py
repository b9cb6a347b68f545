"""A tiny mixture of experts, and rollouts whose tokens were sent to known experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.fields import LayoutName
from skyrl_train.model import quiet_transformers
from skyrl_train.types import RolloutBatch, Trajectory, Turn
from tests.support.layout_cases import use_layout
from tests.support.layouts import Layout, Step, closed, flat_gradient as gradient_of, learner_of
from tests.support.learner_cases import VOCABULARY, make_double, save_tiny_tokenizer

NUM_EXPERTS, TOP_K, NUM_LAYERS = 8, 2, 2
EXPERTS = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 16}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_moe(kind: str = "qwen3_moe", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of 2 layers with 8 experts each, of which a token is sent to 2."""
    torch.manual_seed(seed)
    with quiet_transformers():
        config = AutoConfig.for_model(kind, **{**SIZES, **EXPERTS, **changes})
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return made.eval()


def save_moe(folder: Path, *, seed: int = 0) -> Path:
    """The same in Hugging Face format, with a tokenizer."""
    with quiet_transformers():
        make_moe(seed=seed).save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return folder


def with_experts(batch_of: RolloutBatch, *, seed: int = 0, roots_alike: bool = True) -> RolloutBatch:
    """Rollouts whose turns have recorded experts, drawn for each turn by itself. `roots_alike`: but for the prompts of the
    first turns of one prompt, which an engine computes once."""
    rng = np.random.default_rng(seed)
    first: dict[str, np.ndarray[Any, Any]] = {}

    def routed(trajectory: Trajectory, turn: Turn) -> np.ndarray[Any, Any]:
        count = len(turn.added_token_ids) + len(turn.response_token_ids) - 1 + (turn.parent is not None)
        drawn = rng.random((count, NUM_LAYERS, NUM_EXPERTS)).argsort(axis=-1)[..., :TOP_K]
        if turn.parent is None and roots_alike:
            shared = first.setdefault(trajectory.prompt_uid, drawn[: len(turn.added_token_ids)])
            drawn[: len(shared)] = shared
        return drawn

    trajectories = []
    for each in batch_of.trajectories:
        turns = tuple(replace(turn, routed_experts=routed(each, turn)) for turn in each.turns)
        trajectories.append(replace(each, turns=turns))
    return replace(batch_of, trajectories=tuple(trajectories))


STEP = Step(algorithm=AlgorithmConfig(loss_reduction="sequence_mean"))


class DoubleRouter(nn.Module):
    """Qwen3-MoE's, whose own softmax would round to float32."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        best, experts = torch.topk(logits.softmax(-1), TOP_K, dim=-1)
        return logits, best / best.sum(-1, keepdim=True), experts


def double_moe() -> PreTrainedModel:
    made = make_moe()
    made.set_experts_implementation("eager")  # grouped products are of other types
    make_double(made)
    return made


def gradient(model: nn.Module, batch_of: RolloutBatch, name: LayoutName, *, step_wise: bool, merge: bool) -> Tensor:
    mini_batch = closed(STEP, batch_of, Layout(step_wise=step_wise))
    learner = learner_of(model, STEP, Layout())
    use_layout(learner, name, merge=merge, rows=3)
    learner.engine.zero_grad()
    learner.forward_backward(mini_batch)
    return gradient_of(model)


GROUPS = {
    "n_routed_experts": NUM_EXPERTS,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("qwen2_moe", {"shared_expert_intermediate_size": 16}),
    ("olmoe", {}),
    ("mixtral", {"num_local_experts": NUM_EXPERTS}),
    ("deepseek_v3", GROUPS),
    ("gpt_oss", {"num_local_experts": NUM_EXPERTS}),
    ("granitemoe", {"num_local_experts": NUM_EXPERTS}),
]
