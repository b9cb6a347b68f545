"""The seams: what a trainer needs from the parts it does not construct. Each has at least two implementations,
one of which runs on a CPU.

A trainer knows these Protocols only, so the same loop runs in one process or on Ray actors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_train.batch import TrainingInputBatch
    from skyrl_train.batch.plane import Layer
    from skyrl_train.batch.steps import MiniBatch
    from skyrl_train.system.files import FileSums
    from skyrl_train.telemetry import StepMetrics
    from skyrl_train.types import ChatMessage, GenerationOutput, GenerationRequest, Prompt, RolloutBatch, SamplingParams
    from skyrl_train.weights import ModelWeights


class Environment(Protocol):
    """Where an answer is judged: the skyrl-gym API. Constructed as `cls(env_config=..., extras=...)` per trajectory.

    Methods may block: they run in worker processes or on threads, each call under a deadline.
    """

    def init(self, prompt: list[ChatMessage]) -> tuple[list[ChatMessage], Mapping[str, Any]]:
        """The first messages for the model, and information."""
        ...

    def step(self, action: str) -> Mapping[str, Any]:
        """`{"observations": [messages], "reward": float, "done": bool, "metadata": {...}}`."""
        ...

    def close(self) -> None: ...

    def get_metrics(self) -> Mapping[str, Any]: ...


@runtime_checkable
class ScoresDistributions(Protocol):
    """A policy that says more of the distributions that tokens were drawn from than the drawn token's log-probability.

    A number for each token, `[num_tokens]`, where and as `Learner.forward` answers.
    """

    def forward_with_entropy(self, batch: TrainingInputBatch) -> Tensor:
        """`[num_tokens, 2]`: what `Learner.forward` answers, and the entropy in nats, of one forward."""
        ...

    def forward_sum_pi_squared(self, batch: TrainingInputBatch) -> Tensor:
        """Sum over the vocabulary of squared probabilities."""
        ...


ScoreMethod = Literal["forward", "forward_base", "forward_with_entropy", "forward_sum_pi_squared"]


@runtime_checkable
class HoldsScores(Protocol):
    """A model that leaves the scores of rows where it computed them."""

    def hold_scores(self, batch: TrainingInputBatch, names: tuple[str, ...], method: ScoreMethod) -> Layer:
        """Return where the numbers are that `method` gives for each token of `batch`, whose columns are references; `names`
        are those of the columns that they become; what has an empty one is not kept."""
        ...


class InferenceEngine(Protocol):
    """Token ids in, token ids and their log-probabilities out.

    To take weights it also has `load_weights(weights, version)`, which is given pairs of Hugging Face name and tensor, all
    of them, before the first request (version 0 in a new run) and after each step, and from which on `weight_version` is
    `version`; or it derives from `weight_sync/receiver.py: UpdatableEngine`. What makes one that may be given them while it
    generates is declared with `@reads(in_flight_updates=True)`, and reads `EngineSettings.in_flight_cache`.
    """

    @property
    def weight_version(self) -> int:
        """Version of the weights that answer now; -1 before the first sync."""
        ...

    def lease(self) -> AbstractContextManager[None]:
        """Announces one trajectory for as long as it runs. An engine that generates in waves waits until each leased
        trajectory has either asked for tokens or ended, which makes its batches the same on every run."""
        ...

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Raises EngineError or DeadlineError; never returns less than the engine produced."""
        ...

    def close(self) -> None: ...


class Generator(Protocol):
    """Turns prompts into trajectories."""

    @property
    def is_recorded(self) -> bool:
        """Whether its rollouts are those that a step was trained on: rewards shaped, prompts chosen, greedy rewards
        measured."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        n_samples_per_prompt: int,
        sampling: SamplingParams,
        global_step: int,
        purpose: str,
    ) -> RolloutBatch:
        """`len(prompts) * n_samples_per_prompt` trajectories in order; `purpose` (`train`, `eval`) enters the seeds.

        A trajectory that breaks is returned as failed, with its reason; nothing is raised for it.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class ReportsMetrics(Protocol):
    """A generator, or an engine, that measures more than its answers say."""

    def take_metrics(self) -> Mapping[str, float]:
        """Return what was measured since the last time, by the names of metrics."""
        ...


@dataclass(frozen=True, kw_only=True)
class HeldState:
    """A state of a moment that can be written."""

    is_copied: bool
    """Whether it is a copy, so that `write` may run on another thread while the models go on. What is none must be written
    before they change."""
    write: Callable[[Path], FileSums]
    """Writes it into a folder, which is made, and returns the sums of the files by their names there: they are taken while
    the files are written. Raises SaveError."""


class Scorer(Protocol):
    """A model that is only scored, as the reference is: in one process, or a group of workers behind the same methods."""

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        """`[num_tokens]`, aligned with `batch["input_ids"]`: log-probabilities at positions with `loss_mask`, 0 elsewhere.
        On the CPU, without gradients."""
        ...

    def load_weights(self, weights: ModelWeights) -> None:
        """Replace all parameters by those of another model. Raises ModelError where they do not fit."""
        ...

    def hold_state(self, *, copies: bool) -> HeldState:
        """The model, for a checkpoint of a run in which it is given other weights; as `Learner.hold_state`."""
        ...

    def load(self, folder: Path) -> None:
        """Exact inverse of what `hold_state` writes. Raises CheckpointError."""
        ...

    def close(self) -> None: ...


class Learner(Protocol):
    """One model that is trained: the policy or the critic.

    In one process, or a group of data-parallel workers behind the same methods.
    """

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        """`[num_tokens]`, aligned with `batch["input_ids"]`: log-probabilities (policy) or values (critic) at
        positions with `loss_mask`, 0 elsewhere. On the CPU, without gradients."""
        ...

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:
        """Adds the gradient of the closed mini-batch's loss to what is accumulated."""
        ...

    def optim_step(self) -> StepMetrics:
        """Clips, steps, zeroes the gradients, advances the schedule.

        Raises NonFiniteError, before any weight moves, where a gradient is not finite.
        """
        ...

    def weights(self) -> ModelWeights:
        """Return the parameters, which are read when they are iterated or sent."""
        ...

    def hold_state(self, *, copies: bool) -> HeldState:
        """Model, optimizer and schedule as they are now, to be written as safetensors and JSON; with `copies`, where the
        host's memory holds one, a copy, which takes the place of the one before. Raises CheckpointError."""
        ...

    def load(self, folder: Path) -> None:
        """Exact inverse of what `hold_state` writes. Raises CheckpointError."""
        ...

    def export_hf(self, folder: Path) -> None:
        """Model, config and tokenizer for `from_pretrained`."""
        ...

    def close(self) -> None: ...


class WeightTransport(Protocol):
    """Carries the policy's weights to the inference engine."""

    def sync(self, weights: ModelWeights, version: int) -> None:
        """Bring all of them or none: an engine never answers with a mixture."""
        ...
