"""The bundled word problems: true, reproducible, split without overlap, and written as bundled."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest

from skyrl_train.data.tasks.word_problems import (
    Split,
    WordProblem,
    draw_problem,
    generate_problems,
    to_row,
    write_demonstration,
)

ROOT = Path(__file__).parents[3]
BUNDLED = ROOT / "skyrl_train" / "data" / "assets" / "word_problems"
PROBLEM = WordProblem(
    question="Ana has 3 pens. Ana buys 4 more. How many pens does Ana have now?",
    solution_lines=("3+4=7",),
    answer=7,
    template="collection",
)


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_line_of_a_solution_is_true_and_the_last_gives_the_answer() -> None:
    for problem in generate_problems(Split.TRAIN, 500, seed=3):
        for line in problem.solution_lines:
            left, right = line.split("=")
            assert eval(left) == int(right), problem
        assert problem.solution_lines[-1].endswith(f"={problem.answer}")
        assert problem.solution.endswith(f"\n#### {problem.answer}")
        assert problem.answer > 0


def test_every_number_of_a_solution_comes_from_the_question_or_an_earlier_line() -> None:
    for problem in generate_problems(Split.TRAIN, 500, seed=4):
        known = {word.strip(".?") for word in problem.question.split()}
        for line in problem.solution_lines:
            left, right = line.split("=")
            for operand in left.replace("-", "+").replace("*", "+").split("+"):
                assert operand in known, problem
            known.add(right)


def test_problems_have_six_templates_and_one_to_four_operations() -> None:
    problems = generate_problems(Split.TRAIN, 500, seed=5)
    assert {problem.template for problem in problems} == {
        "boxes",
        "collection",
        "compared",
        "journey",
        "shopping",
        "wages",
    }
    assert {problem.num_operations for problem in problems} == {1, 2, 3, 4}


def test_the_same_seed_gives_the_same_problems_and_another_seed_others() -> None:
    assert generate_problems(Split.TRAIN, 20, seed=6) == generate_problems(Split.TRAIN, 20, seed=6)
    assert generate_problems(Split.TRAIN, 20, seed=6) != generate_problems(Split.TRAIN, 20, seed=7)


def test_a_longer_draw_starts_with_the_shorter_one() -> None:
    assert generate_problems(Split.TRAIN, 30, seed=6)[:20] == generate_problems(Split.TRAIN, 20, seed=6)


def test_no_question_is_in_both_splits_even_across_seeds() -> None:
    train = {problem.question for problem in generate_problems(Split.TRAIN, 1000, seed=1)}
    held_out = {problem.question for problem in generate_problems(Split.VALIDATION, 1000, seed=2)}
    assert len(train) == len(held_out) == 1000
    assert not train & held_out


def test_a_row_has_the_columns_of_the_ecosystem() -> None:
    assert to_row(PROBLEM, Split.TRAIN, 5) == {
        "prompt": [{"role": "user", "content": "Ana has 3 pens. Ana buys 4 more. How many pens does Ana have now?"}],
        "env_class": "word_problems",
        "reward_spec": {"method": "rule", "ground_truth": "7"},
        "extra_info": {
            "split": "train",
            "index": 5,
            "template": "collection",
            "num_operations": 1,
            "max_turns": 2,
            "answer": "3+4=7\n#### 7",
        },
    }


def test_a_demonstration_that_works_is_right_and_ends_at_once() -> None:
    messages = write_demonstration(PROBLEM, 1.0, random.Random(0))
    assert messages == (
        {"role": "user", "content": PROBLEM.question},
        {"role": "assistant", "content": "3+4=7\n#### 7"},
    )


def test_a_demonstration_that_guesses_is_wrong_is_told_so_and_guesses_again() -> None:
    for seed in range(200):
        messages = write_demonstration(PROBLEM, 0.0, random.Random(seed))
        assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
        assert messages[2]["content"] == "Wrong. Try again."
        for guess in (messages[1]["content"], messages[3]["content"]):
            assert guess.startswith("#### ")
            assert 1 <= int(guess.removeprefix("#### ")) <= 60
            assert guess != "#### 7"


@pytest.mark.parametrize("split", list(Split))
def test_the_bundled_rows_are_what_the_script_writes(split: Split, tmp_path: Path) -> None:
    load_script("make_word_problems").main(["--output", str(tmp_path)])
    assert (tmp_path / f"{split.value}.jsonl").read_bytes() == (BUNDLED / f"{split.value}.jsonl").read_bytes()


def test_the_bundled_rows_stay_small() -> None:
    assert sum(path.stat().st_size for path in BUNDLED.glob("*.jsonl")) < 1_500_000


def test_drawing_goes_on_for_either_split() -> None:
    rng = random.Random(8)
    assert {draw_problem(rng).split for _ in range(100)} == {Split.TRAIN, Split.VALIDATION}
