"""The critic: values of the states that tokens were sampled from, and the value loss.

loss = sum over tokens of loss_weight * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from skyrl_train.algorithms.losses import PolicyLossOutput, ValueLossInputs, check_loss_output
from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.layouts import Layout
from skyrl_train.batch.steps import LossDenominators, MiniBatch
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import ModelConfig
from skyrl_train.errors import BatchError
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.learner.holds_model import HoldsModel
from skyrl_train.learner.optimizer import AdamWStep
from skyrl_train.model import token_values
from skyrl_train.model.files import export_model
from skyrl_train.parts import CRITIC_LOSSES
from skyrl_train.registry import part_name
from skyrl_train.telemetry import Mean, StepMetrics, later

DECLARED_METRICS = """
loss/value | | The critic's loss. | with a critic | verl `critic/vf_loss`; SkyRL `critic/critic_loss`
"""


class CriticLearner(HoldsModel):
    """A `Learner` for the value model."""

    def __init__(self, engine: ModelEngine, *, model: ModelConfig, algorithm: AlgorithmConfig):
        super().__init__(engine)
        self._model_config = model
        self._algorithm = algorithm

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        """`[num_tokens]` on the CPU: the value before each token with `loss_mask`, 0 elsewhere."""
        return self.engine.forward(batch, self._values)

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:
        """Adds the gradient of the mini-batch's value loss. Raises BatchError for a missing column."""
        for name in ("loss_weights", "values", "returns"):
            if name not in mini_batch.batch:
                raise BatchError(f"the mini-batch has no column {name!r}, which the critic's loss needs")
        return self.engine.forward_backward(
            mini_batch.batch,
            lambda hidden, rows, layout: self._loss(hidden, rows, layout, mini_batch.denominators),
            num_documents=mini_batch.denominators.num_sequences,
        )

    def optim_step(self, settings: AdamWStep | None = None) -> StepMetrics:
        """Clips, steps, zeroes the gradients, advances the schedule, or does as `settings` say. Raises NonFiniteError before
        any weight moves."""
        return self.engine.optim_step(settings)

    def export_hf(self, folder: Path) -> None:
        """Weights, config and tokenizer, for another run's `critic.model.path`. Raises ModelError."""
        tensors = self.whole_state_dict()
        if not self.engine.strategy.rank:
            export_model(folder, self.engine.model, tensors, self._model_config)

    def _values(self, hidden: Tensor, rows: TrainingInputBatch, layout: Layout) -> Tensor:
        return token_values(hidden, rows, layout, self.engine.model)

    def _loss(
        self, hidden: Tensor, rows: TrainingInputBatch, layout: Layout, denominators: LossDenominators
    ) -> tuple[Tensor, StepMetrics]:
        """The rows' share of the step's loss, and its metrics; `loss/value` adds up over micro-batches and ranks."""
        values, mask = self._values(hidden, rows, layout), rows.padded("loss_mask")
        old_values, returns = (rows.padded(name).to(values.dtype) for name in ("values", "returns"))
        inputs = ValueLossInputs(values=values, old_values=old_values, returns=returns, loss_mask=mask)
        output: PolicyLossOutput = CRITIC_LOSSES.resolve(self._algorithm.critic_loss)(inputs, self._algorithm)
        check_loss_output(output, values.shape, f"critic loss {part_name(self._algorithm.critic_loss)!r}")
        loss = (rows.padded("loss_weights") * output.token_losses).sum()
        num_tokens = layout.scored.num_loss_tokens if layout.scored is not None else int(mask.sum())
        # The weight of a mean: over all micro-batches of the step the shares add up to 1, and the losses to the step's.
        share = num_tokens / max(1, denominators.num_tokens)
        return loss, {"loss/value": Mean(later(loss), share), **output.metrics}
