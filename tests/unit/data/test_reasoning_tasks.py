from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.data import DataConfig, EnvironmentConfig, ReasoningGymConfig
from skyrl_train.config.models import SamplingConfig
from skyrl_train.config.rules import mixed_datasets
from skyrl_train.data.tasks import reasoning_tasks
from skyrl_train.data.tasks.reasoning_tasks import read_tasks, score
from skyrl_train.errors import DataError
from skyrl_train.rollout import checked_prompts
from skyrl_train.trainers.checkpoints import DataFingerprint
from tests.support.fake_reasoning_gym import fake_package, install_fake

__all__ = ["fake_package"]

TRAIN, HELD_OUT = "reasoning_gym:train", "reasoning_gym:validation"
SMALL = {"tasks": ["sums"], "train_size": 3, "validation_size": 0}


def made(tasks: list[Any], train: int = 6, held_out: int = 4, seed: int = 0) -> dict[str, Any]:
    """The rows by split, made in this process."""
    sizes = {"validation": held_out, "train": train}
    return reasoning_tasks._make({"tasks": tasks, "sizes": sizes, "seed": seed})


def sums(largest: int = 9, **others: Any) -> dict[str, Any]:
    return {"_target_": "sums", "largest": largest, **others}


@pytest.mark.usefixtures("fake_package")
class TestRows:
    def test_a_process_of_its_own_makes_the_same_rows_as_this_one(self) -> None:
        here = made(["sums"])
        for location, split in ((TRAIN, "train"), (HELD_OUT, "validation")):
            rows = list(read_tasks(location, tasks=["sums"], train_size=6, validation_size=4))
            assert rows == here[split], split

    def test_a_row_has_question_answer_task_and_what_made_it(self) -> None:
        row = made([sums()], train=1)["train"][0]
        source = row["reasoning_gym"]
        assert row["prompt"].endswith("?")
        assert (row["data_source"], source["task"], source["arguments"]) == (
            "reasoning_gym/sums",
            "sums",
            {"largest": 9},
        )
        assert (source["version"], type(source["seed"])) == ("0.0.1", int)
        assert score(source, row["answer"]) == 1.0

    def test_an_instruction_stands_behind_each_question(self) -> None:
        (row,) = read_tasks(TRAIN, tasks=["sums"], train_size=1, instruction="Be brief.")
        assert row["prompt"].endswith("?\nBe brief.")

    def test_no_question_is_held_out_and_trained_on_and_seeds_differ(self) -> None:
        rows = made([sums(4)], train=9, held_out=5)  # of 16 questions
        questions = [[row["prompt"] for row in rows[split]] for split in ("train", "validation")]
        assert len({*questions[0], *questions[1]}) == 14
        assert max(row["reasoning_gym"]["seed"] for row in rows["train"]) < 2**30
        assert min(row["reasoning_gym"]["seed"] for row in rows["validation"]) >= 2**30

    def test_two_tasks_with_the_same_questions_share_them(self) -> None:
        rows = made([sums(3), {"_target_": "more_sums", "largest": 3}], train=4, held_out=4)
        assert len({row["prompt"] for row in [*rows["train"], *rows["validation"]]}) == 8

    def test_repeated_questions_are_counted_and_told(self, caplog: pytest.LogCaptureFixture) -> None:
        asked = {"tasks": [sums(3)], "train_size": 5, "validation_size": 3}
        assert len(list(read_tasks(TRAIN, **asked))) == len(list(read_tasks(HELD_OUT, **asked))) + 2
        repeated = made([sums(3)], train=5, held_out=3)["repeated"]["sums"]
        assert repeated > 0
        assert [record.getMessage() for record in caplog.records] == [
            f"{repeated} repeated questions of sums left out: rows before had them"
        ]

    def test_more_rows_do_not_change_the_held_out_ones(self) -> None:
        assert made(["sums"], train=2)["validation"] == made(["sums"], train=20)["validation"]

    def test_weights_are_shares_of_the_rows_which_come_in_turn(self) -> None:
        rows = made([sums(50, weight=3), {"_target_": "more_sums", "largest": 50}], train=8, held_out=0)["train"]
        names = [row["reasoning_gym"]["task"] for row in rows]
        assert Counter(names) == {"sums": 6, "more_sums": 2}
        assert Counter(names[:4]) == {"sums": 3, "more_sums": 1}

    def test_other_seeds_make_other_rows(self) -> None:
        assert made([sums(99)], seed=1) != made([sums(99)], seed=2)

    def test_two_entries_of_one_task_are_told_apart_by_their_arguments(self) -> None:
        rows = made([sums(9), sums(99)], train=2, held_out=0)["train"]
        assert {row["data_source"] for row in rows} == {
            "reasoning_gym/sums(largest=9)",
            "reasoning_gym/sums(largest=99)",
        }

    def test_values_that_are_no_literals_are_kept_as_text_where_the_scorer_does_not_need_them(self) -> None:
        row = made(["shares"], train=1)["train"][0]
        assert "'share': '" in row["reasoning_gym"]["entry"]
        assert score(row["reasoning_gym"], row["answer"]) == 1.0


