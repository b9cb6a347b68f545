"""Task folders of Harbor: as rows, played in the sandbox, scored by their own tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tomllib", reason="Python 3.10 has no parser for TOML")

from skyrl_train.errors import DataError
from skyrl_train.rollout.adapters.harbor_tasks import HarborTask, read_tasks
from skyrl_train.system.sandbox import violations

SUM = "python3 -c 'print(sum(map(int, open(\"numbers.txt\"))))' > sum.txt"
TESTS = """[ "$(cat /app/sum.txt)" = 6 ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""


@pytest.fixture
def sandboxed() -> None:
    if (why := violations("required", "a test")) and not os.environ.get("CI"):
        pytest.skip(f"no sandbox can be made here: {why[0].rule}")


def task(folder: Path, *, dockerfile: str = "FROM ubuntu:24.04\nCOPY numbers.txt /app/\n", tests: str = TESTS) -> Path:
    for name in ("environment", "tests", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(
        'version = "1.0"\n[verifier]\ntimeout_sec = 20.0\n[environment]\nmemory_mb = 512\n'
    )
    (folder / "instruction.md").write_text("Write the sum of numbers.txt to sum.txt.\n")
    (folder / "environment/Dockerfile").write_text(dockerfile)
    (folder / "environment/numbers.txt").write_text("1\n2\n3\n")
    (folder / "tests/test.sh").write_text(tests)
    (folder / "solution/solve.sh").write_text(SUM)
    return folder


def opened(folder: Path, **arguments: Any) -> HarborTask:
    (row,) = read_tasks(str(folder))
    return HarborTask(env_config=None, extras=row, **arguments)


def test_each_folder_is_a_row_whose_prompt_is_its_instruction(tmp_path: Path) -> None:
    for name in ("b", "a"):
        task(tmp_path / name)
    rows = list(read_tasks(str(tmp_path)))
    assert [row["uid"] for row in rows] == ["a", "b"]
    assert rows[0]["prompt"] == [{"role": "user", "content": "Write the sum of numbers.txt to sum.txt.\n"}]
    assert rows[0]["harbor"]["timeout_s"] == 20.0
    assert rows[0]["harbor"]["copies"] == [("numbers.txt", "/app/")]


def test_variables_are_set_in_both_forms_of_a_dockerfile(tmp_path: Path) -> None:
    lines = "FROM ubuntu\nENV A=1 B='two words'\nENV GREETING hello  world=wide\nENV ALONE\n"
    (row,) = read_tasks(str(task(tmp_path, dockerfile=lines)))
    assert row["harbor"]["variables"] == {"A": "1", "B": "two words", "GREETING": "hello  world=wide", "ALONE": ""}


def test_what_needs_a_container_is_refused_by_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="RUN apt-get install -y gcc` needs a container"):
        list(read_tasks(str(task(tmp_path / "built", dockerfile="FROM ubuntu\nRUN apt-get install -y gcc\n"))))
    with pytest.raises(DataError, match="/etc/x is a place of the system"):
        list(read_tasks(str(task(tmp_path / "system", dockerfile="FROM ubuntu\nCOPY numbers.txt /etc/x\n"))))
    with pytest.raises(DataError, match="no task of Harbor"):
        list(read_tasks(str(tmp_path / "nowhere")))


@pytest.mark.usefixtures("sandboxed")
def test_the_solution_solves_the_task_and_doing_nothing_does_not(tmp_path: Path) -> None:
    folder = task(tmp_path / "sum")
    solved = opened(folder)
    assert solved.bash("pwd; ls") == "/tmp/app\nnumbers.txt\n"
    solved.bash((folder / "solution/solve.sh").read_text())
    assert solved.bash("cat sum.txt /app/sum.txt") == "6\n6\n", "files stay from one command to the next"
    assert solved.step("done") == {"observations": [], "reward": 1.0, "done": True, "metadata": {}}
    assert solved.get_metrics() == {"commands": 3.0}
    assert opened(folder).step("done")["reward"] == 0.0


@pytest.mark.usefixtures("sandboxed")
def test_a_command_that_takes_too_long_is_ended_and_what_it_wrote_stays(tmp_path: Path) -> None:
    slow = opened(task(tmp_path / "slow"), command_timeout_s=1.0)
    assert slow.bash("echo one > one.txt; echo begun; sleep 60") == "begun\n\n(ended after 1 s)"
    assert slow.bash("cat one.txt") == "one\n"


@pytest.mark.usefixtures("sandboxed")
def test_tests_and_this_machine_are_out_of_reach(tmp_path: Path) -> None:
    hidden = opened(task(tmp_path / "hidden"))
    assert hidden.bash("ls /tests") == "(no output, status 0)"
    assert "No such file" in hidden.bash(f"cat {tmp_path}/hidden/tests/test.sh")
    assert "Read-only" in hidden.bash("touch /usr/x")


@pytest.mark.usefixtures("sandboxed")
def test_several_numbers_have_one_that_is_the_reward_and_none_is_a_failure(tmp_path: Path) -> None:
    both = 'echo \'{"reward": 0.5, "style": 1}\' > /logs/verifier/reward.json\n'
    scored = opened(task(tmp_path / "both", tests=both))
    assert scored.step("")["reward"] == 0.5
    assert scored.get_metrics() == {"commands": 0.0, "style": 1.0}
    with pytest.raises(ValueError, match=r"wrote no reward: .*uv: command not found"):
        opened(task(tmp_path / "none", tests="uv run pytest\n")).step("")
