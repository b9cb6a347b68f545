"""Environments of verifiers 0.4, played by verifiers itself: `environment.env_class=verifiers:NAME`.

NAME is an installed taskset, as in `verifiers`. A row's column `task` is the index of its task in the taskset's order; the
model is shown the task's own prompt, whatever the row's is. verifiers runs the environment's loop, its tools and its
rewards in the worker process, and asks the trajectory for the model's answers (`inverted_chat.py`).

In place of its harness `null`, for which verifiers would start a program for each turn, the same chat loop runs in the
worker
process: it asks for answers, calls the tools that it is answered with, by verifiers' own connections, and is over at an
answer without calls. verifiers finds a harness by the name of a module, which `known_harness` makes.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from itertools import islice
from types import ModuleType
from typing import Any

from skyrl_train.errors import DataError, Violation
from skyrl_train.rollout.adapters.inverted_chat import NO_DEADLINE_S, Ended, Inversion, kept_open
from skyrl_train.rollout.agents.wires import ChatRequest
from skyrl_train.types import ChatMessage

_MODULE = "skyrl_train_chat"

CallTool = Callable[[str, dict[str, Any]], Awaitable[Any]]


@functools.cache
def known_harness() -> str:
    """Make the harness known to verifiers, and return its name there."""
    from verifiers.v1.harnesses.null import NullHarness
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
    from verifiers.v1.runtimes import ProgramResult

    class ChatHarness(NullHarness):  # type: ignore[misc]
        """Asks `endpoint` for answers until one calls no tool."""

        SUPPORTS_TOOL_INTERCEPTION = False

        async def setup(self, runtime: Any) -> None:
            """Nothing: no program is installed."""

        async def launch(
            self,
            ctx: Any,
            trace: Any,  # noqa: ARG002
            runtime: Any,  # noqa: ARG002
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> Any:
            """Return how one segment ended."""
            system, prompt = self.resolve_prompt(data)
            given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(_wire, prompt or ())]
            messages = [{"role": "system", "content": system}, *given] if system else given
            spec = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            async with AsyncExitStack() as stack:
                tools, dispatch, servers = await connect_mcp({"mcpServers": spec}, stack)

                async def call_tool(name: str, arguments: dict[str, Any]) -> Any:
                    if name not in dispatch:
                        return f"error: unknown tool {name!r}"
                    return await call_mcp(servers, dispatch, name, arguments)

                asked = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                problem = await _chat(asked, endpoint, secret, call_tool)
            return ProgramResult(exit_code=1 if problem else 0, stdout="", stderr=problem)

    module = ModuleType(_MODULE)
    module.__dict__.update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    sys.modules[_MODULE] = module
    return _MODULE


async def _chat(asked: dict[str, Any], endpoint: str, secret: str, call_tool: CallTool) -> str:
    """Ask, and run the tools that are called, until an answer calls none or the context is full. Returns what went wrong,
    or no text."""
    import aiohttp
    from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS, bound_tool_message

    messages: list[dict[str, Any]] = asked["messages"]
    headers, timeout = {"Authorization": f"Bearer {secret}"}, aiohttp.ClientTimeout(total=NO_DEADLINE_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        while True:
            async with session.post(f"{endpoint}/chat/completions", json=asked) as response:
                text = await response.text()
            if response.status != 200:
                return "" if any(each in text.casefold() for each in CONTEXT_OVERFLOW_MARKERS) else text
            message = json.loads(text)["choices"][0]["message"]
            messages.append({name: value for name, value in message.items() if value is not None})
            for call in message.get("tool_calls") or ():
                answer = {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"]}
                messages.append(bound_tool_message({**answer, "content": await _result(call, call_tool)}))
            if not message.get("tool_calls"):
                return ""


async def _result(call: Mapping[str, Any], call_tool: CallTool) -> Any:
    """Return what a tool answers, or what the model is told where its call cannot be read."""
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except ValueError as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    if not isinstance(arguments, dict):
        return f"error: tool arguments must be a JSON object, got {type(arguments).__name__}; resend as an object"
    return await call_tool(call["function"]["name"], arguments)


def _wire(message: Any) -> dict[str, Any]:
    from verifiers.v1.dialects.chat import message_to_wire

    found: dict[str, Any] = message_to_wire(message)
    return found


SETTING = "environment.env_class"


def _key(name: str, config: Mapping[str, Any] | None, env: Mapping[str, Any] | None, max_turns: int | None) -> str:
    return json.dumps([name, dict(config or {}), dict(env or {}), max_turns], sort_keys=True)


@functools.cache
def _environment(key: str) -> tuple[Any, str]:
    """Return verifiers' environment, and the role that the model plays. Raises what the package raises, and DataError."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id, load_environment, resolve_env_config

    name, config, settings, max_turns = json.loads(key)
    resolved = resolve_env_config({**settings, "taskset": {"id": name, **config}})
    roles = agent_config_fields(resolved)
    asking = [role for role, agent in roles.items() if agent.client is None]
    if len(asking) != 1:
        raise DataError(
            f"one role is the model's, and {', '.join(asking) or 'none'} would be; give each other one a model: "
            "env: {ROLE: {model: NAME, client: {type: eval, base_url: URL}}}"
        )
    keeps_harness = default_harness_id(name) != "bash"
    changed = {
        role: _local(agent, settings.get(role) or {}, keeps_harness, max_turns if role == asking[0] else None)
        for role, agent in roles.items()
    }
    return load_environment(resolved.model_copy(update=changed)), asking[0]


