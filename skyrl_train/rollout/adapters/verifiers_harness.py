"""The chat loop of verifiers' harness `null`, in the worker process: verifiers starts a program for each turn, by uv.

It asks for answers, calls the tools that it is answered with, and is over at an answer without calls, as `null` is, with
verifiers' own connections to tools. verifiers finds a harness by the name of a module, which `known_harness` makes.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any

from skyrl_train.rollout.adapters.inverted_chat import NO_DEADLINE_S

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
