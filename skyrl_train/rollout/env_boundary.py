"""What passes between a trajectory and its environment, and the one place where it is checked.

    trajectory                                         thread or worker process
    EnvironmentSession -- request (plain data) ------> HostedEnvironment -> the environment's own method
                       <-- answer (plain data) -------

Plain data is what JSON holds: None, booleans, numbers, texts, lists and mappings of texts. The hosting side checks what the
environment returned and makes it plain, within the deadline of the call; the trajectory's side checks it once more with the
same functions, since what a worker process sends need not come from ours.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, SupportsFloat, TypeVar

from skyrl_train.registry import PartSpec
from skyrl_train.rollout.environments import make_environment
from skyrl_train.types import ChatMessage, Failure, FailureKind

T = TypeVar("T")
Request = Mapping[str, Any]
"""`{"call": "construction", "init", "step", "get_metrics" or "close", ...}` with the arguments of the call."""

MAX_REWARD = 1e12
"""Rewards become float32: squared errors of values, and norms of gradients, overflow from about 1e16 on."""
_FLOAT32_MAX = 3.4028234663852886e38
MAX_CHARACTERS = 4 << 20
"""Text of the messages of one answer: several times what fits any model's context."""
_MAX_DEPTH = 32
_MAX_INTEGER_BITS = 1024
_MAX_METRICS = 1000
_MAX_METRIC_NAME = 200
_OF_ENVIRONMENTS = (
    FailureKind.ENVIRONMENT_ERROR,
    FailureKind.ENVIRONMENT_TIMEOUT,
    FailureKind.INVALID_REWARD,
    FailureKind.INVALID_OBSERVATION,
)


class Broken(Exception):
    """A guarded call (environment or engine) broke one trajectory. Raised at the boundary, caught by the agent loop.

    Whatever else is raised in the loop is a programming error and propagates.
    """

    def __init__(self, kind: FailureKind, message: str):
        super().__init__(message)
        self.kind = kind
        self.message = message

    def to_failure(self, turn_index: int) -> Failure:
        return Failure(kind=self.kind, message=self.message, turn_index=turn_index)


def describe(error: BaseException) -> str:
    """Describe an error as `ValueError: unknown city 'Oz'`, in one line of at most 500 characters."""
    try:
        text = " ".join(str(error)[:2000].split())
    except Exception:  # an error whose text cannot be had is told by its type
        text = ""
    return _one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _one_line(text: str) -> str:
    line = text.encode("utf-8", "replace").decode()
    return line if len(line) <= 500 else line[:497] + "..."


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """An environment's answer to one response, checked."""

    observations: list[ChatMessage]
    reward: float
    """Finite, at most `MAX_REWARD` in size."""
    done: bool


class HostedEnvironment:
    """One environment and the boundary around it, on the thread or in the process that runs it."""

    def __init__(self, name: str) -> None:
        """`name` is that of the environment in messages."""
        self._name = name
        self._environment: Any = None

    def answer(self, request: Request) -> dict[str, Any]:
        """Return `{"value": ...}`, or `{"failure": FailureKind, "message": ...}`. Raises nothing."""
        try:
            return {"value": self._perform(request)}
        except Broken as broken:
            return {"failure": broken.kind.value, "message": broken.message}
        except BaseException as error:
            return {"failure": FailureKind.ENVIRONMENT_ERROR.value, "message": describe(error)}

    def close_late(self) -> None:
        """Close the environment after a call that nobody waited for; what that raises is nobody's concern either."""
        self.answer({"call": "close"})

    def _perform(self, request: Request) -> object:
        call, source = request["call"], f"{self._name}.{request['call']}"
        if call == "construction":
            # Kept from here on, so that one whose construction came too late is closed all the same.
            self._environment = make_environment(request["spec"], request["extras"])
            return None
        if call == "close":
            environment, self._environment = self._environment, None
            if environment is not None:
                environment.close()
            return None
        if self._environment is None:
            raise RuntimeError("the environment was used before it was started or after it was closed")
        if call == "init":
            return check_first_messages(self._environment.init(request["messages"]), source=source)
        if call == "step":
            result = check_step(self._environment.step(request["action"]), source=source)
            return {"observations": result.observations, "reward": result.reward, "done": result.done}
        return numbers_only(self._environment.get_metrics())


