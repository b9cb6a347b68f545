"""Code of the user's own: parts in files, and the line of it that an error is from."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.door import load_config
from skyrl_train.errors import ConfigError
from skyrl_train.registry import absolute_target, code_digests, import_attr, module_of_file, own_line
from skyrl_train.rollout.boundary import EnvironmentFailed, describe, read_answer
from skyrl_train.rollout.hosts import LocalWorkers, ProcessEnvironments, ThreadEnvironments

CODE = """\
import json
from pathlib import Path


def score(completion, answer):
    row = {"answer": answer}
    return float(row["answr"] in completion)


def in_a_library(completion):
    return json.loads(completion)


class Judge:
    async def __call__(self, completion):
        raise ValueError("unknown city")
"""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    module_of_file.cache_clear()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the user stands, with their file in it."""
    (tmp_path / "my_scores.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def raised(target: str, *arguments: object) -> BaseException:
    """What calling a part of the user's file raises."""
    part = import_attr(absolute_target(target), field="environment.reward")
    try:
        result = part() if isinstance(part, type) else part
        result = result(*arguments)  # type: ignore[operator]
        asyncio.run(result)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("target", "arguments", "text"),
    [
        (
            "my_scores.py:score",
            ("4", "4"),
            "KeyError: 'answr' at my_scores.py:7 in score: return float(row[\"answr\"] in completion)",
        ),
        (
            "my_scores.py:in_a_library",
            ("",),
            "JSONDecodeError: Expecting value: line 1 column 1 (char 0) at my_scores.py:11 in in_a_library: "
            "return json.loads(completion)",
        ),
        (
            "my_scores.py:Judge",
            ("4",),
            'ValueError: unknown city at my_scores.py:16 in Judge.__call__: raise ValueError("unknown city")',
        ),
    ],
)
@pytest.mark.usefixtures("here")
def test_an_error_names_the_innermost_line_of_the_users_own(
    target: str, arguments: tuple[object, ...], text: str
) -> None:
    assert describe(raised(target, *arguments)) == text


def test_an_error_of_a_library_alone_names_no_line_and_a_long_text_does_not_push_it_out(here: Path) -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("")
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr]
    assert own_line(caught.value) == ""
    error = raised("my_scores.py:score", "4", "4")
    error.args = ("x" * 1000,)
    assert len(describe(error)) == 500
    assert describe(error).endswith(' at my_scores.py:7 in score: return float(row["answr"] in completion)')


def test_a_part_in_a_file_is_recorded_by_its_absolute_path_and_found_from_elsewhere(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(
        {"environment": {"reward": "my_scores.py:score", "rewards": [{"_target_": "~/x.py:a", "b": 1}]}}
    )
    assert config.environment.reward == f"{here}/my_scores.py:score"
    assert config.environment.rewards == ({"_target_": f"{Path.home()}/x.py:a", "b": 1},)
    monkeypatch.chdir("/")
    score = import_attr(str(config.environment.reward), field="environment.reward")
    assert getattr(score, "__module__", "") == "my_scores"
    assert import_attr(str(config.environment.reward), field="environment.reward") is score


def test_two_files_of_one_name_are_two_modules_and_each_imports_from_its_folder(here: Path) -> None:
    other = here / "other"
    other.mkdir()
    (other / "beside_scores.py").write_text("WORTH = 3.0\n")
    (other / "my_scores.py").write_text("from beside_scores import WORTH\n\ndef score(completion):\n    return WORTH\n")
    first = import_attr(f"{here}/my_scores.py:score", field="x")
    second = import_attr(f"{other}/my_scores.py:score", field="x")
    assert first is not second
    assert second("") == 3.0  # type: ignore[operator]


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("my_scores.py:scor", "/my_scores.py. Did you mean 'score'?"),
        ("my_scores.py:Judge.zzz", "There is no 'zzz' in Judge"),
        ("my_scores.py:zzz", "/my_scores.py. It has Judge, Path, in_a_library, json, score"),
        ("my_score.py:score", "FileNotFoundError: there is no file"),
        ("my_scores:score", "There is a file of that name here: write my_scores.py:NAME"),
        ("no_such_module:score", "Is the package installed, or its folder on PYTHONPATH?"),
        ("breaks.py:score", "ZeroDivisionError: division by zero at breaks.py:1 in <module>: RATE = 1 / 0"),
        ("needs.py:score", "No module named 'not_there' at needs.py:1 in <module>: import not_there"),
    ],
)
def test_a_name_that_is_not_there_gets_the_nearest(
    here: Path, target: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", ".", str(here))])
    (here / "breaks.py").write_text("RATE = 1 / 0\n")
    (here / "needs.py").write_text("import not_there\n")
    with pytest.raises(ConfigError) as caught:
        import_attr(absolute_target(target), field="environment.reward")
    assert problem in str(caught.value)


def test_the_digest_is_that_of_the_code_that_the_run_began_with(here: Path) -> None:
    target = absolute_target("my_scores.py:score")
    settings = {"environment.reward": {"_target_": target}, "environment.rewards": [target, "exact_match"]}
    then = code_digests(settings)
    assert list(then) == [f"{here}/my_scores.py"]
    (here / "my_scores.py").write_text("score = len\n")
    assert code_digests(settings) == then
    absolute_target("my_scores.py:score")  # as the next run does
    assert code_digests(settings) != then


def test_a_breakpoint_of_a_thread_has_the_terminal_alone_and_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    lock = threading.Lock()

    def stop_here(*_: object) -> None:
        """Stands for pdb: a person who takes longer than the deadline of the call."""
        assert lock.acquire(blocking=False), "two calls had the terminal at once"
        threading.Event().wait(0.15)
        events.append("continued")
        lock.release()

    monkeypatch.setattr("pdb.Pdb.set_trace", stop_here)
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    monkeypatch.setattr("skyrl_train.rollout.hosts.threads.at_breakpoint", [lambda: events.append("bars left")])
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)

    def debugged() -> int:
        breakpoint()
        return 1

    async def both() -> list[int]:
        threads = ThreadEnvironments(num_workers=None, timeout_s=0.1)
        try:
            return await asyncio.gather(*(threads.call(debugged, what="score") for _ in range(2)))
        finally:
            await threads.aclose()

    assert asyncio.run(both()) == [1, 1]
    assert events == ["bars left", "continued", "bars left", "continued"]


@pytest.mark.slow
def test_a_breakpoint_in_a_worker_process_says_which_setting_makes_it_work(here: Path) -> None:
    (here / "stops.py").write_text("def score(completion):\n    breakpoint()\n    return 1.0\n")
    assert os.environ.get("PYTHONBREAKPOINT") is None
    environment = EnvironmentConfig(env_class="single_turn", reward=absolute_target("stops.py:score"))

    async def ask() -> object:
        workers = LocalWorkers.of(environment)
        hosts = ProcessEnvironments(workers, num_workers=1, timeout_s=60.0)
        handle = hosts.host("score")
        request = {"call": "score", "spec": environment.reward, "prompt": {"prompt": []}, "num_values": None}
        sample = {"completion": "4", "completion_messages": []}
        try:
            return read_answer(await handle.ask({**request, "samples": [sample]}), source="score")
        except EnvironmentFailed as broken:
            return broken.message
        finally:
            handle.release()
            await hosts.aclose()

    said = str(asyncio.run(ask()))
    assert "BdbQuit: breakpoint() needs the terminal of the trainer's process: set environment.isolation=thread" in said
    assert "stops.py:" in said
