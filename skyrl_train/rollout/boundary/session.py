"""One environment for one trajectory: its calls in their order, and how it comes back to where it was.

Two things take an environment from its trajectory: another one that ends the worker process which they share, and the end of
the run, after which the trajectory is played again from its first turn and the journal (`journal.py`) has the answers of the
run before. As long as it has, no environment is even made. Then one is, as before, and brought to where it was:

    state    after the end of a run: it has `get_state` and `set_state`, and is given the state beside its last answer
    replay   it is given the same calls, and must answer as it did; a run goes on so where it says `deterministic = True`

An environment that lost its worker has no other way than replay; one that then answers otherwise (it is random, or keeps
state elsewhere) fails. What restarts is asked from its first turn on, too; the engine's answers are those of the journal as
long as the prompts are the same. `environment.tools` have no state that is known: with them there is no first way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from skyrl_train.registry import PartSpec
from skyrl_train.rollout.boundary import (
    EnvironmentFailed,
    EnvironmentLost,
    Environments,
    Request,
    StepResult,
    ToolResult,
    check_opening,
    check_schemas,
    check_step,
    check_tool_results,
    environment_error,
    numbers_only,
    plain_state,
    read_answer,
)
from skyrl_train.rollout.journal import Call, Journal
from skyrl_train.rollout.tools.toolbox import Schema
from skyrl_train.types import ChatMessage, FailureKind

T = TypeVar("T")
_ENDS = "get_metrics"
"""The last call before the environment is closed."""
_CHANGING = ("init", "step", "cut", "tools")
"""Calls after which the journal keeps how the environment may be brought back."""
_ARGUMENTS = ("call", "messages", "action", "calls")
"""What tells calls of one trajectory from one another: the row is the same."""


class Restarted(Exception):
    """The environment of a trajectory cannot be brought to where it was. The trajectory is to be run once more: the journal
    has no calls of it any longer."""


class EnvironmentSession:
    """One environment for one trajectory. Each method raises EnvironmentFailed where the environment breaks, and Restarted
    where it cannot go on from a journal; nothing else."""

    def __init__(
        self,
        environments: Environments,
        spec: PartSpec,
        extras: Mapping[str, Any],
        name: str,
        *,
        tools: Sequence[PartSpec] = (),
        max_result_chars: int = 4000,
        journal: Journal | None = None,
        trajectory: str = "",
    ) -> None:
        """`spec` and `extras`: as `make_environment`; `name` is for messages; `tools` and `max_result_chars` as in
        `environment.tools` and `max_tool_result_chars`. What it answers is written to `journal`, or
        taken from there, under the name `trajectory`."""
        self.own_tools: list[Schema] = []
        """The environment's own tools, once it has started."""
        self.plays_itself = False
        """Whether it runs its tools by itself and scores whole episodes, once it has started."""
        self._tools, self._max_result_chars = list(tools), max_result_chars
        self._environments = environments
        self._handle = environments.host(name)
        self._spec, self._extras, self._name = spec, extras, name
        self._usable = False
        """Asked for, and no call without an answer since."""
        self._components: dict[str, float] = {}
        """Sums over the steps so far."""
        self._journal, self._trajectory = journal, trajectory
        self._known: tuple[Call, ...] = () if journal is None else journal.calls(trajectory)
        """What it answered in a run before."""
        if journal is not None and self._known and self._way() == "":
            had_response = len(self._known) > 2  # its construction and the first messages
            journal.restart(trajectory, "no_state" if had_response else "")
            self._known = ()
        self._is_live = not self._known
        self._calls: list[tuple[Request, str]] = []
        """What brings the environment to where it is: calls, and a digest of each answer; empty where any answer will do."""

    async def start(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """Constructs and initialises. Returns the first messages for the model."""
        construction = {
            "call": "construction",
            "spec": self._spec,
            "extras": self._extras,
            "tools": self._tools,
            "max_result_chars": self._max_result_chars,
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
            raise environment_error(f"{self._name}.tools: {len(results)} results of {len(calls)} calls")
        return results

    async def metrics(self) -> dict[str, float]:
        """Return the environment's own finite numbers, and the components of its rewards summed over the steps; everything
        else in `get_metrics` is left out."""
        own = await self._ask({"call": _ENDS}, lambda value, **_: numbers_only(value))
        return {**own, **self._components}

    async def close(self) -> None:
        """Close the environment: always attempted; never raises. After a call that hung there is nothing to close: its
        process has ended, or the thread that was given up closes it."""
        if self._usable and self._is_live:
            try:
                read_answer(await self._handle.ask({"call": "close"}), source=f"{self._name}.close")
            except EnvironmentLost:
                pass  # with its worker
            except EnvironmentFailed:
                # The rewards are in: a failing clean-up loses nothing of the trajectory, so it is counted, not raised.
                self._environments.num_close_failures += 1
        self._usable = False
        self._handle.release()

    async def _ask(self, request: Request, check: Callable[..., T]) -> T:
        source = f"{self._name}.{request['call']}"
        self._usable = False
        answer = await self._answer(request)
        self._usable = True
        return check(read_answer(answer, source=source), source=source)

    async def _answer(self, request: Request) -> object:
        """Return what the journal has in answer to a call, else what the environment answers, which is made again where
        another one took its worker with it."""
        call = request["call"]
        of = "" if self._journal is None else _digest({name: request[name] for name in _ARGUMENTS if name in request})
        if len(self._calls) < len(self._known) and not self._is_live:
            known = self._known[len(self._calls)]
            if known.of != of:
                raise self._restarted("asked_otherwise")
            self._calls.append((request, _digest({"value": known.value})))
            return {"value": known.value}
        if not self._is_live:
            await self._resume()
        asked = request if self._journal is None or call not in _CHANGING else {**request, "keeps": True}
        while True:
            try:
                answer = await self._handle.ask(asked)
                break
            except EnvironmentLost:
                if differs := await self._repeat():
                    reason = f"another environment ended the worker that {self._name} shared with it; made again, it"
                    raise environment_error(f"{reason} answered otherwise at {differs}") from None
        if not isinstance(answer, dict) or "value" not in answer:
            return answer
        resume = None if self._journal is None else answer.pop("resume", None)
        if self._environments.may_lose_environments and call != _ENDS:  # which only asks
            self._calls.append((request, _digest(answer)))
        if self._journal is not None:
            try:
                kept = Call(of=of, value=answer["value"], resume=_checked(resume))
            except ValueError as error:
                return {"failure": FailureKind.ENVIRONMENT_ERROR.value, "message": f"{call} and get_state: {error}"}
            self._journal.keep_call(self._trajectory, kept)
        return answer

    async def _repeat(self) -> str:
        """Make the environment again and give it the calls so far. Return the one that it answers otherwise, when it is
        closed; empty where it is where it was."""
        while True:
            try:
                for index, (request, digest) in enumerate(self._calls):
                    answer = await self._handle.ask(request)
                    now = _digest(answer)
                    if not isinstance(answer, dict) or "value" not in answer or (digest or now) != now:
                        with suppress(EnvironmentFailed, EnvironmentLost):
                            await self._handle.ask({"call": "close"})
                        return str(request["call"])
                    self._calls[index] = (request, now)
                return ""
            except EnvironmentLost:  # once more, to another that failed
                continue

    async def _resume(self) -> None:
        """Bring the environment to where the journal ends."""
        assert self._journal is not None
        way, self._is_live = self._way(), True
        if way == "state":
            state = {"call": "set_state", "state": self._known[-1].resume["state"]}
            self._calls = [(self._calls[0][0], ""), (state, "")]
        try:
            differs = await self._repeat()
        except EnvironmentFailed as broken:
            differs = broken.message
        if differs:
            raise self._restarted("state_refused" if way == "state" else "replay_differs")
        self._journal.resumed(way)

    def _way(self) -> str:
        """Return how the environment comes back to where the journal ends; empty where it cannot."""
        last = self._known[-1]
        if last.of == _digest({"call": _ENDS}):
            return "whole"
        return next((way for way in ("state", "replay") if way in last.resume), "")

    def _restarted(self, reason: str) -> Restarted:
        assert self._journal is not None
        self._journal.restart(self._trajectory, reason)
        return Restarted(f"{self._trajectory}: {reason}")


def _checked(resume: object) -> dict[str, Any]:
    """Return how to resume, which a worker process may have sent. Raises ValueError."""
    if isinstance(resume, dict) and set(resume) == {"state"}:
        return {"state": plain_state(resume["state"])}
    return {"replay": True} if resume == {"replay": True} else {}


def _digest(content: object) -> str:
    """Return what tells a call, or an answer, from others. Of an answer the state of its environment is left out, which may
    have times or paths in it."""
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name != "resume"}
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
