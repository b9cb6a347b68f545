"""What passes between a trajectory and its environment, and the one place where it is checked.

    trajectory                                         thread or worker process
    EnvironmentSession -- request (plain data) ------> HostedEnvironment -> the environment's own method
                       <-- answer (plain data) -------

Plain data is what JSON holds: None, booleans, numbers, texts, lists and mappings of texts. The hosting side checks what the
environment returned and makes it plain, within the deadline of the call; the trajectory's side checks it once more with the
same functions, since what a worker process sends need not come from ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from skyrl_train.errors import SkyrlTrainError
from skyrl_train.registry import PartSpec, error_text, own_line
from skyrl_train.rollout.plain_data import MAX_METRIC_NAME, number_in, numbers_only, plain, scalar
from skyrl_train.rollout.tools.toolbox import Schema, is_content
from skyrl_train.rollout.tools.variables import told_missing
from skyrl_train.system.files import is_text, shown
from skyrl_train.telemetry.logs import redact_text
from skyrl_train.types import ChatMessage, Failure, FailureKind

T = TypeVar("T")
Answer = dict[str, Any]
"""`{"value": ...}`, with `resume` if the request `keeps` (`journaled.py`), or `{"failure": FailureKind, "message": ...}`."""
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


class Broken(Exception):
    """A guarded call (environment or engine) broke one trajectory. Raised at the boundary, caught by the agent loop.

    Whatever else is raised in the loop is a programming error and propagates.
    """

    def __init__(self, kind: FailureKind, message: str):
        super().__init__(message)
        self.kind = kind
        self.message = message

    def to_failure(self, turn_index: int) -> Failure:
        return Failure(kind=self.kind, message=redact_text(self.message), turn_index=turn_index)


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
class ToolSettings:
    """What an environment's host is told of `environment.tools`."""

    specs: Sequence[PartSpec] = ()
    max_result_chars: int = 4000


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What a tool answered to one call, a text or parts with images among them, or why it did not."""

    content: str | list[dict[str, Any]]
    failed: bool


def late(what: str, timeout_s: float, where: str = "") -> Broken:
    """Return the error of a call that exceeded its deadline, as `; it was at FILE` in `where` may say."""
    return Broken(FailureKind.ENVIRONMENT_TIMEOUT, f"{what} did not answer within {timeout_s:g} s{where}")


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


_NO_TOOLS = ToolSettings()


class EnvironmentSession:
    """One environment for one trajectory. Each method raises Broken where the environment breaks, and only then."""

    def __init__(
        self,
        environments: Environments,
        spec: PartSpec,
        extras: Mapping[str, Any],
        name: str,
        tools: ToolSettings = _NO_TOOLS,
        wrap: Callable[[EnvironmentHandle], EnvironmentHandle] = lambda handle: handle,
    ) -> None:
        """`spec` and `extras`: as `make_environment`; `name` is for messages; `wrap` gives what stands before it."""
        self.own_tools: list[Schema] = []
        """The environment's own tools, once it has started."""
        self.plays_itself = False
        """Whether it runs its tools by itself and scores whole episodes, once it has started."""
        self._tools = tools
        self._environments = environments
        self._handle = wrap(environments.host(name))
        self._spec, self._extras, self._name = spec, extras, name
        self._usable = False
        """Asked for, and no call without an answer since."""
        self._components: dict[str, float] = {}
        """Sums over the steps so far."""

    async def start(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """Constructs and initialises. Returns the first messages for the model."""
        construction = {
            "call": "construction",
            "spec": self._spec,
            "extras": self._extras,
            "tools": list(self._tools.specs),
            "max_result_chars": self._tools.max_result_chars,
        }
        self.own_tools = await self._ask(construction, check_schemas)
        first, tools = await self._ask({"call": "init", "messages": messages}, check_opening)
        if tools is not None:
            self.plays_itself, self.own_tools = True, tools
        return first

    async def step(self, action: str, calls: Sequence[Mapping[str, Any]] = ()) -> StepResult:
        """Answer a response, and the `calls` in it that an environment runs which plays by itself: each is `{"id": ...,
        "name": ..., "arguments": mapping, or the text that cannot be read as one}`."""
        said = {"call": "step", "action": action}
        return await self._step({**said, "calls": list(calls)} if calls else said)

    async def cut(self, action: str) -> StepResult:
        """Score a trajectory whose context is full; `action` is its last response."""
        return await self._step({"call": "cut"} if self.plays_itself else {"call": "step", "action": action})

    async def _step(self, request: Request) -> StepResult:
        result = await self._ask(request, check_step)
        for name, reward in result.components.items():
            self._components[name] = self._components.get(name, 0.0) + reward
        return result

    async def use_tools(self, calls: Sequence[Mapping[str, Any]]) -> list[ToolResult]:
        """Return the result of each call `{"name": ..., "arguments": {...}}`."""
        results = await self._ask({"call": "tools", "calls": list(calls)}, check_tool_results)
        if len(results) != len(calls):
            message = f"{self._name}.tools: {len(results)} results of {len(calls)} calls"
            raise Broken(FailureKind.ENVIRONMENT_ERROR, message)
        return results

    async def metrics(self) -> dict[str, float]:
        """Return the environment's own finite numbers, and the components of its rewards summed over the steps; everything
        else in `get_metrics` is left out."""
        own = await self._ask({"call": "get_metrics"}, lambda value, **_: numbers_only(value))
        return {**own, **self._components}

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
    raise Broken(FailureKind.ENVIRONMENT_ERROR, f"{source}: its worker sent {shown(answer)}, which is no answer")


def check_first_messages(value: object, *, source: str) -> list[ChatMessage]:
    """Return the first messages in what `init` returned, or raise Broken saying what is wrong with it."""
    if not isinstance(value, tuple) or len(value) != 2:
        kind = type(value).__name__
        message = f"{source} returned {kind}; must be (messages, information)"
        raise Broken(FailureKind.ENVIRONMENT_ERROR, message)
    return check_some_messages(value[0], source=source)


def check_opening(value: object, *, source: str) -> tuple[list[ChatMessage], list[Schema] | None]:
    """Return the first messages, and the tools of an environment that plays by itself, or raise Broken."""
    if not isinstance(value, Mapping):
        return check_some_messages(value, source=source), None
    return check_some_messages(value.get("messages"), source=source), check_schemas(value.get("tools"), source=source)


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
            rule = f"{where} is {shown(message)}; must have 'role' and 'content'"
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
    if isinstance(output, tuple) and len(output) == len(_GYMNASIUM_STEP):
        output = dict(zip(_GYMNASIUM_STEP, output))
        if isinstance(output["observations"], str):
            output["observations"] = [{"role": "user", "content": output["observations"]}]
    if not isinstance(output, Mapping):
        kind = type(output).__name__
        raise Broken(FailureKind.ENVIRONMENT_ERROR, f"{source} returned {kind}; must be a mapping")
    ends = {name: scalar(output[name]) for name in ("done", "terminated", "truncated") if name in output}
    if not ends.keys() - {"truncated"}:
        raise Broken(FailureKind.ENVIRONMENT_ERROR, f"{source} returned no 'done'; it has {sorted(map(str, output))}")
    for name, end in ends.items():
        if not isinstance(end, bool):
            message = f"{source} returned '{name}' as {shown(end)}; must be True or False"
            raise Broken(FailureKind.ENVIRONMENT_ERROR, message)
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
    """Return the rewards by name that a reward is the sum of, if it is one. Raises Broken (invalid_reward)."""
    if not isinstance(value, Mapping) or not value:
        return {}
    for name in value:
        if not isinstance(name, str) or not is_text(name) or len(name) > MAX_METRIC_NAME:
            message = f"{source} returned a reward named {shown(name)}; must be a text of at most {MAX_METRIC_NAME}"
            raise Broken(FailureKind.INVALID_REWARD, f"{message} characters")
    return {str(name): check_reward(each, source=f"{source}[{name!r}]") for name, each in value.items()}


def check_schemas(value: object, *, source: str) -> list[Schema]:
    """Return the schemas of tools as plain data, or raise Broken."""
    try:
        schemas = plain(value, "the tools")
        if isinstance(schemas, list) and all(isinstance(each["function"]["name"], str) for each in schemas):
            return schemas
    except (ValueError, KeyError, TypeError) as error:
        raise Broken(FailureKind.ENVIRONMENT_ERROR, f"{source}: its tools cannot be sent: {error}") from error
    raise Broken(FailureKind.ENVIRONMENT_ERROR, f"{source}: its tools are {shown(value)}; must be a list of schemas")


def check_tool_results(value: object, *, source: str) -> list[ToolResult]:
    """Return the results of tools, or raise Broken."""
    try:
        results = plain(value, "the results")
        if all(is_content(each["content"]) and isinstance(each["failed"], bool) for each in results):
            return [ToolResult(content=each["content"], failed=each["failed"]) for each in results]
    except (ValueError, KeyError, TypeError):
        pass
    raise Broken(FailureKind.ENVIRONMENT_ERROR, f"{source} returned {shown(value)}; must be texts, or texts and images")


def check_reward(value: object, *, source: str) -> float:
    """Return `value` as a finite float of at most `MAX_REWARD` in size (numpy scalars and booleans are fine), or raise
    Broken (invalid_reward)."""
    number = number_in(value, MAX_REWARD)
    if number is not None:
        return number
    rule = f"must be a finite number between {-MAX_REWARD:g} and {MAX_REWARD:g}"
    raise Broken(FailureKind.INVALID_REWARD, f"{source} returned the reward {shown(value)}; {rule}")


def check_scores(values: object, *, source: str, num_samples: int | None) -> list[dict[str, float] | float | None]:
    """Return what a reward function said of each trajectory: a number, numbers by name, or None for "not scored".

    `num_samples` is None where the function was called for one trajectory and returned its value, not a list. Raises
    Broken (invalid_reward).
    """
    several = num_samples is not None
    if several and not (isinstance(values, (list, tuple)) and len(values) == num_samples):
        kind = f"{len(values)} values" if isinstance(values, (list, tuple)) else type(values).__name__
        message = f"{source} returned {kind}; must be a list with one value for each of {num_samples} trajectories"
        raise Broken(FailureKind.INVALID_REWARD, message)
    found: list[dict[str, float] | float | None] = []
    for value in values if several and isinstance(values, (list, tuple)) else [values]:
        if isinstance(value, Mapping):
            if not value or not all(isinstance(name, str) and is_text(name) for name in value):
                message = f"{source} returned {shown(value)}; its keys must be names of rewards"
                raise Broken(FailureKind.INVALID_REWARD, message)
            found.append({name: check_reward(one, source=f"{source}[{name!r}]") for name, one in value.items()})
        else:
            found.append(None if value is None else check_reward(value, source=source))
    return found
