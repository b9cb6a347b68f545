"""The policy's adapter inside vLLM (`generator.vllm.lora_sync=adapter`): a LoRA request beside weights that stay.

It has one name and one number for ever, and each sync loads it in place of the one before. So requests that run go on with
the new adapter, as they go on with new weights; and the prefix cache, which knows the adapter by its name, must be reset,
as it is after new weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from skyrl_train.config.models import LoraConfig
from skyrl_train.model.lora import write_adapter

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_NAME = "policy"
_NUMBER = 1
_CAPACITIES = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for."""


def adapter_arguments(lora: LoraConfig) -> dict[str, Any]:
    """Return arguments of `vllm.EngineArgs`: room for one adapter of this rank."""
    capacity = next(capacity for capacity in _CAPACITIES if capacity >= lora.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": capacity}


def with_adapter() -> LoRARequest:
    """What a request says to be answered with the adapter that is loaded."""
    return _request("loaded already")


def load_adapter(worker: Any, tensors: Mapping[str, Tensor], *, rank: int, alpha: float) -> bool:
    """Puts the adapter into vLLM's `worker`, in place of the one before; whether it is the only one now.

    `tensors` are whole, under the names of `model/lora/adapter.py: adapter_tensors`. They pass through a folder, since
    files are the form in which vLLM takes adapters.
    """
    with tempfile.TemporaryDirectory(prefix="skyrl-adapter-") as folder:
        write_adapter(Path(folder), dict(tensors), LoraConfig(rank=rank, alpha=alpha))
        is_loaded = worker.add_lora(_request(folder, replaces=True))
    return bool(is_loaded) and set(worker.list_loras()) == {_NUMBER}


def _request(path: str, *, replaces: bool = False) -> LoRARequest:
    from vllm.lora.request import LoRARequest

    return LoRARequest(_NAME, _NUMBER, path, load_inplace=replaces)
