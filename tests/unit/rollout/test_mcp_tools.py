"""Tools of a real server of the Model Context Protocol, and of servers that are dead or silent."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.errors import ConfigError
from skyrl_train.registry import PartSpec
from skyrl_train.rollout.generator import most_workers
from skyrl_train.rollout.tools.mcp import McpServer, _close_all
from skyrl_train.rollout.tools.toolbox import Toolbox, ToolUnavailable, tool_schemas

PICTURE = Path(__file__).parents[3] / "docs/images/viewer_phone.png"
SERVER = [sys.executable, str(Path(__file__).parents[2] / "support" / "mcp_server.py")]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    _close_all()
    ends = time.monotonic() + 20.0  # of a server that was given up nobody waits for the end
    while left := [thread for thread in threading.enumerate() if thread.name.startswith("mcp ")]:
        assert time.monotonic() < ends, left
        time.sleep(0.05)


def mcp(**settings: Any) -> PartSpec:
    return {"_target_": "mcp", **settings}


def use(toolbox: Toolbox, name: str, **arguments: Any) -> tuple[str, bool]:
    (result,) = asyncio.run(toolbox.run([{"name": name, "arguments": arguments}]))
    return result["content"], result["failed"]


@pytest.mark.slow
def test_a_server_is_called_told_of_its_errors_and_started_again_when_it_ends() -> None:
    toolbox = Toolbox([mcp(command=SERVER, timeout_s=60.0)])
    schemas = {schema["function"]["name"]: schema["function"] for schema in toolbox.schemas()}
    assert list(schemas) == ["multiply", "refuse", "die", "sleep", "picture"]
    assert schemas["multiply"]["description"] == "Multiplies two numbers."
    assert schemas["multiply"]["parameters"]["required"] == ["a", "b"]
    assert use(toolbox, "multiply", a=6, b=7) == ("42", False)
    text, failed = use(toolbox, "refuse")
    assert ("not today" in text, failed) == (True, True)
    text, failed = use(toolbox, "multiply", a="six", b=7)
    assert (text.startswith("Error: "), failed) == (True, True)
    with pytest.raises(ToolUnavailable, match="has ended"):
        use(toolbox, "die")
    assert use(toolbox, "multiply", a=2, b=3) == ("6", False)
    # The same connection, with less patience.
    impatient = Toolbox([mcp(command=SERVER, timeout_s=0.5, only=["sleep"])])
    assert [schema["function"]["name"] for schema in impatient.schemas()] == ["sleep"]
    with pytest.raises(ToolUnavailable, match=r"did not answer sleep within 0.5 s"):
        use(impatient, "sleep", seconds=30)
    with pytest.raises(ConfigError, match=r"only: must be tools of .* It has multiply, refuse, die, sleep"):
        Toolbox([mcp(command=SERVER, timeout_s=60.0, only=["divide"])])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"command": [sys.executable, "-c", "raise SystemExit(3)"]}, "must be a server that answers"),
        ({"command": [sys.executable, "-c", "import time; time.sleep(60)"], "timeout_s": 1.0}, "within 1 s"),
        ({"command": ["/no/such/program"]}, "No such file or directory"),
        ({"url": "http://127.0.0.1:9/mcp", "timeout_s": 5.0}, "must be a server that answers"),
        ({}, "needs either a command or a url"),
        ({"commmand": ["x"]}, "Did you mean 'command'"),
    ],
)
def test_a_server_that_does_not_answer_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        tool_schemas([mcp(**settings)])


def test_what_a_server_wrote_before_it_died_is_in_the_refusal_without_secrets(
    capfd: pytest.CaptureFixture[str],
) -> None:
    program = """
import sys
for line in range(9):
    print("line", line, file=sys.stderr)
print("no such file: tools.toml; api_key=tangerine-77-lime and quince-88-fig", file=sys.stderr)
raise SystemExit(3)
"""
    server = mcp(command=[sys.executable, "-c", program], env={"FRUIT_TOKEN": "quince-88-fig"}, timeout_s=60.0)
    with pytest.raises(ConfigError) as error:
        tool_schemas([server])
    (violation,) = error.value.violations
    told = "line 5 | line 6 | line 7 | line 8 | no such file: tools.toml; api_key=<redacted> and <redacted>"
    assert violation.remedy.endswith(f"; it wrote: {told}")
    written = capfd.readouterr().err
    assert "line 0\n" in written
    assert "tangerine" not in written + violation.remedy


FLOODS = {
    "standard error": ("sys.stderr.write('x' * 1000)", r"within 3 s; it wrote: x{500}"),
    "standard output": (
        "print('api_key=quince-88-fig hello', number)",
        "were no messages: 'api_key=<redacted> hello 0'",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("stream", FLOODS)
def test_a_server_that_floods_is_ended_at_its_deadline_and_quoted_once(
    stream: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    write, told = FLOODS[stream]
    program = f"import sys\nfor number in range(1 << 40): {write}"
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=told):
        tool_schemas([mcp(command=[sys.executable, "-c", program], timeout_s=3.0)])
    assert time.monotonic() - begin < 20.0
    assert len(caplog.messages) == (stream == "standard output")
    assert "Traceback" not in caplog.text + capfd.readouterr().err


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"pip install 'mcp[<>]"):
        tool_schemas([mcp(command=[sys.executable, "-c", json.dumps("no package")])])


def test_servers_that_workers_start_are_not_as_many_as_trajectories() -> None:
    def most(tool: PartSpec, **settings: Any) -> int | None:
        return most_workers(EnvironmentConfig(tools=("my_code:calculator", tool), **settings))

    assert most(mcp(command=SERVER)) == 16
    assert most(mcp(command=SERVER), num_workers=200) == 200
    assert most(mcp(url="http://127.0.0.1:9/mcp")) is None
    assert most("my_code:search") is None


def test_a_server_named_twice_is_one() -> None:
    with pytest.raises(ConfigError, match="needs either"):
        McpServer(command=["x"], url="y")


@pytest.mark.slow
def test_a_picture_of_a_server_is_a_part_of_the_result() -> None:
    toolbox = Toolbox([mcp(command=SERVER, timeout_s=60.0, only=["picture"], env={"OWN": "1"})])
    (result,) = asyncio.run(toolbox.run([{"name": "picture", "arguments": {}}]))
    text, image = result["content"]
    assert (text, result["failed"]) == ({"type": "text", "text": "look"}, False)
    head, _, data = image["image"].partition(",")
    assert (image["type"], head) == ("image", "data:image/png;base64")
    assert base64.b64decode(data) == PICTURE.read_bytes()
