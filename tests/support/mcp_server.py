"""A server of the Model Context Protocol over standard input and output, for tests: `python tests/support/mcp_server.py`."""

from __future__ import annotations

import os
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("numbers")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


@server.tool()
def refuse() -> str:
    """Raises."""
    raise ToolError("not today")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def sleep(seconds: float) -> str:
    """Answers late."""
    time.sleep(seconds)
    return "awake"


if __name__ == "__main__":
    server.run("stdio")
