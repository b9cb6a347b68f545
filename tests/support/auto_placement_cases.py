"""Models of four sizes as folders that hold a config and no weights, and configurations for stated numbers of GPUs."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

import skyrl_train.data.assets
from skyrl_train.config import Config
from skyrl_train.runs.cli import conf_dir, load_node, register_resolvers
from skyrl_train.system import Devices

SIZES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "32B": {
        "model_type": "qwen2",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 27648,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "70B": {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
COUNTS = (1, 2, 4, 8)


def sized_model(folder: Path, size: str) -> Path:
    """A folder with the config of a model of that size and a tokenizer, and no weights."""
    if not folder.is_dir():
        tiny = Path(next(iter(skyrl_train.data.assets.__path__))) / "tiny_qwen2"
        shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors", "recipe.json"))
        (folder / "config.json").write_text(json.dumps(SIZES[size]), encoding="utf-8")
    return folder


def gpu_config(*overrides: str) -> Config:
    """The experiment as the command line composes it for GPUs."""
    paths = [text.removeprefix("model.path=") for text in overrides if text.startswith("model.path=")]
    config = _composed(*(text for text in overrides if not text.startswith("model.path=")))
    return replace(config, model=replace(config.model, path=paths[0])) if paths else config


@functools.cache
def _composed(*overrides: str) -> Config:
    """Composing takes a third of a second, and configs cannot be changed."""
    register_resolvers()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        arguments = ["+experiment=gsm8k_multiturn", "platform=gpu", "output_dir=/outputs", *overrides]
        return load_node(compose("config", overrides=arguments), Config)


def gpus(*per_node: int, memory_gb: float = 80.0) -> Devices:
    """So many on each node."""
    return Devices(gpus_per_node=per_node, memory_gb=memory_gb, source="stated")
