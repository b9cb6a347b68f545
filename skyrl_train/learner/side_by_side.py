"""Several adapters on one base model, each a learner of its own: its parameters, its optimizer, its gradient. Beside them a
copy of the base that is trained whole.

    base model, loaded once and frozen  --create-->  RowLossLearner "a", RowLossLearner "b", ...

One of them computes at a time, on one thread, or several of them in one pass (`forward_losses`). Gradients stay with the
parameters that they belong to, so that passes and steps of different learners may follow one another in any order.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.derived import LearnerSettings
from skyrl_train.config.models import LoraConfig, OptimizerConfig
from skyrl_train.errors import NonFiniteError
from skyrl_train.learner.build import build_engine
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.learner.passes import LossOfRows
from skyrl_train.learner.row_losses import RowLossLearner, TokenLosses
from skyrl_train.model import decoder_layers, empty_causal_lm, load_causal_lm
from skyrl_train.model.lora import (
    add_adapter,
    attach_adapters,
    layers_to_adapt,
    remove_adapter,
    weights_by_name,
)
from skyrl_train.telemetry import StepMetrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class AdapterPass:
    """What one of several adapters computes in a pass."""

    batch: TrainingInputBatch
    loss: AlgorithmConfig


class AdapterLearners:
    """The learners of adapters that share their base."""

    def __init__(self, settings: LearnerSettings) -> None:
        """`settings` are of the base: an adapter and an optimizer that they name are left out. Raises ModelError."""
        self._settings = replace(settings, model=replace(settings.model, lora=LoraConfig()), optimizer=None)
        self._base = build_engine(self._settings, load=load_causal_lm, empty=empty_causal_lm)
        self._learners: dict[str, RowLossLearner] = {}
        passes = self._base.passes
        self._together = _Together(
            self.model, name=self._base.name, micro_batching=passes.micro_batching, dtype=passes.dtype
        )

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

    def create(self, name: str, lora: LoraConfig, *, seed: int, optimizer: OptimizerConfig) -> RowLossLearner:
        """Return a learner of a new adapter, random by the seed. `name` is new and has no dot; `lora.targets` are names of
        `targets`. Raises ModelError."""
        # None of the others beside it: adding one walks over all modules, which would take longer the more there are.
        attach_adapters(self.model, [])
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
        self._learners[name] = self._learner(engine)
        return self._learners[name]

    def create_full(self, name: str, optimizer: OptimizerConfig) -> RowLossLearner:
        """Return a learner of all weights of a copy of the base, read anew, in float32. `name` is new. Raises ModelError."""
        model = replace(self._settings.model, quantization="none")
        settings = replace(self._settings, model=model, optimizer=optimizer)
        self._learners[name] = self._learner(build_engine(settings, load=load_causal_lm, empty=empty_causal_lm))
        return self._learners[name]

    def forward_losses(self, asked: Mapping[str, AdapterPass], *, backward: bool) -> dict[str, TokenLosses]:
        """As `RowLossLearner.forward_losses` of each adapter's rows under its loss, in one pass over all of them.

        A pass that fails, or finds a number that is not finite, leaves every gradient as it was: what one adapter does wrong
        could then be in the others' numbers. Raises NonFiniteError for the latter, and what the pass raises.
        """
        names = tuple(asked)
        losses: list[AlgorithmConfig] = []
        for each in asked.values():
            # Each loss once: where all adapters have the same, its gradient can be formed in the head.
            losses += [] if each.loss in losses else [each.loss]
        batch = _rows_together(list(asked.values()), losses)
        self._together.oom_retry.use(adapters=names)
        attach_adapters(self.model, names)
        engines = [self._learners[name].engine for name in names]
        parameters = [parameter for engine in engines for parameter in engine.parameters.values()]
        # Apart from the pass's own, which is dropped where any of it is not finite.
        kept = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.requires_grad_(backward)
            parameter.grad = None
        is_done = False
        try:
            found = self._learner(self._together).forward_losses(batch, losses, backward=backward)
            if not all(map(_is_finite, (found.losses, found.logprobs, *(each.grad for each in parameters)))):
                raise NonFiniteError("a loss, a log-probability or a gradient of one of several adapters is not finite")
            is_done = True
        finally:
            _put_back(parameters, kept, adds=is_done)
        if backward:
            for engine in engines:
                engine.note_gradient()
        bounds = pairwise(accumulate((each.batch.num_tokens for each in asked.values()), initial=0))
        return {
            name: TokenLosses(logprobs=found.logprobs[start:stop], losses=found.losses[start:stop])
            for name, (start, stop) in zip(names, bounds)
        }

    def _learner(self, engine: ModelEngine) -> RowLossLearner:
        settings = self._settings
        return RowLossLearner(
            engine, model=settings.model, algorithm=settings.algorithm, temperature=settings.temperature
        )

    def remove(self, name: str) -> None:
        """Forget a learner and free its memory."""
        if self._learners.pop(name).engine.adapter:
            attach_adapters(self.model, [name])
            remove_adapter(self.model, name)
        else:
            gc.collect()  # the parts of an engine refer to each other in rings
            self._base.offloader.release()

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return copies of an adapter's parameters, under the names that they would have as the only one."""
        return {key: each.detach().clone() for key, each in self._learners[name].engine.parameters.items()}


class _Together(ModelEngine):
    """The base with several of its adapters at once: it has gradients, and no optimizer, which is each adapter's own."""

    def forward_backward(
        self, batch: TrainingInputBatch, loss_of: LossOfRows, *, num_documents: int = 0
    ) -> StepMetrics:
        """Adds the gradient of the sum of `loss_of` over micro-batches to the adapters that the rows name."""
        del num_documents
        return self.passes.accumulate(self.passes.plan(batch, training=True), loss_of, step=0)[0]


def _rows_together(asked: Sequence[AdapterPass], losses: Sequence[AlgorithmConfig]) -> TrainingInputBatch:
    """The rows of all, each a trajectory of its own, with the adapter and the loss of each."""
    counts = torch.tensor([each.batch.num_rows for each in asked])
    batch = TrainingInputBatch.cat([each.batch for each in asked])
    adapters = torch.arange(len(asked), dtype=torch.int32).repeat_interleave(counts)
    # Numbers of different adapters' batches coincide, and results are told apart by them.
    columns = {"trajectory_index": torch.arange(batch.num_rows, dtype=torch.int32), "adapter_index": adapters}
    columns["prompt_index"] = adapters  # rows of different adapters share nothing
    if len(losses) > 1:
        of_adapter = torch.tensor([losses.index(each.loss) for each in asked], dtype=torch.int32)
        columns["loss_index"] = of_adapter.repeat_interleave(counts)
    return batch.with_columns(**columns)


def _put_back(parameters: Sequence[nn.Parameter], kept: Sequence[Tensor | None], *, adds: bool) -> None:
    """Restore the gradients of before; with `adds`, what was found since is added to them."""
    for parameter, before in zip(parameters, kept):
        found = parameter.grad if adds else None
        parameter.grad = before if found is None else found if before is None else before.add_(found)


def _is_finite(values: Tensor | None) -> bool:
    return values is None or math.isfinite(float(values.abs().max() if values.numel() else 0.0))
