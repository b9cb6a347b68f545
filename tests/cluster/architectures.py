"""Tiny random models of the architectures that train, for engines that have to compute as the trainer does.

`python -m tests.cluster.architectures NAME` prints what an engine makes of one, as JSON; a process of its own for each, for
vLLM sets up the group of ranks for experts only in the first engine of a process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from skyrl_train.config import Config
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import GeneratorConfig, ModelConfig, OptimizerConfig
from skyrl_train.endpoints import LocalEndpoint
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.inference.vllm import VLLMEngine
from skyrl_train.learner import ModelEngine, PolicyLearner
from skyrl_train.model import load_causal_lm, load_tokenizer
from skyrl_train.runs.construction import build_probe, engine_settings
from skyrl_train.weight_sync import DeviceSharing, UpdatableEngine
from tests.support.learner_cases import fixed_rows
from tests.support.weight_cases import in_buckets

VOCABULARY = 128
_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    # those of a family lie beyond so small a vocabulary
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA: Mapping[str, Any] = {"head_dim": 32, "tie_word_embeddings": True}
_EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "llama": {"model_type": "llama"},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "head_dim": 32},
    "gemma": {"model_type": "gemma", **_GEMMA},
    "gemma2": {"model_type": "gemma2", **_GEMMA, "query_pre_attn_scalar": 32, "sliding_window": 64},
    "gemma3": {"model_type": "gemma3_text", **_GEMMA, "query_pre_attn_scalar": 32, "sliding_window": 64},
    "gemma3_multimodal": {"model_type": "gemma3"},
    "phi": {"model_type": "phi"},
    "phi3": {"model_type": "phi3"},
    "gpt2": {"model_type": "gpt2", "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": 4},
    "opt": {"model_type": "opt", "ffn_dim": 160, "word_embed_proj_dim": 128},
    "olmo2": {"model_type": "olmo2"},
    "granite": {"model_type": "granite"},
    "smollm3": {"model_type": "smollm3"},
    "glm4": {"model_type": "glm4", "head_dim": 32},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": None},
    "cohere": {"model_type": "cohere", "tie_word_embeddings": True},
    "falcon": {"model_type": "falcon", "ffn_hidden_size": 512},
    "exaone4": {"model_type": "exaone4", "sliding_window": 64, "sliding_window_pattern": 2},
    "qwen2_moe": {"model_type": "qwen2_moe", **_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"model_type": "qwen3_moe", **_EXPERTS, "moe_intermediate_size": 48, "head_dim": 32},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
    },
}
"""By name, what differs from `_SIZES`."""
EAGER = ("gpt_oss",)
"""Those that train with `model.attention=eager` alone."""
APART = ("gpt_neox", "olmo2", "phi", "smollm3", "starcoder2")
"""Those for which vLLM takes transformers' own classes and changes them for a whole process: here its core is another."""


def build(name: str, folder: Path) -> Path:
    """A random model of this architecture, with the bundled tokenizer, in `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    changes = dict(ARCHITECTURES[name])
    config = AutoConfig.for_model(**{**_SIZES, **changes}) if name != "gemma3_multimodal" else _multimodal()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    load_tokenizer(ModelConfig()).save_pretrained(folder)
    return folder


def _multimodal() -> Any:
    from transformers import AutoConfig

    text = {**_SIZES, **ARCHITECTURES["gemma3"], "model_type": "gemma3_text"}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    return AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)


def outcome(name: str, folder: Path) -> dict[str, float]:
    """Largest differences of log-probabilities between an engine and a learner that holds this architecture, by the probe of
    a run's first sync: as loaded, and after each of two syncs of weights as after a long training. Raises EngineError where
    engine or probe refuse."""
    model = ModelConfig(path=str(build(name, folder)), attention="eager" if name in EAGER else "auto")
    trained = ModelEngine(
        load_causal_lm(model, "cpu"), name="policy", micro_batching=fixed_rows(1), optimizer=OptimizerConfig()
    )
    learner = PolicyLearner(trained, model=model, algorithm=AlgorithmConfig(), temperature=1.0)
    config = Config(model=model, generator=GeneratorConfig(backend="vllm", max_context_length=400))
    # After the trainer's model: vLLM puts activations of its own into transformers.
    engine = VLLMEngine(engine_settings(config))
    endpoint = LocalEndpoint[UpdatableEngine](engine)
    ask = build_probe(lambda: endpoint, DeviceSharing(), engine_settings(config), vocabulary=VOCABULARY)

    def probe(version: int) -> float:
        found = ask(learner.weights(), version)
        assert found is not None
        assert found.probe_difference is not None
        return found.probe_difference

    try:
        found = {"loaded": probe(-1)}  # nothing was sent yet
        for version in (1, 2):
            generator = torch.Generator().manual_seed(version)
            for parameter in trained.parameters.values():
                parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=generator))
            weights = list(learner.weights())
            engine.begin_update()
            for bucket in in_buckets(weights):
                engine.update(bucket)
            engine.finish_update(version, len(weights))
            found[f"sync_{version}"] = probe(version)
        return found
    finally:
        engine.close()


if __name__ == "__main__":
    if sys.argv[1] in APART:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with tempfile.TemporaryDirectory() as place:
        try:
            told: dict[str, float] | str = outcome(sys.argv[1], Path(place))
        except SkyrlTrainError as refusal:
            told = f"{type(refusal).__name__}: {refusal}"
    print(json.dumps(told))
