"""What flows between the parts: prompts, requests to an engine, turns, trajectories.

Everything here is plain frozen data, of the standard library and of read-only numpy columns, so that any layer may
import it. Token columns of a training batch live in `batch/training_batch.py`; metrics with typed reductions in
`telemetry/metrics.py`.

Turns of a trajectory: one generation each, with the environment's answer, stored as read-only numpy columns.

The turns of a trajectory form a tree. A turn stores what it adds to its parent, so that a conversation of `n` tokens
takes memory for `n` tokens however many turns it has. One trajectory of four turns, of which the third is a new root
and the fourth goes back to the first:

    turn  parent  added_token_ids  response_token_ids  prompt_token_ids(turn)
    0     None    p p              r r                 p p
    1     0       o                s                   p p r r o
    2     None    q                t t                 q
    3     0       v                u                   p p r r v
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from skyrl_train.images import ImageSpans, between, check_spans

TokenIds: TypeAlias = NDArray[np.int32]
"""`[num_tokens]`, each from 0 to 2**31 - 1."""


class StopReason(str, Enum):
    """Why the engine stopped one response."""

    STOP = "stop"
    """An end-of-sequence token or a stop string."""
    LENGTH = "length"
    """`max_generate_length` or the context window was reached."""
    ABORT = "abort"
    """The engine gave the request up; the tokens so far are returned."""


def token_ids(values: ArrayLike) -> TokenIds:
    """Return the values as a read-only column of token ids. Raises ValueError where one is no token id."""
    given = np.asarray(values)
    if given.size and given.dtype.kind not in "iu":
        raise ValueError(f"token ids must be whole numbers; got {given.dtype}")
    if given.size and not (given.min() >= 0 and given.max() <= np.iinfo(np.int32).max):
        raise ValueError(f"token ids must lie between 0 and 2**31 - 1; got {given.min()} to {given.max()}")
    return _column(given, np.int32)


def _column(values: ArrayLike, dtype: type[np.generic], num_dims: int = 1) -> NDArray[Any]:
    """Return the values as a read-only array, `[n]` unless it has more dimensions, that nothing else can write to.

    A view of a part is copied: it would keep the whole array alive. So is what might be written through another name.
    """
    given = np.asarray(values)
    if given.ndim != num_dims:
        what = "one dimension" if num_dims == 1 else f"{num_dims} dimensions"
        raise ValueError(f"a column must have {what}; got the shape {given.shape}")
    owner = given.base if isinstance(given.base, np.ndarray) else given
    if given.dtype == dtype and not (given.flags.writeable or owner.flags.writeable) and owner.size == given.size:
        return given
    column = np.array(given, dtype=dtype)
    column.flags.writeable = False
    return column


def is_equal(left: Any, right: Any) -> bool:
    """Whether two records of one class agree in each field, columns element by element."""
    for each in (each for each in fields(left) if each.compare):
        one, other = getattr(left, each.name), getattr(right, each.name)
        if not (np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other):
            return False
    return True


def _restore(kind: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Construct an unpickled record again, since pickling makes some columns writeable."""
    return kind(**values)


