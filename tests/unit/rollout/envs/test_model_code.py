"""skyrl-gym's tools that run what the model wrote, in a sandbox."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.rollout.envs import model_code
from skyrl_train.rollout.envs.environments import make_environment
from skyrl_train.system.sandbox import sandbox

ROW = {"reward_spec": {"ground_truth": "4"}, "max_turns": 3}
SQL_ROW = {"db_id": "pets", "data": "spider", "max_turns": 9, "reward_spec": {"ground_truth": "select name from pets"}}


def let_all_read(folder: Path) -> None:
    """A sandbox that root starts has another user, where that user can read the interpreter."""
    for each in (folder, *folder.parents):
        if each == Path(tempfile.gettempdir()):
            break
        each.chmod(0o755)


@pytest.fixture(autouse=True)
def need_namespaces() -> None:
    if (why := sandbox.violations("required", "a test")) and not os.environ.get("CI"):
        pytest.skip(str(why[0]))


def observed(environment: Any, action: str) -> str:
    return str(environment.step(action)["observations"][0]["content"])


def test_the_python_tool_of_searchcode_sees_neither_variables_nor_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    victim = tmp_path / "weights"
    victim.write_text("s3cret")
    environment = make_environment("searchcode", ROW)
    code = f"import os\nprint(6 * 7, os.environ.get('WANDB_API_KEY'))\nos.remove({str(victim)!r})"
    said = observed(environment, f"<tool><python>{code}</python></tool>")
    assert said.startswith("Error executing Python code: Traceback")
    assert said.endswith(f"FileNotFoundError: [Errno 2] No such file or directory: {str(victim)!r}")
    assert victim.read_text() == "s3cret"
    code = "import os\nprint(6 * 7, os.environ.get('WANDB_API_KEY'))"
    assert observed(environment, f"<tool><python>{code}</python></tool>") == "42 None"


@pytest.mark.slow
def test_the_python_tool_of_searchcode_ends_at_its_deadline_and_at_its_bound_on_output() -> None:
    tool = model_code._Python("required", 1.0)
    late = "Error executing Python code: Execution timed out after 1.0 seconds."
    assert [tool("while True: pass"), tool("while True: print('x' * 99999)")] == [late, late]


def test_queries_of_text2sql_are_answered_and_write_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "spider" / "database" / "pets"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "pets.sqlite") as connection:
        connection.execute("create table pets (name text, picture blob)")
        connection.execute("insert into pets values ('Rex', x'00ff')")
    connection.close()
    let_all_read(tmp_path)
    before = (folder / "pets.sqlite").read_bytes()
    environment = make_environment({"_target_": "text2sql", "db_path": str(tmp_path)}, SQL_ROW)
    assert "Rex" in observed(environment, "<sql>select * from pets</sql>")
    for query in (f"attach '{tmp_path}/new.sqlite' as new", f"vacuum into '{tmp_path}/new.sqlite'", "delete from pets"):
        observed(environment, f"<sql>{query}</sql>")
    assert (folder / "pets.sqlite").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["spider"]
    environment = make_environment({"_target_": "text2sql", "db_path": str(tmp_path)}, SQL_ROW)
    answer = environment.step("<think>x</think><solution>select name from pets where 1</solution>")
    assert answer["reward"] == 1.0


def test_a_query_whose_sandbox_does_not_start_is_a_failure_and_no_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "spider" / "database" / "pets"
    folder.mkdir(parents=True)
    (folder / "pets.sqlite").touch()
    let_all_read(tmp_path)
    environment = make_environment({"_target_": "text2sql", "db_path": str(tmp_path)}, SQL_ROW)

    def refused(*_: object, **__: object) -> sandbox.Ran:
        raise OSError("a sandbox did not start, or not within 10 s")

    with monkeypatch.context() as patched:
        patched.setattr(model_code, "run", refused)
        with pytest.raises(OSError, match="did not start"):
            environment.step("<think>x</think><solution>select name from pets</solution>")
    environment = make_environment({"_target_": "text2sql", "db_path": str(tmp_path)}, SQL_ROW)
    assert environment.step("<think>x</think><solution>select nothing</solution>")["done"]


def test_lcb_is_refused_where_a_sandbox_is_required() -> None:
    with pytest.raises(sandbox.SandboxUnavailable, match="interpreter"):
        make_environment("lcb", {"reward_spec": {"ground_truth": "[]"}})
    (violation,) = model_code.violations(EnvironmentConfig(env_class="lcb"))
    assert "environment.reward=code" in violation.remedy
    assert model_code.violations(EnvironmentConfig(env_class="lcb", sandbox="off")) == []
    (line,) = model_code.sandbox_lines(EnvironmentConfig(env_class="lcb", sandbox="best"))
    assert line.startswith("best, but none for lcb")