@pytest.mark.usefixtures("fake_package")
class TestRefused:
    @pytest.mark.parametrize(
        ("tasks", "said"),
        [
            ([], "must name a task"),
            (["sum"], "has no task 'sum'; did you mean 'sums'?"),
            ([sums(large=3)], r"tasks\[0\].large: is no argument of sums; did you mean 'largest'?"),
            ([{"_target_": "sums", "seed": 3}], "reasoning_gym.seed is of all tasks together"),
            ([{"_target_": "sums", "size": 3}], "reasoning_gym.train_size is of all tasks together"),
            ([sums(weight=0)], r"tasks\[0\].weight: must be a number greater than 0; got 0"),
            (["sums", "sums"], r"tasks\[1\]: is in the list already"),
            ([sums(-1)], "AssertionError: largest must be positive"),
            ([sums("x")], r"tasks\[0\]: sums fails \(TypeError"),  # type: ignore[arg-type]
            (["needs_solver"], "needs_solver fails .* needs absent_solver, which cannot be imported here"),
            ([sums(2)], "train_size: asks for 6 rows of sums, which gave 0 questions"),
        ],
    )
    def test_what_is_wrong_is_one_line_with_its_setting(self, tasks: list[Any], said: str) -> None:
        with pytest.raises(DataError, match=said) as refused:
            made(tasks)
        assert "\n" not in str(refused.value)

    def test_so_is_it_where_another_process_makes_them(self) -> None:
        with pytest.raises(DataError, match="did you mean 'sums'"):
            list(read_tasks(TRAIN, tasks=["sum"], train_size=1))

    def test_a_task_that_hangs_is_ended_at_the_deadline_which_says_how_far_it_came(self) -> None:
        with pytest.raises(DataError, match=r"timeout_s=2 \(hangs: 2 of 6 train rows\)"):
            list(read_tasks(TRAIN, tasks=[{"_target_": "hangs", "largest": 99}], train_size=6, timeout_s=2))

    def test_an_entry_of_data_is_one_of_two(self) -> None:
        with pytest.raises(DataError, match="must be reasoning_gym:train or reasoning_gym:validation"):
            list(read_tasks("reasoning_gym:test", tasks=["sums"], train_size=1))

    def test_a_missing_module_is_stood_in_for_only_while_the_package_is_imported(self) -> None:
        reasoning_tasks.package()
        assert "absent_solver" not in sys.modules


@pytest.mark.slow
def test_another_version_makes_other_prompts_and_scores_none_of_these(fake_package: Path) -> None:
    settings = ReasoningGymConfig(tasks=("sums",), train_size=3, validation_size=0)
    data = DataConfig(train=(TRAIN,), validation=(), reader="reasoning_gym", reasoning_gym=settings)
    environment = EnvironmentConfig(env_class="reasoning_gym")
    prompts = checked_prompts(data, data.train, 0, environment)
    install_fake(fake_package, version="0.0.2")
    reasoning_tasks._made.cache_clear()
    others = checked_prompts(data, data.train, 0, environment)
    assert [one.messages for one in prompts] == [one.messages for one in others]
    assert DataFingerprint.of(prompts) != DataFingerprint.of(others)
    with pytest.raises(DataError, match=r"pip install reasoning-gym==0\.0\.1"):
        score(prompts[0].extras["reasoning_gym"], "1")


@pytest.mark.usefixtures("fake_package")
def test_an_entry_of_a_mix_has_tasks_of_its_own() -> None:
    entry = {"train": TRAIN, "reader": "reasoning_gym", "reasoning_gym": SMALL}
    entries = (entry, {"name": "words", "train": "builtin:word_problems/train"})
    (own, words), violations = mixed_datasets(DataConfig(mix=entries), EnvironmentConfig(), SamplingConfig())
    assert not violations
    environment = EnvironmentConfig(env_class="reasoning_gym")
    assert len(checked_prompts(own.data, own.data.train, 0, environment)) == 3
    assert words.data.reader_with_settings == "by_name"


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_tasks, "PACKAGE", "no-such-package-at-all")
    with pytest.raises(DataError, match="pip install reasoning-gym"):
        reasoning_tasks.package_version()


class TestRealPackage:
    @pytest.fixture(autouse=True)
    def _needed(self) -> None:
        pytest.importorskip("reasoning_gym", reason="not installed: pip install reasoning-gym")

    @pytest.mark.slow
    def test_gsm_symbolic_and_chain_sum_are_read_and_scored(self) -> None:
        tasks = ["gsm_symbolic", {"_target_": "chain_sum", "max_terms": 3}]
        rows = list(read_tasks(TRAIN, tasks=tasks, train_size=20, validation_size=5))
        assert Counter(row["data_source"] for row in rows) == {
            "reasoning_gym/gsm_symbolic": 10,
            "reasoning_gym/chain_sum": 10,
        }
        assert {score(row["reasoning_gym"], row["answer"]) for row in rows} == {1.0}