def reduced(record: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return how `pickle` and `copy` make a record again: by its constructor, which freezes columns."""
    return _restore, (type(record), {each.name: getattr(record, each.name) for each in fields(record)})


class VersionRun(NamedTuple):
    """Response tokens from `start` to the next run's, or to the end, which weights of one version sampled."""

    start: int
    version: int


_NO_LOGPROBS = _column((), np.float32)
NO_IDS = _column((), np.int32)
_NO_MASK = _column((), np.bool_)


def routing_column(values: ArrayLike) -> NDArray[np.int16]:
    """Return `[tokens, layers, k]` numbers of experts as read-only int16. Raises ValueError for others."""
    given = np.asarray(values)
    if given.ndim != 3 or given.dtype.kind not in "iu":
        raise ValueError(f"experts must be whole numbers [tokens, layers, k]; got {given.dtype} {list(given.shape)}")
    if given.size and not (given.min() >= 0 and given.max() <= np.iinfo(np.int16).max):
        raise ValueError(f"experts must lie between 0 and 2**15 - 1; got {given.min()} to {given.max()}")
    return _column(given, np.int16, num_dims=3)


def encode_routing(routed: NDArray[np.int16]) -> list[Any]:
    """Return the experts as JSON takes them: `[tokens, layers, k, numbers]`, of little-endian bytes in base64, one for each
    number where all are below 256, else two."""
    narrow = routed.astype("<u1" if routed.max(initial=0) < 256 else "<i2")
    return [*routed.shape, base64.b64encode(narrow.tobytes()).decode()]


def decode_routing(record: Any) -> NDArray[np.int16]:
    """Return the inverse of `encode_routing`. Raises ValueError for anything else."""
    given = record if isinstance(record, list) else []
    if [type(each) for each in given] != [int, int, int, str] or min(given[:3]) < 0:
        raise ValueError("routed_experts must be [tokens, layers, k, text]")
    data = base64.b64decode(given[3], validate=True)
    dtype = "<u1" if len(data) == math.prod(given[:3]) else "<i2"
    return routing_column(np.frombuffer(data, dtype=dtype).reshape(given[:3]))


NO_ROUTING = routing_column(np.zeros((0, 0, 0), np.int16))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """One generation and the environment's answer to it, stored as what it adds to the turn that it continues.

    Columns may be given as any sequence; they are kept as read-only arrays. Raises ValueError where columns or runs do
    not fit the response. `find_parent` gives the first two fields for a prompt that is given as a whole.
    """

    parent: int | None = None
    """Index within the trajectory of the earlier turn whose prompt and response this turn's prompt begins with; None
    for a root, whose prompt continues no earlier turn."""
    added_token_ids: TokenIds
    """`[added]` int32: what the prompt adds to the parent's prompt and response; the whole prompt of a root."""
    response_token_ids: TokenIds
    """`[response]` int32."""
    response_logprobs: NDArray[np.float32] = field(default_factory=lambda: _NO_LOGPROBS)
    """`[response]` float32; empty where none were recorded (rollouts from a file)."""
    loss_mask: NDArray[np.bool_] = field(default_factory=lambda: _NO_MASK)
    """`[response]` bool: False at tokens that the policy did not choose and is not trained on, such as those that an
    agent loop forced into a response; empty where all are trained on."""
    response_text: str
    reward: float
    """Finite; the environment's reward for this turn."""
    observations: tuple[Mapping[str, Any], ...] = ()
    """Chat messages: what the environment, or the tools that the response called, said to it."""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """The calls that were read in the response, as an assistant's message holds them; one that could not be read has
    `error`. Nothing is computed of them: the text has them too."""
    stop_reason: StopReason
    weight_versions: tuple[VersionRun, ...]
    """Which weights sampled the response: runs in order, the first from token 0. `((0, 7),)` for version 7 alone."""
    routed_experts: NDArray[np.int16] = field(default_factory=lambda: NO_ROUTING)
    """`[recorded, layers, k]` int16: to which experts each layer sent the last so many tokens before the response's last,
    which itself is not computed before the next turn. At most what is new since the parent's record."""
    images: ImageSpans = ()
    """Images among `added_token_ids`."""

    def __post_init__(self) -> None:
        num_tokens = len(self.response_token_ids)
        versions = tuple(VersionRun(int(start), int(version)) for start, version in self.weight_versions)
        starts = [run.start for run in versions]
        if starts[:1] != [0] or starts != sorted(set(starts)) or starts[-1] > max(0, num_tokens - 1):
            raise ValueError(
                f"weight_versions must be runs (start, version), from token 0 on and in order, of {num_tokens} response "
                f"tokens; got {[tuple(run) for run in versions]}"
            )
        columns = {
            "added_token_ids": token_ids(self.added_token_ids),
            "response_token_ids": token_ids(self.response_token_ids),
            "response_logprobs": _column(self.response_logprobs, np.float32),
            "loss_mask": _column(self.loss_mask, np.bool_),
        }
        for name, what in (("response_logprobs", "log-probabilities"), ("loss_mask", "flags of the loss mask")):
            if len(columns[name]) not in (0, num_tokens):
                raise ValueError(f"{len(columns[name])} {what} for {num_tokens} response tokens")
        columns["routed_experts"] = routing_column(self.routed_experts)
        experts = columns["routed_experts"]
        new = new_routing(experts, self.parent, columns["added_token_ids"], num_tokens)
        if len(experts) > len(new):
            raise ValueError(f"experts of {len(experts)} tokens, and the turn has {len(new)} new ones")
        images = check_spans(self.images, len(columns["added_token_ids"]))
        for name, value in {**columns, "weight_versions": versions, "images": images}.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Turn) and is_equal(self, other)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return reduced(self)

    @property
    def num_added_tokens(self) -> int:
        """Tokens that the prompt adds, known without reading them."""
        return len(self.added_token_ids)

    @property
    def num_response_tokens(self) -> int:
        """Tokens of the response, known without reading them."""
        return len(self.response_token_ids)

    def with_reward(self, reward: float) -> Turn:
        """Return the turn with another reward."""
        return replace(self, reward=reward)


