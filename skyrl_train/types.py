"""What flows between the parts: prompts, requests to an engine, turns, trajectories.

Everything here is plain frozen data of the standard library, so that any layer may import it. Token columns of a
training batch live in `batch/training_batch.py`; metrics with typed reductions in `telemetry/metrics.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

ChatMessage = Mapping[str, Any]
"""One chat message, `{"role": "user", "content": "..."}` (further keys, such as tool calls, are kept)."""


class StopReason(str, Enum):
    """Why the engine stopped one response."""

    STOP = "stop"
    """An end-of-sequence token or a stop string."""
    LENGTH = "length"
    """`max_generate_length` or the context window was reached."""
    ABORT = "abort"
    """The engine gave the request up; the tokens so far are returned."""


class Outcome(str, Enum):
    """How a trajectory ended."""

    DONE = "done"
    """The environment said so."""
    MAX_TURNS = "max_turns"
    """The turn limit was reached before the environment was done."""
    CONTEXT_FULL = "context_full"
    """No room is left in the context window for another response."""
    FAILED = "failed"
    """Something broke: `Trajectory.failure` says what. It has no reward and is left out of its group."""


class FailureKind(str, Enum):
    """What broke a trajectory. A failure is data with a reason, never a reward of 0."""

    ENVIRONMENT_ERROR = "environment_error"
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    INVALID_REWARD = "invalid_reward"
    """The environment returned a reward that is not a finite number."""
    INVALID_OBSERVATION = "invalid_observation"
    """The environment returned something that is not a list of chat messages."""
    ENGINE_ERROR = "engine_error"
    ENGINE_TIMEOUT = "engine_timeout"
    PROMPT_TOO_LONG = "prompt_too_long"
    """The first prompt alone does not leave room for one generated token."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    kind: FailureKind
    message: str
    """One line for a person, with the exception's type, e.g. `ValueError: unknown city 'Oz'`."""
    turn_index: int
    """Turn (from 0) in which it happened."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of a data set, in the ecosystem's format.

    Example: `Prompt(uid="train-17", messages=({"role": "user", "content": "2+2?"},), env_class="gsm8k",
    extras={"reward_spec": {"method": "rule", "ground_truth": "4"}, "extra_info": {"index": 17}})`.
    """

    uid: str
    """Unique in its data set and stable between runs."""
    messages: tuple[ChatMessage, ...]
    env_class: str | None = None
    """Environment for this row; None means the configured one."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the row (`reward_spec`, `extra_info`, ...), handed to the environment."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a response is sampled. `temperature=0` is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps all tokens."""
    min_p: float = 0.0
    max_generate_length: int = 256
    """New tokens in one turn."""
    stop: tuple[str, ...] = ()
    """Stop strings; the text that matched stays in the response, token in token out."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Token ids in. `seed` is derived, so the answer does not depend on what else is in flight."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """Token ids out. A response that ended with an end-of-sequence token contains it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token under the distribution it was sampled from (after temperature, before
    truncation by top_p, top_k and min_p); same length as `token_ids`."""
    stop_reason: StopReason
    weight_version: int
    """Version of the weights that sampled the first token."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One generation and the environment's answer to it."""

    prompt_token_ids: tuple[int, ...]
    """The whole context given to the engine: earlier turns and observations included."""
    response_token_ids: tuple[int, ...]
    response_logprobs: tuple[float, ...]
    """One per response token; empty where none were recorded (rollouts from a file)."""
    response_text: str
    reward: float
    """Finite; the environment's reward for this turn."""
    stop_reason: StopReason
    weight_version: int
    extends_previous: bool
    """True where `prompt_token_ids` starts with the previous turn's prompt and response, token by token
    (the first turn extends nothing and is True)."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """What became of one sample of one prompt."""

    prompt_uid: str
    sample_index: int
    """0 .. n_samples_per_prompt - 1."""
    turns: tuple[Turn, ...]
    """Complete turns. Of a failed trajectory, those before the failure (kept for the rollout log only)."""
    outcome: Outcome
    failure: Failure | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The environment's own numbers (`get_metrics`)."""
    teacher_prompt_token_ids: tuple[int, ...] = ()
    """The first prompt with what only a teacher of the same weights is shown; empty where there is none."""
    greedy_reward: float | None = None
    """Reward of the greedy sample of the same prompt, where one was drawn as a baseline."""

    def __post_init__(self) -> None:
        if (self.outcome is Outcome.FAILED) != (self.failure is not None):
            raise ValueError(f"trajectory {self.prompt_uid}/{self.sample_index}: outcome and failure disagree")

    @property
    def failed(self) -> bool:
        return self.failure is not None

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards. A failed trajectory has none."""
        if self.failure is not None:
            raise ValueError(f"trajectory {self.prompt_uid}/{self.sample_index} failed and has no reward")
        return sum(turn.reward for turn in self.turns)


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """All trajectories of one training or evaluation batch, in the order of their prompts and samples."""

    prompts: tuple[Prompt, ...]
    trajectories: tuple[Trajectory, ...]
    """`len(prompts) * n_samples_per_prompt`; those of `prompts[i]` are
    `trajectories[i * n_samples_per_prompt : (i + 1) * n_samples_per_prompt]`."""
    n_samples_per_prompt: int

    def __post_init__(self) -> None:
        expected = len(self.prompts) * self.n_samples_per_prompt
        if len(self.trajectories) != expected:
            raise ValueError(f"{len(self.trajectories)} trajectories for {expected} samples: one was lost or doubled")
