"""At which of vLLM's levels an engine sleeps: 1 keeps a copy of the weights, 2 buffers alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.config.models import LoraConfig
from skyrl_train.inference.vllm.core import VLLMCore


@pytest.mark.parametrize(
    ("settings", "keeps_weights", "level"),
    [
        ({}, True, 1),
        ({}, False, 2),
        ({"adapter": LoraConfig(rank=8)}, False, 1),
        ({"arguments": {"quantization": "fp8_per_channel"}}, False, 1),
    ],
)
def test_weights_are_dropped_where_all_of_them_come_back_as_they_are_sent(
    settings: dict[str, Any], keeps_weights: bool, level: int
) -> None:
    core, told = VLLMCore.__new__(VLLMCore), list[int]()
    core._settings = SimpleNamespace(adapter=settings.get("adapter"))  # type: ignore[assignment]
    core._quantizes = bool(settings.get("arguments", {}).get("quantization"))
    core._engine = SimpleNamespace(sleep=lambda level: told.append(level))
    core.sleep(keeps_weights=keeps_weights)
    assert told == [level]
