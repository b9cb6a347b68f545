"""One environment where it runs: on a thread of the trainer, or in a worker process (`boundary/__init__.py` has the
picture)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Coroutine
from typing import Any

from skyrl_train.rollout.boundary import (
    CHECK_ROWS,
    Answer,
    EnvironmentFailed,
    Request,
    check_first_messages,
    check_schemas,
    check_scores,
    check_step,
    describe,
    late,
    numbers_only,
    plain_state,
)
from skyrl_train.rollout.envs.environments import is_asynchronous, make_environment, plays_itself, row_problems
from skyrl_train.rollout.rewards.reward_functions import call_reward
from skyrl_train.rollout.tools.toolbox import Toolbox
from skyrl_train.types import FailureKind


class HostedEnvironment:
    """One environment and the boundary around it, on the thread or in the process that runs it."""

    def __init__(self, name: str) -> None:
        """`name` is that of the environment in messages."""
        self._name = name
        self._environment: Any = None
        self._toolbox = Toolbox(())
        self._has_tools = False
        """Whether there are some of `environment.tools`."""

    def answer(self, request: Request) -> Answer | Coroutine[Any, Any, Answer]:
        """Return the answer, or where the environment's method is asynchronous a coroutine of it, which wants an event loop
        (`in_time`). Neither raises anything of the environment's."""
        try:
            value = self._perform(request)
            if inspect.isawaitable(value) or inspect.iscoroutinefunction(getattr(self._environment, "get_state", None)):
                return self._answer_later(request, value)
            return self._answered(request, self._checked(request, value), self._state(request))
        except BaseException as error:
            return _failure(error)

    async def in_time(self, request: Request, answer: Awaitable[Answer], timeout_s: float | None) -> Answer:
        """Return an asynchronous answer; a failure where it takes longer than `timeout_s`, when the call is cancelled and
        the environment is closed."""
        task = asyncio.ensure_future(answer)
        try:
            if (await asyncio.wait({task}, timeout=timeout_s))[0]:
                return task.result()
        finally:
            task.cancel()  # and not waited for: it may refuse to end
        if isinstance(closing := self.answer({"call": "close"}), Coroutine):
            await asyncio.wait({asyncio.ensure_future(closing)}, timeout=timeout_s)
        return _failure(late(f"{self._name}.{request['call']}", timeout_s or 0.0))

    def close_late(self) -> None:
        """Close the environment after a call that nobody waited for; what that raises is nobody's concern either."""
        if isinstance(closing := self.answer({"call": "close"}), Coroutine):
            asyncio.run(closing)

    async def _answer_later(self, request: Request, value: object) -> Answer:
        try:
            checked = self._checked(request, await value if inspect.isawaitable(value) else value)
            state = self._state(request)
            return self._answered(request, checked, await state if inspect.isawaitable(state) else state)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return _failure(error)

    def _state(self, request: Request) -> object:
        """Return what the environment's `get_state` does, to a request that keeps it; None where there is none. That of
        `environment.tools` would not be in it."""
        offers = hasattr(self._environment, "get_state") and hasattr(self._environment, "set_state")
        return self._environment.get_state() if request.get("keeps") and offers and not self._has_tools else None

    def _answered(self, request: Request, value: object, state: object) -> Answer:
        if not request.get("keeps"):
            return {"value": value}
        if state is not None:
            return {"value": value, "resume": {"state": plain_state(state)}}
        return {
            "value": value,
            "resume": {"replay": True} if getattr(self._environment, "deterministic", False) else {},
        }

    def _perform(self, request: Request) -> object:
        call = request["call"]
        if call == CHECK_ROWS:
            return row_problems(request["spec"], request["rows"])
        if call == "score":
            return call_reward(request["spec"], request["prompt"], request["samples"])
        if call == "construction":
            # Kept from here on, so that one whose construction came too late is closed all the same.
            self._environment = make_environment(request["spec"], request["extras"])
            most, self._has_tools = request["max_result_chars"], bool(request["tools"])
            self._toolbox = Toolbox(request["tools"], self._environment, max_result_chars=most)
            return self._toolbox.own_schemas
        environment: Any = self._environment
        if call == "close":
            self._environment = None
            self._toolbox.close()
            return environment.close() if hasattr(environment, "close") else None
        if environment is None:
            raise RuntimeError("the environment was used before it was started or after it was closed")
        if call == "init":
            return environment.init(request["messages"])
        if call == "set_state":
            return environment.set_state(request["state"])
        if call == "step" and request.get("calls"):
            return environment.step_calls(request["action"], request["calls"])
        if call == "cut":
            return environment.cut()
        if call == "step":
            return environment.step(request["action"])
        if call == "tools":
            results = self._toolbox.run(request["calls"])
            return results if is_asynchronous(environment) else asyncio.run(results)
        return environment.get_metrics() if hasattr(environment, "get_metrics") else {}

    def _checked(self, request: Request, value: object) -> object:
        """Return what a method returned as plain data. Raises EnvironmentFailed where it must not return that."""
        call, source = request["call"], f"{self._name}.{request['call']}"
        if call == "score":
            return check_scores(value, source=self._name, num_samples=request["num_values"])
        if call == "construction":
            return check_schemas(value, source=source)
        if call == "init":
            messages = check_first_messages(value, source=source)
            if not plays_itself(self._environment):
                return messages
            return {"messages": messages, "tools": check_schemas(self._environment.schemas, source=source)}
        if call in ("step", "cut"):
            result = check_step(value, source=source)
            reward = result.components or result.reward
            plain_result = {"observations": result.observations, "reward": reward, "done": result.done}
            return {**plain_result, "truncated": True} if result.truncated else plain_result
        return numbers_only(value) if call == "get_metrics" else value if call in ("tools", CHECK_ROWS) else None


def _failure(error: BaseException) -> Answer:
    if isinstance(error, EnvironmentFailed):
        return {"failure": error.kind.value, "message": error.message}
    return {"failure": FailureKind.ENVIRONMENT_ERROR.value, "message": describe(error)}
