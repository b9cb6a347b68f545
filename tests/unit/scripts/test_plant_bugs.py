"""The list of planted bugs is alive, and the script tells a bug that tests notice from one that they do not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def plant() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plant_bugs", ROOT / "scripts" / "plant_bugs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plant_bugs"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small_project(tmp_path: Path) -> Path:
    (tmp_path / "arithmetic.py").write_text("def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_arithmetic.py").write_text(
        "from arithmetic import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
    )
    return tmp_path


def test_every_bug_of_the_list_can_be_planted_in_this_code(plant: ModuleType) -> None:
    bugs = plant.read_bugs()

    assert [problem for bug in bugs if (problem := bug.problem(ROOT))] == []
    assert len(bugs) >= 160


def test_the_page_names_for_every_bug_a_test_that_there_is(plant: ModuleType) -> None:
    recorded = plant.recorded_tests()

    assert set(recorded) == {bug.name for bug in plant.read_bugs()}
    for test in recorded.values():
        path, *names = test.partition("[")[0].split("::")
        assert all(name in (ROOT / path).read_text() for name in names), test


@pytest.mark.slow
def test_those_tests_run_by_default(plant: ModuleType) -> None:
    recorded = set(plant.recorded_tests().values())
    files = sorted({test.partition("::")[0] for test in recorded})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)

    assert recorded - set(done.stdout.splitlines()) == set()


@pytest.mark.slow
def test_a_bug_that_a_test_notices_is_caught_and_taken_out_again(plant: ModuleType, small_project: Path) -> None:
    bug = plant.Bug(
        name="triple", story="x", file="arithmetic.py", old="2 * x", new="3 * x", tests=("tests/test_arithmetic.py",)
    )

    outcome = plant.try_bug(bug, small_project, "")

    assert outcome.test == "tests/test_arithmetic.py::test_double"
    assert "2 * x" in (small_project / "arithmetic.py").read_text()


@pytest.mark.slow
def test_a_bug_that_no_test_notices_is_not_caught(plant: ModuleType, small_project: Path) -> None:
    bug = plant.Bug(
        name="third", story="x", file="arithmetic.py", old="x / 2", new="x / 3", tests=("tests/test_arithmetic.py",)
    )

    outcome = plant.try_bug(bug, small_project, "")

    assert (outcome.test, outcome.note) == ("", "every test passed")


@pytest.mark.slow
def test_code_that_does_not_import_is_no_caught_bug(plant: ModuleType, small_project: Path) -> None:
    bug = plant.Bug(
        name="broken",
        story="x",
        file="arithmetic.py",
        old="def double",
        new="def (",
        tests=("tests/test_arithmetic.py",),
    )

    assert plant.try_bug(bug, small_project, "").test == ""


def test_a_text_that_is_gone_from_its_file_is_named(plant: ModuleType, small_project: Path) -> None:
    bug = plant.Bug(name="gone", story="x", file="arithmetic.py", old="4 * x", new="x", tests=("tests",))

    assert bug.problem(small_project) == "gone: its old text stands 0 times in arithmetic.py, not once"
