"""What an environment may answer, and the one place where it is checked.

    trajectory                                         thread or worker process
    EnvironmentSession -- request (plain data) ------> HostedEnvironment -> the environment's own method
                       <-- answer (plain data) -------

Plain data is what JSON holds: None, booleans, numbers, texts, lists and mappings of texts. The hosting side checks what the
environment returned and makes it plain, within the deadline of the call; the trajectory's side checks it once more with the
same functions, since what a worker process sends need not come from ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat

from skyrl_train.errors import SkyrlTrainError, counted
from skyrl_train.registry import error_text, own_line
from skyrl_train.rollout.tools.toolbox import Schema, is_content
from skyrl_train.rollout.tools.variables import told_missing
from skyrl_train.system import lazily
from skyrl_train.system.files import is_text, shown
from skyrl_train.telemetry.logs import redact_text
from skyrl_train.types import ChatMessage, Failure, FailureKind

if TYPE_CHECKING:
    from skyrl_train.rollout.boundary.session import EnvironmentSession

__all__ = [
    "MAX_WORKERS",
    "EnvironmentFailed",
    "EnvironmentSession",
    "Environments",
    "Request",
    "StepResult",
    "check_step",
    "describe",
    "read_answer",
]

__getattr__ = lazily(__name__)

_FLOAT32_MAX = 3.4028234663852886e38
_MAX_DEPTH = 32
_MAX_INTEGER_BITS = 1024
_MAX_METRICS = 1000
MAX_METRIC_NAME = 200
_MAX_STATE_CHARACTERS = 1 << 20
"""As JSON, which is written to the journal after each call."""


def numbers_only(metrics: object) -> dict[str, float]:
    """Return the finite numbers among an environment's metrics, whose names are texts of at most 200 characters; what is
    beyond the first thousand is left out."""
    if not isinstance(metrics, Mapping):
        return {}
    numbers: dict[str, float] = {}
    for key, value in islice(metrics.items(), _MAX_METRICS):
        name, number = str(key), number_in(value, _FLOAT32_MAX)
        if number is not None and len(name) <= MAX_METRIC_NAME and is_text(name):
            numbers[name] = number
    return numbers


def plain(value: object, where: str, depth: int = 0) -> Any:
    """Return `value` as plain data: containers copied, tuples as lists, numpy's scalars as Python's.

    `where` names the value in messages, e.g. `message 0`. Raises ValueError naming the part that is no plain data.
    """
    value = scalar(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if is_text(value):
            return str(value)
        raise ValueError(f"{where} is a text that UTF-8 cannot hold (a lone surrogate)")
    if isinstance(value, int) and value.bit_length() <= _MAX_INTEGER_BITS:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth > _MAX_DEPTH:
        raise ValueError(f"{where} is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, (list, tuple)):
        return [plain(each, f"{where}[{index}]", depth + 1) for index, each in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and is_text(key) for key in value):
            return {str(key): plain(each, f"{where}.{key}", depth + 1) for key, each in value.items()}
        raise ValueError(f"{where} has a key that is no text")
    rule = "must be a text, a number, true, false, null, a list or a mapping of them"
    raise ValueError(f"{where} is {shown(value)} ({type(value).__name__}); {rule}")


def plain_state(value: object) -> Any:
    """Return an environment's state as plain data. Raises ValueError naming what is none, or how large it is."""
    state = plain(value, "the state")
    if (size := len(json.dumps(state))) > _MAX_STATE_CHARACTERS:
        raise ValueError(
            f"the state has {counted(size, 'character', ',')} as JSON; must have at most {_MAX_STATE_CHARACTERS:,}. "
            "Leave get_state out, or keep in it what cannot be derived from the row"
        )
    return state


def column_in(columns: Mapping[str, Any], name: str) -> Any:
    """Return the column `a`, or what is inside it at `a.b`; None where there is nothing."""
    value: Any = columns
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def scalar(value: Any) -> Any:
    """Return numpy's (or torch's) single numbers as Python's, without importing either."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "dtype") else value


def number_in(value: object, most: float) -> float | None:
    try:
        # a protocol takes far longer to look for than what most numbers are
        if isinstance(value, (float, int, SupportsFloat)) and abs(number := float(value)) <= most:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    return None


Answer = dict[str, Any]
"""`{"value": ...}`, with `resume` if the request `keeps` (`session.py`), or `{"failure": FailureKind, "message": ...}`."""
Request = Mapping[str, Any]
"""`{"call": ..., ...}` with the arguments of the call, which `HostedEnvironment` names; that of a reward function needs no
environment: `{"call": "score", "spec": ..., "prompt": ..., "samples": [...], "num_values": ...}`."""
AroundCalls = Callable[[], AbstractContextManager[object]]
"""What counts who waits for an environment's answer, for one; entered for each call."""