def new_routing(
    routed: NDArray[np.int16], parent: int | None, added_token_ids: TokenIds, num_response_tokens: int
) -> NDArray[np.int16]:
    """Return the experts that a turn records, of those up to its last token but one: of its own tokens, and of its parent's
    last one."""
    most = max(0, len(added_token_ids) + num_response_tokens - 1) + (parent is not None)
    return routed[max(0, len(routed) - most) :]


def find_parent(
    turns: Sequence[Turn], prompt_token_ids: ArrayLike, images: ImageSpans = ()
) -> tuple[int | None, TokenIds]:
    """Return what a turn with this whole prompt, in which `images` stand, stores after `turns`: its parent and the tokens
    that it adds.

    The parent is the turn with the longest prompt and response that the new prompt begins with, token by token and image
    by image, the latest of equally long ones. Where there is none, the turn is a root and adds the whole prompt.
    """
    prompt = token_ids(prompt_token_ids)
    lengths = [start + turn.num_response_tokens for start, turn in zip(prompt_lengths(turns), turns)]
    for index in sorted(range(len(turns)), key=lambda index: (lengths[index], index), reverse=True):
        same = lengths[index] <= len(prompt) and _begins_with(prompt, segments(turns, index))
        if same and context_images(turns, index) == between(images, 0, lengths[index]):
            return index, token_ids(prompt[lengths[index] :])
    return None, prompt


def prompt_lengths(turns: Sequence[Turn]) -> list[int]:
    """Return the number of prompt tokens of each turn of a trajectory."""
    lengths: list[int] = []
    for turn in turns:
        before = 0 if turn.parent is None else lengths[turn.parent] + turns[turn.parent].num_response_tokens
        lengths.append(before + turn.num_added_tokens)
    return lengths


def context_images(turns: Sequence[Turn], index: int) -> ImageSpans:
    """Return the images in prompt and response of one turn."""
    turn = turns[index]
    if turn.parent is None:
        return turn.images
    before = context_images(turns, turn.parent)
    if not turn.images:
        return before
    start = prompt_lengths(turns)[index] - len(turn.added_token_ids)
    return (*before, *(span.moved(start) for span in turn.images))


def segments(turns: Sequence[Turn], index: int) -> list[TokenIds]:
    """Return prompt and response of one turn in order, as the columns of the turns from its root down to it."""
    columns: list[TokenIds] = []
    parent: int | None = index
    while parent is not None:
        turn = turns[parent]
        columns += (turn.response_token_ids, turn.added_token_ids)
        parent = turn.parent
    return columns[::-1]


def _begins_with(prompt: TokenIds, columns: Sequence[TokenIds]) -> bool:
    start = 0
    for column in columns:
        if not np.array_equal(prompt[start : start + len(column)], column):
            return False
        start += len(column)
    return True


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
    """How a trajectory ended: by its environment, at a limit, or by a failure."""

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
    adapter: str = ""
    """Which adapter of an engine that has several answers (`inference/hf.py`); empty for the engine's own weights."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response, beside those of `sampling.stop`."""
    ignores_eos: bool = False
    """Whether the response goes on behind an end-of-sequence token."""


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
    stored: tuple[Any, int] | None = field(default=None, compare=False)
    """Arrays that have the trajectory, and its number in them, where its turns are facts and their columns lie elsewhere
    (`batch/plane/rollouts.py`)."""

    def __post_init__(self) -> None:
        if (self.outcome is Outcome.FAILED) != (self.failure is not None):
            raise ValueError(f"trajectory {self.prompt_uid}/{self.sample_index}: outcome and failure disagree")
        for index, turn in enumerate(self.turns):
            if turn.parent is not None and not 0 <= turn.parent < index:
                raise ValueError(
                    f"trajectory {self.prompt_uid}/{self.sample_index}, turn {index}: its parent must be an earlier turn "
                    f"or None; got {turn.parent}"
                )
        if self.teacher_prompt_token_ids is not NO_IDS:
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
