from __future__ import annotations

from typing import Any

import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.data.tasks import reasoning_tasks
from skyrl_train.errors import DataError
from skyrl_train.rollout.adapters.reasoning_gym_tasks import ReasoningGymEnvironment, read_answer
from skyrl_train.rollout.envs.environments import environment_violations, uses_processes
from tests.support.fake_reasoning_gym import fake_package

__all__ = ["fake_package"]


@pytest.mark.parametrize(
    ("response", "reading", "wanted", "expected"),
    [
        ("<answer> 7 </answer> or <answer>8</answer>, not 9", "auto", "8", ("8", True)),
        ("1 <answer>it is 1,234.50 now</answer> 2", "auto", "1234.5", ("1234.50", True)),
        ("<answer>red, blue</answer>", "auto", "red", ("red, blue", True)),
        ("3+4=7\n#### 7 apples", "auto", "7", ("7", True)),
        ("so it is 10-3=-7.", "auto", "-7", ("-7", False)),
        ("8-3", "auto", "5", ("3", False)),
        ("first\n last \n\n", "auto", "last", ("last", False)),
        ("no number", "auto", "7", (None, False)),
        ("#### 7", "tags", "7", (None, False)),
        ("<answer>7</answer>", "marked", "7", (None, False)),
        ("<answer>7</answer> 8", "last_number", "7", ("8", True)),
        ("a\nb", "last_line", "b", ("b", True)),
        (" a\nb ", "text", "b", ("a\nb", True)),
        ("", "text", "b", (None, False)),
        ("<answer></answer>", "tags", "b", (None, False)),
    ],
)
def test_an_answer_is_read_as_the_setting_says(response: str, reading: str, wanted: str, expected: object) -> None:
    assert read_answer(response, reading, wanted) == expected


def environment(task: str = "sums", **arguments: Any) -> tuple[ReasoningGymEnvironment, int]:
    """An environment, and the right answer."""
    row = reasoning_tasks._make({"tasks": [task], "sizes": {"train": 1}, "seed": 0})["train"][0]
    return ReasoningGymEnvironment(None, row, **arguments), int(row["answer"])


@pytest.mark.usefixtures("fake_package")
class TestEnvironment:
    def test_the_reward_is_the_packages_score_and_solved_is_exact(self) -> None:
        for off, reward, solved in ((0, 1.0, 1.0), (1, 0.5, 0.0), (2, 0.0, 0.0)):
            env, right = environment()
            step = env.step(f"It is {right + off}")
            assert (step["reward"], step["done"], step["observations"]) == (reward, True, [])
            assert env.get_metrics()["solved"] == solved
            assert env.get_metrics()["score"] == reward

    def test_exact_gives_nothing_for_a_part(self) -> None:
        env, right = environment(exact=True)
        assert env.step(str(right + 1))["reward"] == 0.0
        assert env.get_metrics()["score"] == 0.5

    def test_form_is_rewarded_apart_and_no_part_of_being_right(self) -> None:
        env, right = environment(format_reward=0.5)
        assert env.step(f"<answer>{right + 1}</answer>")["reward"] == 1.0
        assert env.get_metrics() == {"solved": 0, "solved_first_turn": 0, "turns": 1, "score": 0.5, "format": 1}

    def test_the_verdict_is_what_the_model_is_told_until_it_is_right_or_turns_are_used(self) -> None:
        env, right = environment(max_turns=3)
        first, second = env.step(str(right + 1)), env.step("hm")
        assert first["observations"] == [{"role": "user", "content": "Your answer scores 0.50 of 1. Try again."}]
        assert second["observations"] == [{"role": "user", "content": "There is no answer in it. Try again."}]
        assert [first["reward"], first["done"], second["done"]] == [0.0, False, False]
        last = env.step(str(right))
        assert (last["reward"], last["done"]) == (1.0, True)
        assert env.get_metrics()["solved_first_turn"] == 0.0
        assert env.get_metrics()["solved"] == 1.0

    def test_the_last_turn_is_scored_where_the_generator_ends_earlier(self) -> None:
        row = reasoning_tasks._make({"tasks": ["sums"], "sizes": {"train": 1}, "seed": 0})["train"][0]
        env = ReasoningGymEnvironment(None, {**row, "max_turns": 1}, max_turns=3)
        assert env.step(str(int(row["answer"]) + 1))["reward"] == 0.5

    def test_an_episode_goes_on_from_its_state(self) -> None:
        env, right = environment(max_turns=2)
        env.step("0")
        other, _ = environment(max_turns=2)
        other.set_state(env.get_state())
        assert other.step(str(right + 1))["done"]

    def test_a_scorer_that_raises_is_a_failure(self) -> None:
        env, _ = environment(answer="text")
        with pytest.raises(ValueError, match="invalid literal"):
            env.step("four")

    def test_a_score_that_is_no_number_is_a_failure(self) -> None:
        env, _ = environment("not_a_number")
        with pytest.raises(ValueError, match="the scorer of not_a_number gave nan"):
            env.step("4")

    @pytest.mark.parametrize(
        ("argument", "value", "said"),
        [
            ("answer", "tag", "Did you mean 'tags'?"),
            ("max_turns", 0, "1 at least"),
            ("max_turns", True, "1 at least"),
            ("format_reward", float("nan"), "finite"),
            ("exact", "yes", "true or false"),
            ("turns", 2, "is no argument of"),
        ],
    )
    def test_wrong_arguments_are_refused_by_name(self, argument: str, value: object, said: str) -> None:
        (found,) = environment_violations({"_target_": "reasoning_gym", argument: value})
        assert found.field == f"environment.env_class.{argument}"
        assert said in str(found)


def test_rows_of_other_data_are_refused() -> None:
    with pytest.raises(DataError, match="must be what data=reasoning_gym puts there"):
        ReasoningGymEnvironment.check_row({"answer": "7"})


def test_it_runs_in_worker_processes_as_scorers_evaluate_what_the_model_wrote() -> None:
    assert uses_processes(EnvironmentConfig(env_class="reasoning_gym"))


def test_without_the_package_the_environment_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    reasoning_tasks.package.cache_clear()
    monkeypatch.setattr(reasoning_tasks, "PACKAGE", "no-such-package-at-all")
    (found,) = environment_violations("reasoning_gym")
    reasoning_tasks.package.cache_clear()
    assert found.remedy == "pip install reasoning-gym"
