"""Peaks of real passes under the counting meter, beside those that a plan predicts from the model's config alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch

import skyrl_train.data.assets
from skyrl_train.config import Config
from skyrl_train.config.derived import ScheduleLength, learner_settings
from skyrl_train.config.models import LoraConfig
from skyrl_train.learner import build_learner
from skyrl_train.learner.memory import CountingMeter, Effort, Phase, Prober, hold_everything
from skyrl_train.plan.memory import models_of

_DENSE = {
    "model_type": "qwen2",
    "hidden_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 1856,
    "vocab_size": 20_000,
    "tie_word_embeddings": True,
}
_EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 600,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class PredictionCase:
    """A model, how it is trained, and the numbers of rows that are measured."""

    name: str
    architecture: dict[str, Any] = field(default_factory=dict)
    """Empty: the bundled model."""
    longest: int = 64
    rows: tuple[int, ...] = (1, 3, 8)
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of `model`."""
    layout: str = "padded"


CASES = (
    PredictionCase(name="bundled", longest=32, rows=(1, 6, 40)),
    PredictionCase(name="30M dense", architecture=_DENSE),
    PredictionCase(name="tiny mixture of experts", architecture=_EXPERTS),
    PredictionCase(name="30M dense, adapter", architecture=_DENSE, model={"lora": LoraConfig(rank=16)}),
)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One pass of one case."""

    phase: Phase
    rows: int
    measured_bytes: int
    predicted_bytes: int

    @property
    def error(self) -> float:
        """Relative, of the whole."""
        return self.predicted_bytes / self.measured_bytes - 1


def predictions(case: PredictionCase, folder: Path) -> Iterator[Prediction]:
    """Training and scoring of the policy at each number of rows; `folder` is filled with the model, weights included."""
    torch.set_num_threads(1)
    config = _config(case, folder)
    predicted = models_of(config, Effort())["policy"]
    learner = build_learner(learner_settings(config, "policy", ScheduleLength(optimizer_steps=10)))
    meter = CountingMeter(1 << 40)
    hold_everything(learner.engine, meter)
    prober = Prober(learner=learner, meter=meter)
    phases: tuple[Phase, ...] = ("training", "scoring")
    for phase in phases:
        for rows in case.rows:
            measured = prober.probe(rows, case.longest, training=phase == "training")
            assert measured is not None
            yield Prediction(
                phase=phase,
                rows=rows,
                measured_bytes=measured.peak_bytes,
                predicted_bytes=predicted.estimate(phase, rows).peak_bytes,
            )


def _config(case: PredictionCase, folder: Path) -> Config:
    base = Config()
    path = "builtin:tiny_qwen2"
    if case.architecture:
        path = str(folder)
        _save_model(case.architecture, folder)
    return replace(
        base,
        platform=replace(base.platform, name="cpu", device="cpu"),
        model=replace(base.model, path=path, **case.model),
        trainer=replace(base.trainer, layout=case.layout),
        generator=replace(base.generator, max_context_length=case.longest),
    )


def _save_model(architecture: dict[str, Any], folder: Path) -> None:
    """A random model, with the bundled model's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**architecture)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    bundled = Path(next(iter(skyrl_train.data.assets.__path__))) / "tiny_qwen2"
    for file in bundled.glob("*token*"):
        copyfile(file, folder / file.name)