CHECK_ROWS = "check_rows"
"""The call that asks the class of an environment, rather than one of them, what is wrong with data rows."""
MAX_WORKERS = 1024
"""Threads, or worker processes, at most where the configuration does not say how many."""
MAX_REWARD = 1e12
"""Rewards become float32: squared errors of values, and norms of gradients, overflow from about 1e16 on."""
MAX_CHARACTERS = 4 << 20
"""Text of the messages of one answer: several times what fits any model's context."""
OF_REWARDS = {
    FailureKind.ENVIRONMENT_ERROR: FailureKind.REWARD_ERROR,
    FailureKind.ENVIRONMENT_TIMEOUT: FailureKind.REWARD_TIMEOUT,
}
"""What a host says of a call of a reward function, in its own terms."""
_OF_ENVIRONMENTS = (
    FailureKind.ENVIRONMENT_ERROR,
    FailureKind.ENVIRONMENT_TIMEOUT,
    FailureKind.INVALID_REWARD,
    FailureKind.INVALID_OBSERVATION,
)


class EnvironmentFailed(Exception):
    """A guarded call, of an environment, a reward or the engine, failed one trajectory. Raised at the boundary, caught by
    the agent loop.

    Whatever else is raised in the loop is a programming error and propagates.
    """

    def __init__(self, kind: FailureKind, message: str):
        super().__init__(message)
        self.kind = kind
        self.message = message

    def to_failure(self, turn_index: int) -> Failure:
        return Failure(kind=self.kind, message=redact_text(self.message), turn_index=turn_index)


environment_error = partial(EnvironmentFailed, FailureKind.ENVIRONMENT_ERROR)
invalid_observation = partial(EnvironmentFailed, FailureKind.INVALID_OBSERVATION)
invalid_reward = partial(EnvironmentFailed, FailureKind.INVALID_REWARD)


def describe(error: BaseException) -> str:
    """Describe an error as `ValueError: unknown city 'Oz' at my_env.py:12 in Travel.step: raise ValueError(...)`, in one
    line of at most 500 characters: the line is that of the user's own code, where the error is from there; then which of the
    trainer's variables were asked for and not given."""
    where = ("" if isinstance(error, SkyrlTrainError) else own_line(error)) + told_missing()
    return _one_line(f"{_one_line(error_text(error), 500 - len(where))}{where}")


