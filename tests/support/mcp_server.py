"""A server of the Model Context Protocol over standard input and output, for tests: `python tests/support/mcp_server.py`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

PICTURE = Path(__file__).parents[2] / "docs/images/viewer_phone.png"

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


@server.tool(structured_output=False)
def picture() -> list[Any]:
    """Shows a picture."""
    return ["look", Image(path=PICTURE)]


if __name__ == "__main__":
    server.run("stdio")
