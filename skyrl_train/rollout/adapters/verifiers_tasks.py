"""Tasks of verifiers 0.4, answered in one turn: `environment.env_class=verifiers:NAME`.

NAME is an installed taskset, as in `verifiers`. A row's column `task` is the index of its task in the taskset's order; the
model is shown the task's own prompt, whatever the row's is, and the task's rewards and judges score its answer. Tasksets
whose tasks are played by programs (tools, containers, several agents) are refused.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from skyrl_train.errors import DataError, Violation
from skyrl_train.types import ChatMessage

SETTING = "environment.env_class"


@functools.cache
def _taskset(name: str, config_json: str) -> Any:
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    return load_taskset(taskset_config_type(name).model_validate({"id": name, **json.loads(config_json)}))


@functools.cache
def _task(name: str, config_json: str, index: int) -> Any:
    for task in islice(_taskset(name, config_json), index, index + 1):
        return task
    raise DataError(f"task: {name} has no task {index}")


class VerifiersTask:
    """One task, and one answer to it."""

    def __init__(
        self, env_config: Any, extras: Mapping[str, Any], *, name: str, config: Mapping[str, Any] | None = None
    ) -> None:
        """
        Args:
            name: Of the installed taskset.
            config: Its own settings.
        """
        del env_config
        self.check_row(extras)
        self._task = _task(name, json.dumps(dict(config or {})), extras["task"])

    @staticmethod
    def check_row(row: Mapping[str, Any]) -> None:
        """Raises DataError for a row that does not say which task it is."""
        index = row.get("task")
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise DataError(f"task: must be the index of a task; got {index!r}. Give each row {{'task': 0}}, and so on")

    @staticmethod
    def violations(**arguments: Any) -> Iterator[Violation]:
        """What is wrong with the arguments: no package, no such taskset, or one whose tasks take more than an answer."""
        name, config = arguments["name"], json.dumps(dict(arguments.get("config") or {}))
        try:
            from verifiers.v1.envs.single_agent import SingleAgentEnv
            from verifiers.v1.utils.loaders import environment_class

            taskset, task = _taskset(name, config), _task(name, config, 0)
            tools = [*type(taskset).toolsets(taskset.config), *type(task).toolsets(task.config)]
            if tools or task.NEEDS_CONTAINER or environment_class(name) is not SingleAgentEnv:
                rule = (
                    "must have tasks that one answer completes, without tools, a container or an environment of its own"
                )
                yield Violation.of(f"{SETTING}.name", name, rule, "such a taskset needs verifiers' own programs")
        except Exception as error:  # whatever a taskset raises while it is imported
            missing = isinstance(error, ImportError) and "'verifiers" in str(error)
            rule = "needs the package verifiers" if missing else "must be an installed taskset"
            remedy = (
                "its pins do not go with vLLM's: python -m venv V; V/bin/pip install verifiers numpy; then "
                "environment.python=V/bin/python"
                if missing
                else f"{type(error).__name__}: {error}"
            )
            yield Violation.of(f"{SETTING}.name", name, rule, " ".join(remedy.split()))

    async def init(self, prompt: list[ChatMessage]) -> tuple[list[ChatMessage], dict[str, Any]]:
        """The task's prompt."""
        data = self._task.data
        own = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        if isinstance(data.prompt, str):
            return [*own, {"role": "user", "content": data.prompt}], {}
        given = [message.model_dump(mode="json", exclude_none=True) for message in data.prompt or ()]
        return [*own, *given] if given or own else prompt, {}

    async def step(self, action: str) -> dict[str, Any]:
        """Score the answer. A reward that verifiers did not compute fails the trajectory: it is no number."""
        from verifiers.v1 import AgentConfig, AgentInfo, AssistantMessage, MessageNode, Trace, TraceTask, UserMessage

        task = self._task
        record = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        trace: Any = Trace(task=record, agent=AgentInfo(config=AgentConfig()))
        trace.nodes.append(MessageNode(message=UserMessage(content=task.data.prompt_text)))
        trace.nodes.append(MessageNode(parent=0, sampled=True, message=AssistantMessage(content=action)))
        await task.score(trace)
        self._metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        rewards = {name: None if reward is None else reward.value for name, reward in trace.rewards.items()}
        return {"observations": [], "reward": rewards, "done": True}

    async def get_metrics(self) -> dict[str, float]:
        return getattr(self, "_metrics", {})
