"""What the layers of any model of transformers hold, found by running it on tensors without memory (FakeTensorMode).

The real forward and backward run at a few shapes; sizes are counted, nothing is computed or allocated, and no weights are
needed. The bytes at each moment are linear in positions and in positions times length, so that three shapes give all
coefficients. Seconds for models of ordinary depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from skyrl_train.errors import ModelError
from skyrl_train.learner.architectures import meta_model, model_facts, read_config
from skyrl_train.learner.memory import MemoryFacts, MemorySettings, memory_facts
from skyrl_train.learner.memory_blocks import BackboneCost, Cost
from skyrl_train.learner.memory_facts import GATED, facts_of_model

_SHAPES = ((1, 1024), (2, 1024), (1, 2048))
"""Rows and their length."""
_DEPTHS = (2, 4)
"""Decoder layers of the models that run; what more layers keep follows from the difference."""
_SDPA = "skyrl_traced_sdpa"
"""The fused attention without its mask, which the padded layout does not need either."""


def facts_at(path: str, settings: MemorySettings, *, revision: str | None = None) -> MemoryFacts:
    """For the model at `path`: counted where its family is known, else traced. Raises ModelError."""
    config = read_config(path, revision=revision)
    if config.get("model_type") in GATED:
        return memory_facts(model_facts(path, revision=revision), settings)
    model = facts_of_model(meta_model(config, name=path))
    return memory_facts(model, settings, trace_backbone(config, settings, name=path))


def trace_backbone(config: Mapping[str, Any], settings: MemorySettings, *, name: str) -> BackboneCost:
    """Of the model that `config` describes. Raises ModelError where it does not run on such tensors."""
    depth = int(config["num_hidden_layers"])
    few, more = (min(depth, layers) for layers in _DEPTHS)
    try:
        small = [_trace(_of_depth(config, few), settings, rows, length) for rows, length in _SHAPES]
        large = [_trace(_of_depth(config, more), settings, rows, length) for rows, length in _SHAPES]
    except Exception as error:
        raise ModelError(
            f"model path {name!r}: its memory cannot be predicted, since it does not run on tensors without memory "
            f"({type(error).__name__}: {error}). Set plan.architecture to a model of about the same sizes"
        ) from error
    per_layer = (np.array(large) - np.array(small))[:, 0] / max(1, more - few)
    saved = _solve([last[0] + each * (depth - more) for last, each in zip(large, per_layer)])
    scoring, backward = (_solve([float(each[index]) for each in large]) for index in (1, 2))
    if settings.precision.casts:  # the copies of weights, which are counted by themselves
        saved, scoring = replace(saved, constant=0.0), replace(scoring, constant=0.0)
    return BackboneCost(saved=saved, attention=Cost(), scoring=(scoring,), backward=(backward,))


def _of_depth(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The first layers of the model."""
    cut = {**config, "num_hidden_layers": layers}
    if config.get("layer_types"):
        cut["layer_types"] = list(config["layer_types"])[:layers]
    return cut


def _trace(config: Mapping[str, Any], settings: MemorySettings, rows: int, length: int) -> tuple[int, int, int]:
    """Saved by the forward, the peak of a forward alone, and the peak of the backward beyond what was saved."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from skyrl_train.learner.memory_meter import CountingMeter

    AttentionInterface.register(_SDPA, sdpa_attention_forward)
    precision = settings.precision
    with FakeTensorMode():
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.for_model(**config),
            dtype=torch.float32 if precision.stream == 4 else torch.bfloat16,
            attn_implementation="eager" if settings.eager else _SDPA,
        )
        model.train()
        if settings.checkpointing:
            options = {"use_reentrant": False, "preserve_rng_state": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        meter = CountingMeter(1 << 62)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
            meter.adopt([parameter, parameter.grad])
        meter.adopt(model.buffers())
        resident = meter.in_use_bytes()
        inputs = {"input_ids": torch.zeros(rows, length, dtype=torch.int64), "use_cache": False}
        inputs["position_ids"] = torch.zeros(rows, length, dtype=torch.int64)
        with meter.counting():
            autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision.casts)
            meter.reset_peak()
            with torch.no_grad(), autocast:
                model.base_model(**inputs)
            scoring = meter.peak_bytes() - resident
            with autocast:
                hidden = model.base_model(**inputs).last_hidden_state
            last = hidden.untyped_storage().nbytes()
            held = meter.in_use_bytes() - last
            gradient = torch.empty_like(hidden)
            meter.reset_peak()
            hidden.backward(gradient)
            return held - resident, scoring, meter.peak_bytes() - last - held


def _solve(found: list[float]) -> Cost:
    matrix = np.array([[1.0, rows * length, rows * length * length] for rows, length in _SHAPES])
    constant, per_position, per_pair = np.linalg.solve(matrix, np.array(found, dtype=np.float64))
    return Cost(constant=float(constant), per_position=float(per_position), per_pair=float(per_pair))
