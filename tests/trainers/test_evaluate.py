from dataclasses import replace

import pytest
from rich.console import Console

from skyrl_train.errors import DataError
from skyrl_train.trainers.evaluation.evaluate import (
    Evaluator,
    cut_evaluations_after,
    evaluation_table,
    is_solved,
    is_solved_first_turn,
    measure,
    pass_at_k,
    read_evaluations,
    write_evaluation,
)
from skyrl_train.types import FailureKind, RolloutBatch, SamplingParams
from tests.support.fakes_trainer import (
    FakeEngine,
    FakeGenerator,
    failed_trajectory,
    make_prompts,
    make_trajectory,
    make_turn,
)

RIGHT = make_trajectory(make_turn(reward=1.0))
WRONG = make_trajectory(make_turn(reward=0.0))
RIGHT_LATER = make_trajectory(make_turn(reward=0.0), make_turn(reward=1.0, response=(3, 4, 5)))


@pytest.mark.parametrize(
    ("num_samples", "num_right", "k", "expected"),
    [(1, 0, 1, 0.0), (1, 1, 1, 1.0), (4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 2, 2, 5 / 6), (4, 1, 4, 1.0), (5, 3, 3, 1.0)],
)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(num_samples, num_right, k, expected):
    assert pass_at_k(num_samples, num_right, k) == pytest.approx(expected)


@pytest.mark.parametrize("k", [0, 3])
def test_pass_at_k_needs_as_many_samples(k):
    with pytest.raises(ValueError, match=f"pass@{k} cannot be estimated from 2 samples"):
        pass_at_k(2, 1, k)


def test_the_environments_verdict_goes_before_the_reward():
    assert is_solved(replace(WRONG, metrics={"solved": 1.0}))
    assert not is_solved(replace(RIGHT, metrics={"solved": 0.0}))
    assert is_solved_first_turn(replace(WRONG, metrics={"solved_first_turn": 1.0}))


def test_without_a_verdict_a_total_reward_of_one_is_right():
    assert is_solved(RIGHT)
    assert is_solved(RIGHT_LATER)
    assert not is_solved_first_turn(RIGHT_LATER)
    assert not is_solved(make_trajectory(make_turn(reward=0.2)))


def test_figures_of_two_prompts():
    figures = measure([[RIGHT, WRONG], [WRONG, RIGHT_LATER]])
    assert figures.accuracy == 0.5
    assert figures.accuracy_first_turn == 0.25
    assert figures.pass_at == {1: 0.5, 2: 1.0}
    assert figures.reward_mean == 0.5
    assert figures.turns_mean == 1.25
    assert figures.response_length_mean == (1 + 1 + 1 + 4) / 4


def test_failures_are_left_out_and_counted():
    timeout = failed_trajectory(kind=FailureKind.ENVIRONMENT_TIMEOUT)
    figures = measure([[RIGHT, timeout], [failed_trajectory(), timeout]])
    assert (figures.num_trajectories, figures.num_failed) == (4, 3)
    assert figures.failures == {"environment_error": 1, "environment_timeout": 2}
    assert figures.accuracy == 1.0
    assert figures.pass_at == {1: 1.0}


def test_where_everything_failed_nothing_is_claimed():
    figures = measure([[failed_trajectory()]])
    assert figures.accuracy is None
    assert figures.pass_at == {}
    assert figures.reward_mean is None


def evaluator(prompts, *, n_samples=1, batch_size=100, **changes) -> Evaluator:
    engine = FakeEngine()
    engine.weight = 0.0
    return Evaluator(
        FakeGenerator(engine),
        prompts,
        sampling=SamplingParams(),
        n_samples_per_prompt=n_samples,
        batch_size=batch_size,
        env_class=None,
        **changes,
    )


def test_an_evaluation_depends_on_neither_the_step_nor_the_batch_size():
    prompts = make_prompts(20)
    first = evaluator(prompts, n_samples=2).evaluate(0)
    assert replace(evaluator(prompts, n_samples=2, batch_size=3).evaluate(70), global_step=0) == first
    assert 0 < first.metrics()["eval/accuracy"] < 1
    assert first.metrics()["eval/pass@2"] > first.metrics()["eval/pass@1"]


def test_parts_are_shown_where_there_are_several():
    prompts = make_prompts(4, data_source="a") + [replace(prompt, uid=f"q{prompt.uid}") for prompt in make_prompts(2)]
    prompts = [replace(prompt, env_class="env_a") for prompt in prompts]
    prompts[0] = replace(prompts[0], env_class="env_b")
    result = evaluator(prompts).evaluate(3)
    assert {name: part.num_prompts for name, part in result.parts.items()} == {
        "env_class=env_a": 5,
        "env_class=env_b": 1,
        "data_source=a": 4,
        "data_source=none": 2,
    }
    assert "eval/data_source=a/accuracy" in result.metrics()
    assert evaluator(make_prompts(3)).evaluate(3).parts == {}


def test_the_hook_gets_all_rollouts_at_once():
    seen: list[tuple[int, RolloutBatch]] = []
    evaluator(
        make_prompts(5), n_samples=2, batch_size=2, on_rollouts=lambda step, rollouts: seen.append((step, rollouts))
    ).evaluate(4)
    [(step, rollouts)] = seen
    assert step == 4
    assert len(rollouts.trajectories) == 10


def test_the_file_reads_back_what_was_written(tmp_path):
    path = tmp_path / "evaluation.json"
    results = [replace(evaluator(make_prompts(3, data_source=s)).evaluate(0), global_step=s) for s in (5, 0, 10)]
    for result in results:
        write_evaluation(path, result)
    assert [entry.global_step for entry in read_evaluations(path)] == [0, 5, 10]
    assert read_evaluations(path)[1] == results[0]
    write_evaluation(path, replace(results[0], n_samples_per_prompt=9))
    assert [entry.n_samples_per_prompt for entry in read_evaluations(path)] == [1, 9, 1]
    cut_evaluations_after(path, 5)
    assert [entry.global_step for entry in read_evaluations(path)] == [0, 5]


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "evaluation.json"
    path.write_text("[]")
    with pytest.raises(DataError, match="not an evaluation file"):
        read_evaluations(path)


def test_the_table_shows_before_after_and_change():
    before = evaluator(make_prompts(4)).evaluate(0)
    figures = measure([[RIGHT, failed_trajectory()], [WRONG, WRONG]])
    before = replace(before, overall=measure([[WRONG, WRONG], [WRONG, WRONG]]))
    after = replace(before, global_step=40, overall=figures, n_samples_per_prompt=2)
    console = Console(width=100, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(evaluation_table(before, after))
    lines = [line.split() for line in captured.get().splitlines()]
    assert ["accuracy", "0.000", "0.500", "+0.500"] in lines
    assert ["pass@2", "0.000", "0.000", "+0.000"] in lines
    assert ["failed", "trajectories", "0", "of", "4", "1", "of", "4", "(environment_error", "1)"] in lines
    assert max(len(line) for line in captured.get().splitlines()) <= 100


def test_the_line_names_failures():
    result = evaluator(make_prompts(1)).evaluate(7)
    result = replace(result, overall=measure([[RIGHT, failed_trajectory()]]))
    assert (
        result.line()
        == "evaluation at step 7: accuracy 1.000, first turn 1.000, reward 1.000, 1 of 2 trajectories failed"
    )
