"""Several adapters on one base model, each a learner of its own: its parameters, its optimizer, its gradient.

    base model, loaded once and frozen  --create-->  PolicyLearner "a", PolicyLearner "b", ...

One of them computes at a time, on one thread. Gradients stay with the parameters that they belong to, so that passes and
steps of different learners may follow one another in any order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from skyrl_train.config.derived import LearnerSettings
from skyrl_train.config.models import LoraConfig, OptimizerConfig
from skyrl_train.learner.build import build_engine
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.learner.policy import PolicyLearner
from skyrl_train.model import decoder_layers, empty_causal_lm, load_causal_lm
from skyrl_train.model.lora import (
    adapter_tensors,
    add_adapter,
    layers_to_adapt,
    remove_adapter,
    weights_by_name,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AdapterLearners:
    """The learners of adapters that share their base."""

    def __init__(self, settings: LearnerSettings) -> None:
        """`settings` are of the base: an adapter and an optimizer that they name are left out. Raises ModelError."""
        self._settings = replace(settings, model=replace(settings.model, lora=LoraConfig()), optimizer=None)
        self._base = build_engine(self._settings, load=load_causal_lm, empty=empty_causal_lm)
        self._learners: dict[str, PolicyLearner] = {}

    @property
    def model(self) -> PreTrainedModel:
        """The base, with the adapters on it."""
        return self._base.model

    def base_weights(self) -> dict[str, Tensor]:
        """Return the base's own parameters under their Hugging Face names, as they lie in memory."""
        return {name: weight.parameter for name, weight in weights_by_name(self.model).items()}

    def targets(self, *, attention: bool, mlp: bool) -> tuple[str, ...]:
        """Return the names of layers, for `LoraConfig.targets`."""
        return layers_to_adapt(self.model, decoder_layers(self.model), attention=attention, mlp=mlp)

    def create(self, name: str, lora: LoraConfig, *, seed: int, optimizer: OptimizerConfig) -> PolicyLearner:
        """Return a learner of a new adapter, random by the seed. `name` is new and has no dot; `lora.targets` are names of
        `targets`. Raises ModelError."""
        add_adapter(self.model, lora, seed=seed, name=name)
        passes = self._base.passes
        engine = ModelEngine(
            self.model,
            name=self._base.name,
            micro_batching=passes.micro_batching,
            dtype=passes.dtype,
            optimizer=optimizer,
            adapter=name,
        )
        settings = self._settings
        learner = PolicyLearner(
            engine, model=settings.model, algorithm=settings.algorithm, temperature=settings.temperature
        )
        self._learners[name] = learner
        return learner

    def remove(self, name: str) -> None:
        """Forget a learner and free its memory."""
        del self._learners[name]
        remove_adapter(self.model, name)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return copies of an adapter's parameters, under the names that they would have as the only one."""
        return {key: each.detach().clone() for key, each in adapter_tensors(self.model, name).items()}
