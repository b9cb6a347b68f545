"""Tools that a model may call: Python functions, objects that have some, and servers of the Model Context Protocol.

A tool is a function with type hints and a docstring that describes it and each argument, which together are its schema (as
`transformers.utils.get_json_schema` reads them), or a callable with a `schema` of its own. An entry of `environment.tools`
names a function. With arguments beside it, or as a class, it is called with them, and returns a tool, a list of them, or an
object whose `tools` (an attribute or a method) are some. An environment may have `tools` in the same way.

Tools run where environments run, made for each trajectory. What one raises is told to the model; only `ToolUnavailable`, for
a service that is down, fails the trajectory: its reward would say nothing of the model.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.data.sources import is_image
from skyrl_train.errors import ConfigError, Violation
from skyrl_train.parts import TOOLS
from skyrl_train.registry import PartSpec, argument_violations, import_attr, own_line, split_spec
from skyrl_train.rollout.tools.variables import told_missing

Schema = Mapping[str, Any]
"""`{"type": "function", "function": {"name": ..., "description": ..., "parameters": {JSON schema}}}`."""
_MAX_ERROR_CHARACTERS = 500


class ToolError(Exception):
    """What the model did wrong: told to it without the type of an exception."""


class ToolUnavailable(Exception):
    """What a tool depends on is down: raised by a tool, it fails the trajectory."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """What is called by its name, with arguments by theirs; its result, awaited where it can be, is text or becomes JSON.

    One with images is a part `{"type": "image", "image": "data:image/png;base64,..."}`, or a list of such parts and texts.
    """

    name: str
    call: Any
    setting: str = TOOLS.setting
    """Where it is from, for messages."""

    def schema(self) -> Schema:
        """Return what the model is told of it. Raises ConfigError saying what it lacks.

        Workers need none of configured tools, and so do not import what reads them.
        """
        own = getattr(self.call, "schema", None)
        if isinstance(own, Mapping):
            return own
        from transformers.utils.chat_template_utils import get_json_schema

        try:
            found: Schema = get_json_schema(self.call)
        except Exception as error:  # of any kind: it reads what others wrote
            problem = " ".join(str(error).split())
            rule = "must have a type hint and a description in its docstring for each argument"
            lacks_hint = "type hint" in problem
            advice = "Write a type, as in `city: str`" if lacks_hint else "Write a line under `Args:` for each"
            remedy = f"{problem.rstrip('.')}. {advice}"
            violation = Violation(field=self.setting, rule=rule, value=repr(self.name), remedy=remedy)
            raise ConfigError([violation]) from error
        return found


class Toolbox:
    """The tools of one trajectory."""

    def __init__(
        self, specs: Sequence[PartSpec], environment: object = None, *, max_result_chars: int = 1 << 20
    ) -> None:
        """Raises ConfigError where an entry of `environment.tools`, or `environment.tools` itself, is no tool, or where two
        have one name."""
        self._max_result_chars = max_result_chars
        self._makers: list[object] = []
        chosen = [tool for index, spec in enumerate(specs) for tool in self._make(spec, f"{TOOLS.setting}[{index}]")]
        own = [as_tool(each, type(environment).__name__) for each in _tools_of(environment) or ()]
        self.own_schemas = [tool.schema() for tool in own]
        """Schemas of the environment's own tools."""
        self._chosen = chosen
        self._tools: dict[str, Tool] = {}
        for tool in (*chosen, *own):
            if tool.name in self._tools:
                rule, remedy = "each must have a name of its own", "Rename one of the functions, or leave one out"
                raise ConfigError([Violation(field=tool.setting, rule=rule, value=repr(tool.name), remedy=remedy)])
            self._tools[tool.name] = tool

    def schemas(self) -> list[Schema]:
        """Return the schemas of `environment.tools`. Raises ConfigError where one has none."""
        return [tool.schema() for tool in self._chosen]

    async def run(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return `{"content": text, "failed": bool}` for each call `{"name": ..., "arguments": {...}}`.

        The content of a result with images is a list of texts and images.

        Asynchronous tools run together. Raises ToolUnavailable, and MemoryError.
        """
        return list(await asyncio.gather(*map(self._run_one, calls)))

    def close(self) -> None:
        """Close the objects that tools were made of, those that can be closed."""
        for maker in self._makers:
            close = getattr(maker, "close", None)
            if callable(close):
                close()

    async def _run_one(self, call: Mapping[str, Any]) -> dict[str, Any]:
        try:
            result = self._tools[call["name"]].call(**call["arguments"])
            result = await result if inspect.isawaitable(result) else result
            content = _content(result)
        except (ToolUnavailable, MemoryError):
            raise
        except Exception as error:
            kind = "" if isinstance(error, ToolError) else f"{type(error).__name__}: "
            text = f"Error: {kind}{' '.join(str(error)[:_MAX_ERROR_CHARACTERS].split())}"
            if kind:
                _tell_once(f"tool {call['name']}: {type(error).__name__}{own_line(error)}{told_missing()}")
            return {"content": self._bounded(text), "failed": True}
        if isinstance(content, str):
            return {"content": self._bounded(content), "failed": False}
        parts = [{**each, "text": self._bounded(each["text"])} if "text" in each else each for each in content]
        return {"content": parts, "failed": False}

    def _bounded(self, text: str) -> str:
        text = text.encode("utf-8", "replace").decode()
        most = self._max_result_chars
        return text if len(text) <= most else f"{text[:most]}... ({len(text) - most} more characters)"

    def _make(self, spec: PartSpec, setting: str) -> Iterator[Tool]:
        found = tool_violations(spec, setting)
        if found:
            raise ConfigError(found)
        target, arguments = split_spec(spec)
        made: Any = _part(target, setting)
        if arguments or not inspect.isroutine(made):
            made = made(**arguments)
            self._makers.append(made)
        several = made if isinstance(made, (list, tuple)) else _tools_of(made)
        for each in (made,) if several is None else several:
            yield as_tool(each, target, setting)


@functools.cache
def _tell_once(fault: str) -> None:
    """Print where a tool raised what its model alone is told of: to the terminal, or `environments.log` of processes."""
    sys.stderr.write(f"{fault}\n")


def _content(result: object) -> str | list[dict[str, Any]]:
    """Return a result as a message has it: a text, or texts and images in their order."""
    if isinstance(result, str):
        return result
    parts: list[Any] = list(result) if isinstance(result, (list, tuple)) else [result]
    if not any(map(is_image, parts)):
        return json.dumps(result, ensure_ascii=False, default=str)
    return [
        dict(part) if is_image(part) else {"type": "text", "text": part["text"] if _is_text(part) else _content(part)}
        for part in parts
    ]


def is_content(value: object) -> bool:
    """Whether a value is what a tool's message may hold: a text, or a list of texts and images."""
    return isinstance(value, str) or (
        isinstance(value, list) and all(_is_text(part) or is_image(part) for part in value)
    )


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def as_tool(value: object, owner: str, setting: str = TOOLS.setting) -> Tool:
    """Return a function, or a callable with a schema, as a tool. Raises ConfigError for anything else; `owner` is where it
    is from."""
    schema = getattr(value, "schema", None)
    function = schema.get("function") if isinstance(schema, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else getattr(value, "__name__", None)
    if callable(value) and isinstance(name, str):
        return Tool(name=name, call=value, setting=setting)
    rule = "must give functions, or callables with a schema"
    remedy = 'a schema is {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
    raise ConfigError([Violation(field=setting, rule=rule, value=f"{owner}: {value!r:.80}", remedy=remedy)])


def tool_violations(spec: PartSpec, setting: str) -> list[Violation]:
    """Return what is wrong with an entry of `environment.tools`, before anything is made of it."""
    target, arguments = split_spec(spec)
    try:
        part: Any = _part(target, setting)
    except ConfigError as error:
        return list(error.violations)
    if not callable(part):
        rule, remedy = "must name a function or a class", "Point it at the function itself"
        return [Violation(field=setting, rule=rule, value=f"{target!r} ({type(part).__name__})", remedy=remedy)]
    if inspect.isroutine(part) and not arguments:
        return []
    return list(argument_violations(part, arguments, field=setting, name=target))


@functools.lru_cache(maxsize=8)
def _described(specs_json: str) -> tuple[Schema, ...]:
    toolbox = Toolbox(json.loads(specs_json))
    try:
        return tuple(toolbox.schemas())
    finally:
        toolbox.close()


def tool_schemas(specs: Iterable[PartSpec]) -> tuple[Schema, ...]:
    """Return what the model is told of `environment.tools`. Servers among them are asked, once in a process.

    Raises ConfigError naming the entry that is no tool, or whose server does not answer.
    """
    return _described(json.dumps([each if isinstance(each, str) else dict(each) for each in specs]))


def starts_servers(specs: Iterable[PartSpec]) -> bool:
    """Whether `environment.tools` has servers that every process starts for itself."""
    return any(target == "mcp" and arguments.get("command") for target, arguments in map(split_spec, specs))


def _part(target: str, setting: str) -> object:
    return import_attr(TOOLS.builtins[target].target if target in TOOLS else target, field=setting)


def _tools_of(owner: object) -> Sequence[object] | None:
    """Return the `tools` of an object; None where it has none."""
    tools = getattr(owner, "tools", None)
    return tools() if callable(tools) else tools