def _one_line(text: str, most: int = 500) -> str:
    line = text.encode("utf-8", "replace").decode()
    return line if len(line) <= most else line[: max(most - 3, 0)] + "..."


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """An environment's answer to one response, checked."""

    observations: list[ChatMessage]
    reward: float
    """Finite, at most `MAX_REWARD` in size."""
    done: bool
    """Whether the trajectory has ended, cut short or not."""
    truncated: bool = False
    """Whether it was cut short, as by a limit on steps. Nothing is estimated for what would have followed."""
    components: dict[str, float] = field(default_factory=dict)
    """What the reward is the sum of, by name, where the environment says so."""


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What a tool answered to one call, a text or parts with images among them, or why it did not."""

    content: str | list[dict[str, Any]]
    failed: bool


def late(what: str, timeout_s: float, where: str = "") -> EnvironmentFailed:
    """Return the error of a call that exceeded its deadline, as `; it was at FILE` in `where` may say."""
    return EnvironmentFailed(FailureKind.ENVIRONMENT_TIMEOUT, f"{what} did not answer within {timeout_s:g} s{where}")


class EnvironmentLost(Exception):
    """A call was not made: another environment has ended the worker process that the environment lived in. The next call
    is that of another one in its place, of which nothing was asked yet."""


class EnvironmentHandle(Protocol):
    """One environment, wherever it lives."""

    async def ask(self, request: Request) -> object:
        """Return the answer of its `HostedEnvironment`. Raises EnvironmentLost; EnvironmentFailed where no answer came: the
        call exceeded its deadline, or ended its process. No further call is made then, `close` included."""
        ...

    def release(self) -> None:
        """Forget the environment, which was closed or has failed."""
        ...


class Environments(Protocol):
    """Where environments run. Used from one event loop."""

    may_lose_environments: bool
    """Whether `ask` may raise EnvironmentLost."""
    given_up: str
    """What becomes of whatever ran a call that hung, for a message."""
    num_given_up: int
    """Calls that exceeded their deadline so far."""
    num_close_failures: int
    """Environments whose `close` raised or hung so far, which loses nothing of the trajectory."""

    def host(self, name: str) -> EnvironmentHandle:
        """Return the place of one environment; nothing of it runs yet. `name` is for messages."""
        ...

    async def aclose(self) -> None:
        """End the idle threads, or the processes."""
        ...


def read_answer(answer: object, *, source: str) -> Any:
    """Return the value in a host's answer. Raises the EnvironmentFailed that it tells of, or one that says that it is no
    answer."""
    if isinstance(answer, dict) and set(answer) == {"value"}:
        return answer["value"]
    if isinstance(answer, dict) and set(answer) == {"failure", "message"}:
        kind = next((each for each in _OF_ENVIRONMENTS if each.value == answer["failure"]), None)
        if kind is not None and isinstance(answer["message"], str):
            raise EnvironmentFailed(kind, _one_line(answer["message"]))
    raise environment_error(f"{source}: its worker sent {shown(answer)}, which is no answer")


def check_first_messages(value: object, *, source: str) -> list[ChatMessage]:
    """Return the first messages in what `init` returned, or raise EnvironmentFailed saying what is wrong with it."""
    if not isinstance(value, tuple) or len(value) != 2:
        kind = type(value).__name__
        raise environment_error(f"{source} returned {kind}; must be (messages, information)")
    return check_some_messages(value[0], source=source)


def check_opening(value: object, *, source: str) -> tuple[list[ChatMessage], list[Schema] | None]:
    """Return the first messages, and the tools of an environment that plays by itself, or raise EnvironmentFailed."""
    if not isinstance(value, Mapping):
        return check_some_messages(value, source=source), None
    return check_some_messages(value.get("messages"), source=source), check_schemas(value.get("tools"), source=source)


def check_some_messages(value: object, *, source: str) -> list[ChatMessage]:
    """Return at least one chat message, or raise EnvironmentFailed (invalid_observation)."""
    first = check_messages(value, source=source)
    if not first:
        raise invalid_observation(f"{source} returned no message")
    return first


def check_messages(value: object, *, source: str) -> list[ChatMessage]:
    """Return a list of chat messages of plain data, or raise EnvironmentFailed (invalid_observation) saying what is wrong
    with it."""
    if not isinstance(value, (list, tuple)):
        raise invalid_observation(f"{source} returned {type(value).__name__}; must be a list")
    messages: list[ChatMessage] = []
    num_characters = 0
    for index, message in enumerate(value):
        where = f"message {index}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise invalid_observation(f"{source}: {where} is {shown(message)}; must have 'role' and 'content'")
        content = message["content"]
        if content is not None and not isinstance(content, (str, list)):
            raise invalid_observation(f"{source}: the content of {where} is {type(content).__name__}; must be text")
        num_characters += len(content) if isinstance(content, str) else 0
        if num_characters > MAX_CHARACTERS:
            raise invalid_observation(f"{source}: the messages have more than {MAX_CHARACTERS:,} characters")
        try:
            messages.append(plain(message, where))
        except ValueError as error:
            raise invalid_observation(f"{source}: {error}") from error
    return messages


def check_step(output: object, *, source: str) -> StepResult:
    """Return the fields of a step's answer, or raise EnvironmentFailed naming the one that is wrong."""
    if isinstance(output, tuple) and len(output) == len(_GYMNASIUM_STEP):
        output = dict(zip(_GYMNASIUM_STEP, output))
        if isinstance(output["observations"], str):
            output["observations"] = [{"role": "user", "content": output["observations"]}]
    if not isinstance(output, Mapping):
        raise environment_error(f"{source} returned {type(output).__name__}; must be a mapping")
    ends = {name: scalar(output[name]) for name in ("done", "terminated", "truncated") if name in output}
    if not ends.keys() - {"truncated"}:
        raise environment_error(f"{source} returned no 'done'; it has {sorted(map(str, output))}")
    for name, end in ends.items():
        if not isinstance(end, bool):
            raise environment_error(f"{source} returned '{name}' as {shown(end)}; must be True or False")
    components = check_components(output.get("reward"), source=source)
    reward = check_reward(sum(components.values()) if components else output.get("reward"), source=source)
    observations, done = output.get("observations"), any(ends.values())
    if done and observations is None:
        observations = []
    return StepResult(
        observations=check_messages(observations, source=source),
        reward=reward,
        done=done,
        truncated=ends.get("truncated", False) and not (ends.get("terminated") or False),
        components=components,
    )


