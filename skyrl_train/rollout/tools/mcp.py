"""Tools of a server of the Model Context Protocol: `{_target_: mcp, command: [PROGRAM, ARGUMENT, ...]}`, or `url`.

The official client (the extra `mcp`) runs on a thread of its own in each process that uses the server, one connection a
process: trajectories that share a worker share the server, and what it remembers. A server that is started by its command
ends with that process. One that ends, or does not answer in time, fails the trajectory that asked, and is started again for
the next one: its silence says nothing of the model.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import importlib
import json
import logging
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from skyrl_train.errors import ConfigError, Violation, counted
from skyrl_train.rollout.tools.toolbox import Schema, ToolError, ToolUnavailable
from skyrl_train.system import install_command
from skyrl_train.system.files import shown
from skyrl_train.telemetry.logs import copy_redacted, learn_secrets, redact_text

with contextlib.suppress(ImportError):  # here, so that workers are forked from a process that has imported it
    importlib.import_module("mcp")

_FIELD = "environment.tools"
_CLOSE_TIMEOUT_S = 5.0
_LAST_LINES_TIMEOUT_S = 1.0
"""Within which what a server wrote is read to its end; a process that it started may hold the pipe for longer."""
_LAST_LINES, _LAST_CHARACTERS, _KEPT_BYTES = 5, 500, 4096
"""What a message has of it."""
logger = logging.getLogger(__name__)
_CLIENT_LOG = logging.getLogger("mcp.client.stdio")


class McpServer:
    """A server, as an entry of `environment.tools`."""

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        url: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 30.0,
        only: Sequence[str] = (),
    ) -> None:
        """
        Args:
            command: A program that speaks the protocol over its standard input and output, and its arguments.
            url: Where a server is that is running already (Streamable HTTP).
            env: Environment variables of the program beside PATH, HOME and the like, which are all that it is given.
            cwd: The folder that it runs in.
            timeout_s: Deadline of its start, and of each call; keep it below `environment.step_timeout_s`.
            only: Names of its tools to offer; all by default.

        Raises ConfigError where not exactly one of `command` and `url` is given.
        """
        if bool(command) == bool(url):
            rule, remedy = "needs either a command or a url", "write {_target_: mcp, command: [PROGRAM, ARGUMENT]}"
            raise ConfigError([Violation(field=_FIELD, rule=rule, value="mcp", remedy=remedy)])
        self._settings = {"command": list(command), "url": url, "env": dict(env or {}), "cwd": cwd}
        self._name = url or " ".join(command)
        self._timeout_s, self._only = timeout_s, tuple(only)

    def tools(self) -> list[_RemoteTool]:
        """Return the server's tools; it is started where this process has not done so. Raises ConfigError where it does not
        answer."""
        tools = [_RemoteTool(self, schema) for schema in self.connection().schemas]
        names = [tool.schema["function"]["name"] for tool in tools]
        if missing := [name for name in self._only if name not in names]:
            rule, remedy = f"must be tools of {self._name}", f"it has {', '.join(names) or 'none'}"
            raise ConfigError([Violation(field=f"{_FIELD}.only", rule=rule, value=", ".join(missing), remedy=remedy)])
        return [tool for tool, name in zip(tools, names) if not self._only or name in self._only]

    def connection(self) -> _Connection:
        """Return this process's connection. Raises ConfigError where the server does not answer."""
        key = json.dumps(self._settings, sort_keys=True)
        with _LOCK:
            if key not in _CONNECTIONS:
                _CONNECTIONS[key] = _Connection(self._settings, self._name, self._timeout_s)
            return _CONNECTIONS[key]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str | list[dict[str, str]]:
        """Return the text of a tool's result, or its texts and images.

        Raises ToolError with what the server calls an error, ToolUnavailable where it has ended or does not answer.
        """
        try:
            connection = await asyncio.to_thread(self.connection)
        except ConfigError as error:
            raise ToolUnavailable(str(error)) from error
        try:
            result = await connection.call(name, arguments, self._timeout_s)
        except (ToolUnavailable, asyncio.CancelledError):
            with _LOCK:  # the next call starts it again
                for key in [key for key, each in _CONNECTIONS.items() if each is connection]:
                    del _CONNECTIONS[key]
            connection.begin_close()
            raise
        parts = [_part(block) for block in result.content]
        if not result.is_error and any(part["type"] == "image" for part in parts):
            return parts
        texts = [part.get("text", "[image]") for part in parts]
        text = "\n".join(texts) if texts else json.dumps(result.structured_content, default=str)
        if result.is_error:
            raise ToolError(text)
        return text


class _RemoteTool:
    """One tool of a server."""

    def __init__(self, server: McpServer, schema: Schema) -> None:
        self.schema = schema
        self._server = server

    async def __call__(self, **arguments: Any) -> str | list[dict[str, str]]:
        return await self._server.call(self.schema["function"]["name"], arguments)