class EnvironmentHandle(Protocol):
    """One environment, wherever it lives."""

    async def ask(self, request: Request) -> object:
        """Return the answer of its `HostedEnvironment`. Raises Broken where none came: the call exceeded its deadline, or
        ended its process. No further call is made then, `close` included."""
        ...

    def release(self) -> None:
        """Forget the environment, which was closed or has failed."""
        ...


class Environments(Protocol):
    """Where environments run. Used from one event loop."""

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


class EnvironmentSession:
    """One environment for one trajectory. Each method raises Broken where the environment breaks, and only then."""

    def __init__(self, environments: Environments, spec: PartSpec, extras: Mapping[str, Any], name: str) -> None:
        """`spec` and `extras` are those of `make_environment`; `name` is the environment's in messages."""
        self._environments = environments
        self._handle = environments.host(name)
        self._spec, self._extras, self._name = spec, extras, name
        self._usable = False
        """Asked for, and no call without an answer since."""

    async def start(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """Constructs and initialises. Returns the first messages for the model."""
        await self._ask({"call": "construction", "spec": self._spec, "extras": self._extras}, lambda *_, **__: None)
        return await self._ask({"call": "init", "messages": messages}, check_some_messages)

    async def step(self, action: str) -> StepResult:
        return await self._ask({"call": "step", "action": action}, check_step)

    async def metrics(self) -> dict[str, float]:
        """Return the environment's own finite numbers; everything else in `get_metrics` is left out."""
        return await self._ask({"call": "get_metrics"}, lambda value, **_: numbers_only(value))

    async def close(self) -> None:
        """Close the environment: always attempted; never raises. After a call that hung there is nothing to close: its
        process has ended, or the thread that was given up closes it."""
        if self._usable:
            try:
                await self._ask({"call": "close"}, lambda *_, **__: None)
            except Broken:
                # The rewards are in: a failing clean-up loses nothing of the trajectory, so it is counted, not raised.
                self._environments.num_close_failures += 1
            self._usable = False
        self._handle.release()

    async def _ask(self, request: Request, check: Callable[..., T]) -> T:
        source = f"{self._name}.{request['call']}"
        self._usable = False
        answer = await self._handle.ask(request)
        self._usable = True
        return check(read_answer(answer, source=source), source=source)


def read_answer(answer: object, *, source: str) -> Any:
    """Return the value in a host's answer. Raises the Broken that it tells of, or one that says that it is no answer."""
    if isinstance(answer, dict) and set(answer) == {"value"}:
        return answer["value"]
    if isinstance(answer, dict) and set(answer) == {"failure", "message"}:
        kind = next((each for each in _OF_ENVIRONMENTS if each.value == answer["failure"]), None)
        if kind is not None and isinstance(answer["message"], str):
            raise Broken(kind, _one_line(answer["message"]))
    raise Broken(FailureKind.ENVIRONMENT_ERROR, f"{source}: its worker sent {_short(answer)}, which is no answer")


def check_first_messages(value: object, *, source: str) -> list[ChatMessage]:
    """Return the first messages in what `init` returned, or raise Broken saying what is wrong with it."""
    if not isinstance(value, tuple) or len(value) != 2:
        kind = type(value).__name__
        message = f"{source} returned {kind}; must be (messages, information)"
        raise Broken(FailureKind.ENVIRONMENT_ERROR, message)
    return check_some_messages(value[0], source=source)


def check_some_messages(value: object, *, source: str) -> list[ChatMessage]:
    """Return at least one chat message, or raise Broken (invalid_observation)."""
    first = check_messages(value, source=source)
    if not first:
        raise Broken(FailureKind.INVALID_OBSERVATION, f"{source} returned no message")
    return first


def check_messages(value: object, *, source: str) -> list[ChatMessage]:
    """Return a list of chat messages of plain data, or raise Broken (invalid_observation) saying what is wrong with it."""
    if not isinstance(value, (list, tuple)):
        raise Broken(FailureKind.INVALID_OBSERVATION, f"{source} returned {type(value).__name__}; must be a list")
    messages: list[ChatMessage] = []
    num_characters = 0
    for index, message in enumerate(value):
        where = f"message {index}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            rule = f"{where} is {_short(message)}; must have 'role' and 'content'"
            raise Broken(FailureKind.INVALID_OBSERVATION, f"{source}: {rule}")
        content = message["content"]
        if content is not None and not isinstance(content, (str, list)):
            rule = f"the content of {where} is {type(content).__name__}; must be text"
            raise Broken(FailureKind.INVALID_OBSERVATION, f"{source}: {rule}")
        num_characters += len(content) if isinstance(content, str) else 0
        if num_characters > MAX_CHARACTERS:
            rule = f"the messages have more than {MAX_CHARACTERS:,} characters"
            raise Broken(FailureKind.INVALID_OBSERVATION, f"{source}: {rule}")
        try:
            messages.append(plain(message, where))
        except ValueError as error:
            raise Broken(FailureKind.INVALID_OBSERVATION, f"{source}: {error}") from error
    return messages


def check_step(output: object, *, source: str) -> StepResult:
    """Return the fields of a step's answer, or raise Broken naming the one that is wrong."""
    if not isinstance(output, Mapping):
        kind = type(output).__name__
        raise Broken(FailureKind.ENVIRONMENT_ERROR, f"{source} returned {kind}; must be a mapping")
    if "done" not in output:
        raise Broken(FailureKind.ENVIRONMENT_ERROR, f"{source} returned no 'done'; it has {sorted(map(str, output))}")
    done = _scalar(output["done"])
    if not isinstance(done, bool):
        message = f"{source} returned 'done' as {_short(done)}; must be True or False"
        raise Broken(FailureKind.ENVIRONMENT_ERROR, message)
    reward = check_reward(output.get("reward"), source=source)
    observations = output.get("observations")
    if done and observations is None:
        observations = []
    return StepResult(observations=check_messages(observations, source=source), reward=reward, done=done)


def check_reward(value: object, *, source: str) -> float:
    """Return `value` as a finite float of at most `MAX_REWARD` in size (numpy scalars and booleans are fine), or raise
    Broken (invalid_reward)."""
    number = _number(value, MAX_REWARD)
    if number is not None:
        return number
    rule = f"must be a finite number between {-MAX_REWARD:g} and {MAX_REWARD:g}"
    raise Broken(FailureKind.INVALID_REWARD, f"{source} returned the reward {_short(value)}; {rule}")


def numbers_only(metrics: object) -> dict[str, float]:
    """Return the finite numbers among an environment's metrics, whose names are texts of at most 200 characters; what is
    beyond the first thousand is left out."""
    if not isinstance(metrics, Mapping):
        return {}
    numbers: dict[str, float] = {}
    for key, value in islice(metrics.items(), _MAX_METRICS):
        name, number = str(key), _number(value, _FLOAT32_MAX)
        if number is not None and len(name) <= _MAX_METRIC_NAME and _is_text(name):
            numbers[name] = number
    return numbers


def plain(value: object, where: str, depth: int = 0) -> Any:
    """Return `value` as plain data: containers copied, tuples as lists, numpy's scalars as Python's.

    `where` names the value in messages, e.g. `message 0`. Raises ValueError naming the part that is no plain data.
    """
    value = _scalar(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if _is_text(value):
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
        if all(isinstance(key, str) and _is_text(key) for key in value):
            return {str(key): plain(each, f"{where}.{key}", depth + 1) for key, each in value.items()}
        raise ValueError(f"{where} has a key that is no text")
    rule = "must be a text, a number, true, false, null, a list or a mapping of them"
    raise ValueError(f"{where} is {_short(value)} ({type(value).__name__}); {rule}")


def _scalar(value: Any) -> Any:
    """Return numpy's (or torch's) single numbers as Python's, without importing either."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "dtype") else value


def _number(value: object, most: float) -> float | None:
    try:
        if isinstance(value, SupportsFloat) and abs(number := float(value)) <= most:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    return None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(value: object) -> str:
    try:
        text = _REPR.repr(value)
    except Exception:  # a number with too many digits, say
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else text[:77] + "..."


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80
