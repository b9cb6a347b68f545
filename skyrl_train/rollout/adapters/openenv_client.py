"""Environments behind a URL, as openenv-core serves them: `environment.env_class=openenv:http://127.0.0.1:8000`.

Each trajectory has a session of its own over a WebSocket (`reset`, `step`). It is asynchronous: a thousand of them are a
thousand connections of a few worker processes. Of the environment's own package nothing is needed.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_train.errors import DataError, Violation
from skyrl_train.rollout.boundary import describe
from skyrl_train.system import install_command
from skyrl_train.types import ChatMessage

SETTING = "environment.env_class"
_ANSWERS_WITHIN_S = 10.0
_NO_DEADLINE_S = 86400.0
"""The client's own; the one that counts is `environment.step_timeout_s`."""


class OpenEnvironment:
    """One session. What the model is told is `observation` of what the server observes, or all of it as JSON."""

    def __init__(
        self,
        env_config: Any,
        extras: Mapping[str, Any],
        *,
        url: str,
        action: str = "message",
        observation: str | None = None,
        reset: tuple[str, ...] = ("seed",),
    ) -> None:
        """
        Args:
            url: Of the server, `http://` or `ws://`.
            action: The field of the environment's action that the model's answer is.
            observation: The field of its observation that is a text.
            reset: Columns of the row that `reset` is given, where the row has them.
        """
        del env_config
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(base_url=url, message_timeout_s=_NO_DEADLINE_S)
        self._action, self._observation = action, observation
        self._reset = {name: extras[name] for name in reset if name in extras}

    @staticmethod
    def violations(**arguments: Any) -> Iterator[Violation]:
        """What is wrong with the arguments: no package, or no server that starts a session in time."""
        try:
            importlib.import_module("openenv.core.generic_client")  # which takes longer than a server may
        except ImportError as error:
            remedy = f"{install_command('openenv')}, for the interpreter of environment.python if there is one"
            remedy += f" ({error})"
            yield Violation.of(f"{SETTING}.url", arguments["url"], "needs the package openenv-core", remedy)
            return

        async def begin() -> None:
            environment = OpenEnvironment(None, {}, **arguments)
            try:
                await environment.init([{"role": "user", "content": ""}])
            finally:
                await environment.close()

        try:
            asyncio.run(asyncio.wait_for(begin(), _ANSWERS_WITHIN_S))
        except DataError as error:
            rule = "must be a field of what the server observes"
            yield Violation.of(f"{SETTING}.observation", arguments["observation"], rule, str(error))
        except Exception as error:  # whatever the client raises
            remedy = f"start its server, or correct the URL ({describe(error)})"
            rule = f"must be a server that begins within {_ANSWERS_WITHIN_S:g} s"
            yield Violation.of(f"{SETTING}.url", arguments["url"], rule, remedy)

    async def init(self, prompt: list[ChatMessage]) -> tuple[list[ChatMessage], dict[str, Any]]:
        """The prompt, whose last message goes on with the first observation."""
        result = await self._client.reset(**self._reset)
        *before, last = prompt
        return [*before, {**last, "content": f"{last['content']}\n{self._text(result.observation)}"}], {}

    async def step(self, action: str) -> dict[str, Any]:
        result = await self._client.step({self._action: action})
        return {
            "observations": [{"role": "user", "content": self._text(result.observation)}],
            "reward": 0.0 if result.reward is None and not result.done else result.reward,
            "done": result.done,
        }

    async def close(self) -> None:
        await self._client.disconnect()

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._observation is None:
            return json.dumps(observation)
        if self._observation not in observation:
            raise DataError(f"the server observes {', '.join(observation)}, and not {self._observation!r}")
        return str(observation[self._observation])