class _ErrorLog:
    """What a server writes beside the protocol: its standard error is passed on to this process's own (in a worker the log
    of environments) without secrets, with its end kept for messages; other lines of its standard output are counted."""

    def __init__(self) -> None:
        """Opens a pipe, and reads it until every process that writes to it has closed it."""
        self._reader, writer = os.pipe()
        self.file = open(writer, "w")  # noqa: SIM115 - closed once the server has it
        self._end = b""
        self._num_noise, self._first_noise = 0, ""
        self._thread = threading.Thread(target=self._copy, name="mcp stderr", daemon=True)
        self._thread.start()

    def hear(self, thread: int, record: logging.LogRecord) -> bool:
        """Whether the client, on the thread of this server, may log a record. Lines that are no messages are counted."""
        error: Any = (record.exc_info or (None, None))[1]
        if record.thread != thread or not hasattr(error, "errors"):
            return True
        self._num_noise += 1
        if self._num_noise == 1:
            self._first_noise = redact_text(shown(error.errors()[0]["input"]))
            logger.warning(
                "an MCP server prints what is no message, and should be on standard error: %s", self._first_noise
            )
        return False

    def last_lines(self) -> str:
        """Return `; it wrote: ...` with the last lines, redacted, of a server that has ended; empty where it wrote none."""
        self.file.close()
        self._thread.join(_LAST_LINES_TIMEOUT_S)
        lines = [line.strip() for line in self._end.decode(errors="replace").splitlines() if line.strip()]
        text = " | ".join(lines[-_LAST_LINES:])[-_LAST_CHARACTERS:]
        noise = (
            f"; {counted(self._num_noise, 'line')} of its standard output were no messages: {self._first_noise}, ..."
        )
        return (f"; it wrote: {text}" if text else "") + (noise if self._num_noise else "")

    def _copy(self) -> None:
        def write(text: bytes) -> None:
            self._end = (self._end + text)[-_KEPT_BYTES:]
            os.write(2, text)

        copy_redacted(self._reader, write)


class _Connection:
    """A client on a thread of its own, which enters and leaves it in one task."""

    def __init__(self, settings: Mapping[str, Any], name: str, timeout_s: float) -> None:
        """Raises ConfigError where the server does not start, or does not answer within `timeout_s`."""
        self._name = name
        self._client: Any = None
        self._errors = _ErrorLog()
        learn_secrets(settings["env"])
        self._ready: concurrent.futures.Future[list[Schema]] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve(settings))
        self._thread = threading.Thread(target=self._run, name=f"mcp {name}", daemon=True)
        self._thread.start()
        try:
            self.schemas = self._ready.result(timeout_s)
        except BaseException as error:
            self.close()
            if isinstance(error, concurrent.futures.TimeoutError):
                problem = f"it did not answer within {timeout_s:g} s{self._errors.last_lines()}"
            elif isinstance(error, ImportError):
                problem = f"the package mcp is not installed ({error}): {install_command('mcp')}"
            elif isinstance(error, Exception):
                problem = f"{_innermost(error)}{self._errors.last_lines()}"
            else:
                raise
            violation = Violation(field=_FIELD, rule="must be a server that answers", value=name, remedy=problem)
            raise ConfigError([violation]) from None

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        """Return the result of a tool, from whichever loop. Raises ToolError, ToolUnavailable."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        asked = self._begin(self._client.call_tool(name, dict(arguments)))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked), timeout_s)
        except MCPError as error:
            if error.error.code not in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                raise ToolError(error.error.message) from error
            said = await asyncio.to_thread(self._errors.last_lines)
            raise ToolUnavailable(f"the server {self._name} has ended: {error.error.message}{said}") from error
        except asyncio.TimeoutError:
            said = await asyncio.to_thread(self._errors.last_lines)
            raise ToolUnavailable(
                f"the server {self._name} did not answer {name} within {timeout_s:g} s{said}"
            ) from None
        except Exception as error:  # of any kind: that of a stream which the transport has closed
            raise ToolUnavailable(f"the server {self._name}: {_innermost(error)}") from error

    def begin_close(self) -> None:
        """Have the server end, without waiting for it."""
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._serving.cancel)

    def close(self) -> None:
        """End the server, in bounded time."""
        self.begin_close()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _begin(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:
            coroutine.close()
            raise ToolUnavailable(f"the server {self._name} has ended") from error

    def _run(self) -> None:
        hear = functools.partial(self._errors.hear, threading.get_ident())
        _CLIENT_LOG.addFilter(hear)
        try:
            self._loop.run_until_complete(self._serving)
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            _CLIENT_LOG.removeFilter(hear)
            self._errors.file.close()
            self._loop.close()

    async def _serve(self, settings: Mapping[str, Any]) -> None:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        server: Any = settings["url"]
        if not server:
            program, *arguments = settings["command"]
            parameters = StdioServerParameters(
                command=program, args=arguments, env=settings["env"], cwd=settings["cwd"]
            )
            server = stdio_client(parameters, errlog=self._errors.file)
        async with Client(server) as client:
            self._errors.file.close()
            self._client = client
            schemas: list[Schema] = []
            page = await client.list_tools()
            while True:
                for tool in page.tools:
                    about = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                    schemas.append({"type": "function", "function": about})
                if not page.next_cursor:
                    break
                page = await client.list_tools(cursor=page.next_cursor)
            self._ready.set_result(schemas)
            await asyncio.Event().wait()


_LOCK = threading.Lock()
_CONNECTIONS: dict[str, _Connection] = {}


def _close_all() -> None:
    for connection in _CONNECTIONS.values():
        connection.begin_close()
    for connection in _CONNECTIONS.values():
        connection.close()


atexit.register(_close_all)


def _part(block: Any) -> dict[str, str]:
    """Return a block of a result as a part of a message; what is neither text nor image is named."""
    if block.type == "image":
        return {"type": "image", "image": f"data:{block.mime_type};base64,{block.data}"}
    return {"type": "text", "text": block.text if block.type == "text" else f"[{block.type}]"}


def _innermost(error: BaseException) -> str:
    """Say what went wrong, of errors that task groups bundle."""
    while (inner := getattr(error, "exceptions", None)) is not None:
        error = inner[0]
    return f"{type(error).__name__}: {error}"[:500]