_GYMNASIUM_STEP = ("observations", "reward", "terminated", "truncated", "metadata")


def check_components(value: object, *, source: str) -> dict[str, float]:
    """Return the rewards by name that a reward is the sum of, if it is one. Raises EnvironmentFailed (invalid_reward)."""
    if not isinstance(value, Mapping) or not value:
        return {}
    for name in value:
        if not isinstance(name, str) or not is_text(name) or len(name) > MAX_METRIC_NAME:
            message = f"{source} returned a reward named {shown(name)}; must be a text of at most {MAX_METRIC_NAME}"
            raise invalid_reward(f"{message} characters")
    return {str(name): check_reward(each, source=f"{source}[{name!r}]") for name, each in value.items()}


def check_schemas(value: object, *, source: str) -> list[Schema]:
    """Return the schemas of tools as plain data, or raise EnvironmentFailed."""
    try:
        schemas = plain(value, "the tools")
        if isinstance(schemas, list) and all(isinstance(each["function"]["name"], str) for each in schemas):
            return schemas
    except (ValueError, KeyError, TypeError) as error:
        raise environment_error(f"{source}: its tools cannot be sent: {error}") from error
    raise environment_error(f"{source}: its tools are {shown(value)}; must be a list of schemas")


def check_tool_results(value: object, *, source: str) -> list[ToolResult]:
    """Return the results of tools, or raise EnvironmentFailed."""
    try:
        results = plain(value, "the results")
        if all(is_content(each["content"]) and isinstance(each["failed"], bool) for each in results):
            return [ToolResult(content=each["content"], failed=each["failed"]) for each in results]
    except (ValueError, KeyError, TypeError):
        pass
    raise environment_error(f"{source} returned {shown(value)}; must be texts, or texts and images")


def check_reward(value: object, *, source: str) -> float:
    """Return `value` as a finite float of at most `MAX_REWARD` in size (numpy scalars and booleans are fine), or raise
    EnvironmentFailed (invalid_reward)."""
    number = number_in(value, MAX_REWARD)
    if number is not None:
        return number
    rule = f"must be a finite number between {-MAX_REWARD:g} and {MAX_REWARD:g}"
    raise invalid_reward(f"{source} returned the reward {shown(value)}; {rule}")


def check_scores(values: object, *, source: str, num_samples: int | None) -> list[dict[str, float] | float | None]:
    """Return what a reward function said of each trajectory: a number, numbers by name, or None for "not scored".

    `num_samples` is None where the function was called for one trajectory and returned its value, not a list. Raises
    EnvironmentFailed (invalid_reward).
    """
    several = num_samples is not None
    if several and not (isinstance(values, (list, tuple)) and len(values) == num_samples):
        kind = f"{len(values)} values" if isinstance(values, (list, tuple)) else type(values).__name__
        message = f"{source} returned {kind}; must be a list with one value for each of {num_samples} trajectories"
        raise invalid_reward(message)
    found: list[dict[str, float] | float | None] = []
    for value in values if several and isinstance(values, (list, tuple)) else [values]:
        if isinstance(value, Mapping):
            if not value or not all(isinstance(name, str) and is_text(name) for name in value):
                raise invalid_reward(f"{source} returned {shown(value)}; its keys must be names of rewards")
            found.append({name: check_reward(one, source=f"{source}[{name!r}]") for name, one in value.items()})
        else:
            found.append(None if value is None else check_reward(value, source=source))
    return found
