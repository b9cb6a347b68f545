"""The reference: the model that the policy started from, unless `reference.model.path` names another.

Where the policy trains an adapter, its own model with the adapter off is just that, and no second model is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from skyrl_train.batch.minibatch import MiniBatch
from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.config.passes import reference_is_base
from skyrl_train.errors import ModelError, SkyrlTrainError
from skyrl_train.learner.policy import PolicyLearner, build_policy_learner
from skyrl_train.telemetry.metrics import StepMetrics

if TYPE_CHECKING:
    from skyrl_train.batch.plan import BatchPlan
    from skyrl_train.config.schema import Config


class HasBase(Protocol):
    """A policy that trains an adapter, in this process or on ranks."""

    def forward_base(self, batch: TrainingInputBatch) -> Tensor:
        """`Learner.forward` with the adapter off."""
        ...


class BaseOfAdapter:
    """Scores with the policy's model, its adapter off. Implements Reference."""

    def __init__(self, policy: HasBase) -> None:
        self._policy = policy

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        """As the policy's, of the base model."""
        return self._policy.forward_base(batch)

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:  # noqa: ARG002
        """Raises SkyrlTrainError: a reference is never updated."""
        raise _only_scored()

    def optim_step(self) -> StepMetrics:
        """Raises SkyrlTrainError: a reference is never updated."""
        raise _only_scored()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Raises SkyrlTrainError: they are those of `model.path`."""
        raise _only_scored()

    def save(self, folder: Path) -> None:
        """Nothing to save: the base model does not change."""

    def load(self, folder: Path) -> None:
        """Nothing to load."""

    def export_hf(self, folder: Path) -> None:  # noqa: ARG002
        """Raises SkyrlTrainError: it is the model at `model.path`."""
        raise _only_scored()

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:  # noqa: ARG002
        """Raises ModelError: the policy needs the base model as it is."""
        raise ModelError("the reference is the policy's model with the adapter off and cannot take other weights")

    def close(self) -> None:
        """The model is the policy's."""


def build_reference(config: Config, plan: BatchPlan, policy: HasBase) -> PolicyLearner | BaseOfAdapter:
    """The base of the policy's adapter where that is the reference, else a model of its own."""
    if reference_is_base(config):
        return BaseOfAdapter(policy)
    return build_policy_learner(config, plan, role="reference")


def _only_scored() -> SkyrlTrainError:
    return SkyrlTrainError("the reference is only scored")
