"""A learner of this process that shares its device with an engine and with other models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.steps import MiniBatch
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.interfaces import HeldState
from skyrl_train.learner.critic import CriticLearner
from skyrl_train.learner.memory.sizing import make_meter, size_micro_batches
from skyrl_train.learner.policy import PolicyLearner
from skyrl_train.telemetry import StepMetrics
from skyrl_train.weight_sync import DeviceSharing
from skyrl_train.weights import ModelWeights

if TYPE_CHECKING:
    from skyrl_train.learner.memory.sizing import SizingLimits, SizingReport


class LearnerOnSharedDevice:
    """A learner of this process that shares its device: takes its turn before it computes, is read or is written, as the
    ranks of a `RayLearner` do. Implements `Learner` and, around a policy, `Reference` and `ScoresDistributions`."""

    def __init__(self, learner: PolicyLearner | CriticLearner, sharing: DeviceSharing) -> None:
        """`learner` has just been loaded; it leaves the device."""
        self._learner = learner
        self.role = learner.engine.name
        self._on_device = partial(sharing.models, self.role)
        """Has the model brought to its device, with its optimizer where asked for."""
        offloader = learner.engine.offloader
        sharing.add(self.role, lambda optimizer: offloader.onload(optimizer=optimizer), offloader.offload)

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        """Log-probabilities or values, `[num_tokens]`."""
        self._on_device()
        return self._learner.forward(batch)

    def forward_base(self, batch: TrainingInputBatch) -> Tensor:
        """As `forward`, with the policy's adapter off."""
        self._on_device()
        return self._policy().forward_base(batch)

    def forward_with_entropy(self, batch: TrainingInputBatch) -> Tensor:
        """`[num_tokens, 2]`: log-probabilities and entropies."""
        self._on_device()
        return self._policy().forward_with_entropy(batch)

    def forward_sum_pi_squared(self, batch: TrainingInputBatch) -> Tensor:
        """Sums of squared probabilities in place of log-probabilities."""
        self._on_device()
        return self._policy().forward_sum_pi_squared(batch)

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:
        """Adds the gradient of the mini-batch's loss."""
        self._on_device(optimizer=True, trains=True)
        return self._learner.forward_backward(mini_batch)

    def optim_step(self) -> StepMetrics:
        """One step; raises NonFiniteError before any weight moves."""
        self._on_device(optimizer=True, trains=True)
        return self._learner.optim_step()

    def weights(self) -> ModelWeights:
        """Return the weights; whoever reads them sees to it that they are on the device, as `DeviceSharing.syncing` does."""
        return ModelWeights(self._learner.weights().senders, role=self.role, scores=self.forward)

    def load_weights(self, weights: ModelWeights) -> None:
        """Those of the policy, which is on the device beside this one then."""
        # Both at once: whatever is not asked for leaves the device.
        self._on_device("policy")
        self._policy().load_weights(weights)

    def size_micro_batches(
        self, limits: SizingLimits, stored: Mapping[str, tuple[SizingReport, ...]]
    ) -> list[SizingReport]:
        """Finds what fits while the others are away. `stored`: reports of an earlier run, by model."""
        self._on_device(optimizer=True, trains=True)
        engine, own = self._learner.engine, stored.get(self.role, ())
        meter = make_meter(engine.passes.device, limits)
        return [size_micro_batches(self._learner, meter, limits, stored=own[0] if len(own) == 1 else None)]

    def hold_state(self, *, copies: bool) -> HeldState:
        """Bring the model and its optimizer onto the device, and hold them for a checkpoint. Raises CheckpointError."""
        self._on_device(optimizer=True)
        return self._learner.hold_state(copies=copies)

    def load(self, folder: Path) -> None:
        """Take the weights and the optimizer state of a folder. Raises CheckpointError."""
        self._on_device(optimizer=True, trains=True)
        self._learner.load(folder)

    def export_hf(self, folder: Path) -> None:
        """Write the model in Hugging Face format. Raises ModelError."""
        self._on_device()
        self._learner.export_hf(folder)

    def close(self) -> None:
        """Release the learner; the device is others' to share."""
        self._learner.close()

    def _policy(self) -> PolicyLearner:
        if not isinstance(self._learner, PolicyLearner):
            raise SkyrlTrainError(f"the {self.role} model has no log-probabilities")
        return self._learner
