"""Adapters inside vLLM: LoRA requests beside weights that stay.

The policy's (`generator.vllm.lora_sync=adapter`) has one name and one number for ever, and each sync loads it in place of
the one before. So requests that run go on with the new adapter, as they go on with new weights; and the prefix cache, which
knows the adapter by its name, must be reset, as it is after new weights.

Those of a server each have a name and a number of their own, and stay as they are.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from skyrl_train.config.models import LoraConfig
from skyrl_train.errors import EngineError
from skyrl_train.model.lora import write_adapter

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_NAME = "policy"
_NUMBER = 1
"""Of the policy's; named ones have higher numbers."""
_CAPACITIES = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for."""


def adapter_arguments(lora: LoraConfig, count: int = 1) -> dict[str, Any]:
    """Return arguments of `vllm.EngineArgs`: room for so many adapters of this rank."""
    capacity = next(capacity for capacity in _CAPACITIES if capacity >= lora.rank)
    return {"enable_lora": True, "max_loras": count, "max_lora_rank": capacity}


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


class NamedAdapters:
    """What requests say to be answered with one of several adapters, whose files stay until they are forgotten."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="skyrl-adapters-")
        self._requests: dict[str, LoRARequest] = {}
        self._last = _NUMBER

    def add(self, name: str, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
        """Write an adapter with a new name; `tensors` as of `load_adapter`."""
        from vllm.lora.request import LoRARequest

        self._last += 1
        folder = Path(self._folder.name) / f"{self._last}"
        write_adapter(folder, dict(tensors), lora)
        self._requests[name] = LoRARequest(name, self._last, str(folder))

    def get(self, name: str) -> LoRARequest:
        """Raises EngineError where there is none of that name."""
        if name not in self._requests:
            raise EngineError(f"there is no adapter {name!r}")
        return self._requests[name]

    def remove(self, name: str) -> None:
        """Forget an adapter, if it is there."""
        if (request := self._requests.pop(name, None)) is not None:
            shutil.rmtree(request.lora_path, ignore_errors=True)

    def close(self) -> None:
        """Remove all files."""
        self._folder.cleanup()


def _request(path: str, *, replaces: bool = False) -> LoRARequest:
    from vllm.lora.request import LoRARequest

    return LoRARequest(_NAME, _NUMBER, path, load_inplace=replaces)
