"""What flows between the parts: prompts, requests to an engine, turns, trajectories.

Everything here is plain frozen data, of the standard library and of read-only numpy columns, so that any layer may
import it. Token columns of a training batch live in `batch/training_batch.py`; metrics with typed reductions in
`telemetry/metrics.py`. What a turn is, and how turns form a tree, is in `turns.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from skyrl_train.images import ImageSpans
from skyrl_train.turns import NO_IDS, NO_ROUTING, context_images, is_equal, reduced, segments
from skyrl_train.turns import StopReason as StopReason
from skyrl_train.turns import TokenIds as TokenIds
from skyrl_train.turns import Turn as Turn
from skyrl_train.turns import VersionRun as VersionRun
from skyrl_train.turns import find_parent as find_parent
from skyrl_train.turns import new_routing as new_routing
from skyrl_train.turns import prompt_lengths as prompt_lengths
from skyrl_train.turns import token_ids as token_ids

ChatMessage = Mapping[str, Any]
"""One chat message, `{"role": "user", "content": "..."}` (further keys, such as tool calls, are kept)."""


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any
    eos_token_id: Any
    pad_token_id: Any

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...

    def get_vocab(self) -> Mapping[str, int]: ...

    def __call__(self, text: Any, **kwargs: Any) -> Any: ...

    def __len__(self) -> int: ...


class Outcome(str, Enum):
    """How a trajectory ended."""

    DONE = "done"
    """The environment said so."""
    TRUNCATED = "truncated"
    """The environment cut it short. It counts as done: what would have followed is worth nothing."""
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
    """The environment, or a reward function, returned a reward that is not a finite number."""
    INVALID_OBSERVATION = "invalid_observation"
    """The environment returned something that is not a list of chat messages."""
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    NOT_SCORED = "not_scored"
    """A reward function returned None."""
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
    tools: tuple[Mapping[str, Any], ...] = ()
    """What the model may call, as the chat template takes it."""
    dataset: str = ""
    """Name of its data set, where several are mixed."""
    place: str = field(default="", compare=False)
    """Where the row stands, e.g. `data/train.jsonl, line 3`, for messages; not recorded."""
    is_text: bool = field(default=False, compare=False)
    """Whether the row has a text and no messages, which rewards of TRL's signature are given then; not recorded."""


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
    """Token ids in. `seed` is derived, so the answer does not depend on what else is in flight.

    `sampling.max_generate_length` is what the context window has left, where that is less than the setting.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    images: ImageSpans = ()
    """Images in the prompt."""


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """Token ids out. A response that ended with an end-of-sequence token contains it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token under the distribution it was sampled from (after temperature, before
    truncation by top_p, top_k and min_p; at temperature 0 that of temperature 1); same length as `token_ids`."""
    stop_reason: StopReason
    weight_versions: tuple[VersionRun, ...] = ()
    """Which weights sampled which tokens: runs as of `Turn.weight_versions`, of versions that never fall."""
    num_cached_tokens: int | None = field(default=None, compare=False)
    """Tokens of the prompt whose keys and values the engine had from earlier requests; None where it does not say."""
    routed_experts: NDArray[np.int16] = field(default_factory=lambda: NO_ROUTING, compare=False)
    """`[recorded, layers, k]`: experts that each layer sent the last so many tokens of prompt and response to, but for the
    response's last, which was not computed; 0 in layers without experts. Empty where nothing was recorded."""
    weight_version: InitVar[int | None] = None
    """What an engine may give in place of `weight_versions`: the version of the weights that sampled every token."""

    def __post_init__(self, weight_version: int | None) -> None:
        if weight_version is not None:
            object.__setattr__(self, "weight_versions", (VersionRun(start=0, version=weight_version),))


@dataclass(frozen=True, kw_only=True, eq=False)
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
    """The environment's own numbers (`get_metrics`), and counts of tool calls."""
    first_messages: tuple[ChatMessage, ...] = ()
    """What the environment made of the prompt's messages; empty where it left them as they are."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What each reward function said, by name and before its weight, with `environment` for the environment's own reward;
    their weighted sum is in the turns' rewards. Empty where no reward is configured beside the environment."""
    teacher_prompt_token_ids: TokenIds = field(default_factory=lambda: NO_IDS)
    """The first prompt with what only a teacher of the same weights is shown; empty where there is none."""
    greedy_reward: float | None = None
    """Reward of the greedy sample of the same prompt, where one was drawn as a baseline."""

    def __post_init__(self) -> None:
        name = f"trajectory {self.prompt_uid}/{self.sample_index}"
        if (self.outcome is Outcome.FAILED) != (self.failure is not None):
            raise ValueError(f"{name}: outcome and failure disagree")
        for index, turn in enumerate(self.turns):
            if turn.parent is not None and not 0 <= turn.parent < index:
                raise ValueError(f"{name}, turn {index}: its parent must be an earlier turn or None; got {turn.parent}")
        object.__setattr__(self, "teacher_prompt_token_ids", token_ids(self.teacher_prompt_token_ids))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trajectory) and is_equal(self, other)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return reduced(self)

    @property
    def failed(self) -> bool:
        return self.failure is not None

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards. A failed trajectory has none."""
        if self.failure is not None:
            raise ValueError(f"trajectory {self.prompt_uid}/{self.sample_index} failed and has no reward")
        return sum(turn.reward for turn in self.turns)

    def prompt_token_ids(self, turn_index: int) -> TokenIds:
        """Return the whole context that the engine was given for one turn, `[prompt]` int32."""
        columns = segments(self.turns, turn_index)[:-1]
        return token_ids(np.concatenate(columns)) if len(columns) > 1 else columns[0]

    def images(self, turn_index: int) -> ImageSpans:
        """Return the images in prompt and response of one turn."""
        return context_images(self.turns, turn_index)

    def prompt_lengths(self) -> list[int]:
        """Return the number of prompt tokens of each turn."""
        return prompt_lengths(self.turns)

    def contexts(self) -> list[TokenIds]:
        """Return prompt and response of each turn, `[prompt + response]` int32 each.

        Those of a turn and of its ancestors are views of one array, so that the contexts of a linear conversation take
        no more memory than its last one.
        """
        lengths = [start + len(turn.response_token_ids) for start, turn in zip(self.prompt_lengths(), self.turns)]
        found: list[TokenIds | None] = [None] * len(self.turns)
        for leaf in reversed(range(len(self.turns))):
            if found[leaf] is not None:
                continue
            whole: TokenIds = np.concatenate(segments(self.turns, leaf))
            whole.flags.writeable = False
            index: int | None = leaf
            while index is not None and found[index] is None:
                found[index] = whole[: lengths[index]]
                index = self.turns[index].parent
        return [context for context in found if context is not None]


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
