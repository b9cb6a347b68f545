"""The examples of docs/agents.md run."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import warm_python
from tests.support.command_runs import records

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def run(*arguments: str) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    done = warm_python.run(*arguments, folder=ROOT, environment={"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_the_sdk_in_a_loop_trains_on_the_tokens_of_its_script(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    said = run("-m", "agent_openai_sdk", "--steps", "2", "--output", str(tmp_path))
    assert "trained tokens are the sampled ones, rewards are the script's" in said


@pytest.mark.nightly
def test_the_sdk_in_a_loop_trains_the_bundled_model_and_does_the_same_again(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    for name in ("one", "two"):
        run("-m", "agent_openai_sdk", "--engine", "hf", "--steps", "2", "--output", str(tmp_path / name))
    rollouts = [
        [
            record
            for path in sorted((tmp_path / name / "rl" / "rollouts").glob("train_*"))
            for record in records(path.parent, path.name)
        ]
        for name in ("one", "two")
    ]
    assert len(rollouts[0]) == 32
    assert rollouts[0] == rollouts[1]
    assert {each["outcome"] for each in rollouts[0]} == {"done"}


def interpreter(name: str, variable: str, log: Path) -> str:
    """The interpreter that has an example's packages: the one that is named, or in CI one that is made now."""
    if named := os.environ.get(variable):
        return named
    if os.environ.get("CI") != "true":
        pytest.skip(f"set {variable} to what ./scripts/agent_env.sh {name} prints")
    with open(log, "wb") as output:
        words = [str(ROOT / "scripts" / "agent_env.sh"), name]
        process = subprocess.Popen(
            words, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            status = process.wait(300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.skip(f"the packages of {name} were not installed within 300 s")
    told = log.read_text().strip()
    if status != 0:
        pytest.skip(f"the packages of {name} could not be installed: {told[-300:]}")
    return told.splitlines()[-1]


@pytest.mark.parametrize(
    ("example", "name", "variable"),
    [
        pytest.param("agent_graph", "graph", "SKYRL_TRAIN_LANGGRAPH_PYTHON", marks=pytest.mark.nightly),
        pytest.param("agent_mini_swe", "mini_swe", "SKYRL_TRAIN_MINI_SWE_PYTHON", marks=pytest.mark.nightly),
    ],
)
def test_an_agent_of_others_trains_on_the_tokens_of_its_script(
    tmp_path: Path, example: str, name: str, variable: str
) -> None:
    python = interpreter(name, variable, tmp_path / "packages.log")
    said = run("-m", example, "--python", python, "--steps", "2", "--output", str(tmp_path))
    assert "trained tokens are the sampled ones, rewards are the script's" in said
