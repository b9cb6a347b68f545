"""docs/tools.md and the examples with tools do what they say."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.rollout.tools import Toolbox, tool_schemas
from tests.support import warm_python

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, output: Path) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    done = warm_python.run(*arguments, "--output", str(output), folder=ROOT, environment={"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def use(toolbox: Toolbox, name: str, **arguments: Any) -> tuple[str, bool]:
    (result,) = asyncio.run(toolbox.run([{"name": name, "arguments": arguments}]))
    return result["content"], result["failed"]


def test_the_code_of_the_guide_is_what_it_says() -> None:
    text = (ROOT / "docs" / "tools.md").read_text()
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        exec(code, names)
    library = names["Library"](None, {"books": ["Moby Dick", "Dune"], "answer": "Dune"})
    toolbox = Toolbox([], library)
    assert [schema["function"]["name"] for schema in toolbox.own_schemas] == ["find"]
    assert use(toolbox, "find", word="Du") == ('["Dune"]', False)
    assert names["calculator"](expression="2 + 3") == "5"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.mark.slow
@pytest.mark.usefixtures("examples")
def test_the_sandbox_runs_programs_within_limits() -> None:
    specs = ["tools:calculator", "tools:python"]
    assert [schema["function"]["name"] for schema in tool_schemas(specs)] == ["calculator", "python"]
    toolbox = Toolbox(specs)
    assert use(toolbox, "calculator", expression="7*8+1") == ("57", False)
    assert use(toolbox, "calculator", expression="open('x')")[1]
    assert use(toolbox, "python", code="import os; print(6 * 7, os.listdir(), len(os.environ) < 3)") == (
        "42 [] True\n",
        False,
    )
    assert "ZeroDivisionError" in use(toolbox, "python", code="1 / 0")[0]
    assert "MemoryError" in use(toolbox, "python", code="x = bytearray(1 << 30)")[0]
    assert use(toolbox, "python", code="while True: pass")[1]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_calculator_example_trains(tmp_path: Path) -> None:
    run("examples/tools.py", "--warm-up-steps", "2", "--steps", "2", output=tmp_path)
    metrics = [json.loads(line) for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert {"tools/calls", "tools/failed", "tools/malformed"} <= set().union(*metrics)


@pytest.mark.slow
def test_the_sql_example_trains_on_the_tokens_of_its_script(tmp_path: Path) -> None:
    said = run("-m", "sql_agent", "--steps", "2", output=tmp_path)
    assert "trained tokens are the sampled ones, rewards are the script's" in said