def _local(agent: Any, given: Mapping[str, Any], keeps_harness: bool, max_turns: int | None) -> Any:
    """Return a role that runs in this process, where neither the package nor the user says where it runs."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.configs.retries import RetryConfig
    from verifiers.v1.runtimes import SubprocessConfig
    from verifiers.v1.utils.loaders import harness_config_type

    update: dict[str, Any] = {"retries": RetryConfig()}
    if "runtime" not in given and agent.runtime == AgentConfig().runtime:
        update["runtime"] = SubprocessConfig()
        harness = agent.harness.id if agent.harness is not None else "" if keeps_harness else "null"
        if harness == "null" and not given.get("harness"):
            settings = agent.harness.model_dump() if agent.harness is not None else {}
            update["harness"] = harness_config_type(known_harness()).model_validate({**settings, "id": known_harness()})
    if max_turns is not None:
        update |= {"model": None, "max_turns": min(max_turns, agent.max_turns or max_turns)}
    return agent.model_copy(update=update)


@functools.cache
def _task(key: str, index: int) -> Any:
    name, taskset = json.loads(key)[0], _environment(key)[0].taskset
    for task in islice(taskset, index, index + 1):
        return task
    raise DataError(f"task: {name} has no task {index}")


class VerifiersEpisode:
    """One task, played to its end."""

    def __init__(
        self,
        env_config: Any,
        extras: Mapping[str, Any],
        *,
        name: str,
        config: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            name: Of the installed taskset.
            config: Its own settings.
            env: Settings of the environment that plays it, as in verifiers' `env`: its `id` and those of its roles.
        """
        del env_config
        self.check_row(extras)
        self._key = _key(name, config, env, extras.get("max_turns"))
        self._task = _task(self._key, extras["task"])
        self._inversion: Inversion[Any] | None = None
        self._metrics: dict[str, float] = {}
        self.schemas: list[dict[str, Any]] = []
        """What the task's tools are, once it has begun."""

    @staticmethod
    def check_row(row: Mapping[str, Any]) -> None:
        """Raises DataError for a row that does not say which task it is."""
        index = row.get("task")
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise DataError(f"task: must be the index of a task; got {index!r}. Give each row {{'task': 0}}, and so on")

    @staticmethod
    def violations(**arguments: Any) -> Iterator[Violation]:
        """What is wrong with the arguments: no package, no such taskset, or one that cannot be played here."""
        name = arguments["name"]
        try:
            key = _key(name, arguments.get("config"), arguments.get("env"), None)
            if problem := _unplayable(*_environment(key), _task(key, 0)):
                yield Violation.of(f"{SETTING}.name", name, *problem)
        except DataError as error:
            yield Violation.of(f"{SETTING}.name", name, "must be played by one model", str(error))
        except Exception as error:  # whatever a taskset raises while it is imported
            missing = isinstance(error, ImportError) and "'verifiers" in str(error)
            rule = "needs the package verifiers" if missing else "must be an installed taskset"
            remedy = (
                "it wants another release of openai than vLLM: python -m venv V; V/bin/pip install verifiers numpy; then "
                "environment.python=V/bin/python"
                if missing
                else f"{type(error).__name__}: {error}"
            )
            yield Violation.of(f"{SETTING}.name", name, rule, " ".join(remedy.split()))

    async def init(self, prompt: list[ChatMessage]) -> tuple[list[ChatMessage], dict[str, Any]]:
        """The messages of the first request, which are the task's prompt unless the environment opens otherwise."""
        del prompt
        self._inversion = Inversion(self._play)
        first = await self._inversion.begin()
        if isinstance(first, Ended):
            self._scored(first.value)
            raise DataError("the task ended before the model was asked")
        self.schemas = [dict(tool) for tool in first.tools]
        return list(first.messages), {}

    async def step(self, action: str) -> dict[str, Any]:
        """The reward comes at the end. One that verifiers did not compute fails the trajectory: it is no number."""
        return self._said(await self._begun.answer(action))

    async def step_calls(self, action: str, calls: list[Mapping[str, Any]]) -> dict[str, Any]:
        """As `step`, of a response that calls tools: verifiers runs them."""
        return self._said(await self._begun.answer(action, calls))

    async def cut(self) -> dict[str, Any]:
        """Score what there is: the context has no room for an answer."""
        return self._said(await self._begun.refuse())

    async def close(self) -> None:
        if self._inversion is not None:
            await self._inversion.close()

    async def get_metrics(self) -> dict[str, float]:
        return self._metrics

    @property
    def _begun(self) -> Inversion[Any]:
        assert self._inversion is not None
        return self._inversion

    async def _play(self, base_url: str, model: str) -> Any:
        """Return verifiers' episode, with the model's answers from `base_url`."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        environment, _ = _environment(self._key)
        await kept_open(self._key, environment.serving)
        client = EvalClientConfig(base_url=base_url, api_key_var="SKYRL_TRAIN_NO_API_KEY")
        return await environment.run_episode(self._task, ModelContext(model=model, client=client))

    def _said(self, now: ChatRequest | Ended[Any]) -> dict[str, Any]:
        if isinstance(now, ChatRequest):
            return {"observations": list(now.messages), "reward": 0.0, "done": False}
        return {"observations": [], "done": True, **self._scored(now.value)}

    def _scored(self, episode: Any) -> dict[str, Any]:
        """Return the reward of an episode. Raises DataError saying why it has none."""
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            said = f"{errors[-1].type}: {errors[-1].message}" if errors else "it says no reason"
            raise DataError(f"verifiers could not play the task: {said}")
        traces = [trace for trace in episode.traces if trace.agent.name == _environment(self._key)[1]]
        if len(traces) != 1:
            raise DataError(f"the model played {len(traces)} rollouts in an episode; a trajectory is one")
        (trace,) = traces
        if str(trace.stop_condition).endswith("_timeout"):
            raise DataError(f"the task's own time was over ({trace.stop_condition})")
        self._metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        rewards = {name: None if reward is None else reward.value for name, reward in trace.rewards.items()}
        return {"reward": rewards, "truncated": trace.is_truncated}


def _unplayable(environment: Any, role: str, task: Any) -> tuple[str, str] | None:
    """Return the rule that an environment breaks, and what would help; None where it can be played."""
    from verifiers.v1.envs.best_of_n import BestOfNEnv
    from verifiers.v1.envs.single_agent import SingleAgentEnv
    from verifiers.v1.utils.compile import validate_pairing
    from verifiers.v1.utils.loaders import load_harness

    if isinstance(environment, BestOfNEnv):
        return "must be played once in an episode", "generator.n_samples_per_prompt says how often"
    if isinstance(environment, SingleAgentEnv) and task.data.prompt is None:
        return "has tasks without a prompt, which an environment must open", "name that environment: env: {id: NAME}"
    agent = getattr(environment.config, role)
    harness = agent.harness or environment._default_harness
    tools = [*type(environment.taskset).toolsets(environment.taskset.config), *type(task).toolsets(task.config)]
    try:
        validate_pairing(load_harness(harness), type(task), agent.runtime, tools=tools)
    except ValueError as error:
        return "must be one that its harness and its runtime can play", " ".join(str(error).split())
    return None
