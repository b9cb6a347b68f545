"""Environments of other packages that cannot be used are refused by both commands in one line, before a model loads."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.runs import planning
from skyrl_train.runs.cli.command_line import preflight
from skyrl_train.runs.cli.machine import task_violations

PYTHON = os.environ.get("SKYRL_TRAIN_ADAPTERS_PYTHON", "")
needs_gymnasium = pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="gymnasium is not installed")
MISSING = pytest.param(
    "verifiers:sums",
    [],
    "environment.env_class.name: needs the package verifiers; got 'sums'. It wants another release of openai than vLLM: "
    "python -m venv V; V/bin/pip install verifiers numpy; then environment.python=V/bin/python",
    id="missing package",
    marks=pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed"),
)
UNKNOWN = pytest.param(
    "gymnasium:FrozenLak-v1",
    [],
    "environment.env_class.id: must be an environment that gymnasium can make; got 'FrozenLak-v1'. NameNotFound: ",
    id="unknown ID",
    marks=needs_gymnasium,
)
NO_TEXT = pytest.param(
    "gymnasium:FrozenLake-v1",
    [],
    "environment.env_class.id: must be told in text, and its observations are Discrete(16); got 'FrozenLake-v1'. Add "
    "render: ansi, or describe: my_code:function beside it",
    id="observations that are no text",
    marks=needs_gymnasium,
)
DEAD = pytest.param(
    "openenv:http://127.0.0.1:9",
    [f"environment.python={PYTHON}"],
    "environment.env_class.url: must be a server that begins within 10 s; got 'http://127.0.0.1:9'. Start its server, or "
    "correct the URL (ConnectionError: ",
    id="dead URL",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(
            not PYTHON, reason="set SKYRL_TRAIN_ADAPTERS_PYTHON to an interpreter that has openenv-core"
        ),
    ],
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "further", "line"), [MISSING, UNKNOWN, NO_TEXT, DEAD])
def test_what_cannot_be_used_is_refused_in_one_line(
    name: str, further: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"environment.env_class='{name}'", "data.validation=[]", "platform=cpu", *further]
    with pytest.raises(SystemExit, match="2"):
        preflight(arguments, config_name="config")
    head, *problems = capsys.readouterr().err.strip().splitlines()
    assert (head, len(problems)) == ("1 problem in the configuration:", 1)
    assert problems[0].startswith(f"  - {line}")

    assert planning.main([*arguments, "--format", "json"]) == 2
    (violation,) = json.loads(capsys.readouterr().out)["violations"]
    assert violation["field"] == line.partition(":")[0]
    assert violation["remedy"]


def test_tools_beside_an_environment_that_runs_its_own_are_refused() -> None:
    environment = EnvironmentConfig(env_class="verifiers:sums", tools=("tests.support.tool_cases:add",))
    lines = [str(violation) for violation in task_violations(environment)]
    expected = "environment.env_class: runs its tools by itself and no others; got 'verifiers:sums'."
    assert [line for line in lines if line.startswith(expected)] == [f"{expected} Leave environment.tools empty"]
