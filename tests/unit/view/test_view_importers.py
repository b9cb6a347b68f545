"""Runs of other trainers and of older versions, in the viewer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("duckdb")

from skyrl_train.telemetry.reading import find_runs
from skyrl_train.view.answers import Answers
from skyrl_train.view.rollouts import RolloutIndex

Json = dict[str, Any]
DUMPS = Path(__file__).parents[2] / "other_trainers/dumps"
"""Made by `other_trainers/dump_completions.py`."""


def answers_of(tmp_path: Path, folder: Path) -> Answers:
    (tmp_path / "scratch").mkdir()
    runs = find_runs([folder])
    return Answers(runs, RolloutIndex(tmp_path / "scratch", runs), version="1")


def get(answers: Answers, path: str, **arguments: object) -> Json:
    status, found = answers.answer(f"api/{path}", [(name, str(value)) for name, value in arguments.items()])
    assert status == 200, found
    return found


def test_completions_of_trl_are_groups_of_their_prompts(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2+2?"}]
    table = {  # as GRPOTrainer.log makes it
        "step": [10] * 4,
        "prompt": [chat, chat, [{"role": "user", "content": "3+3?"}], [{"role": "user", "content": "3+3?"}]],
        "completion": [[{"role": "assistant", "content": text}] for text in ("4", "5", "six", "6")],
        "accuracy_reward": [1.0, 0.0, float("nan"), 1.0],
        "format_reward": [0.5, 0.0, 0.0, 0.5],
        "source": ["a", "a", "b", "b"],
        "advantage": [0.7, -0.7, -0.7, 0.7],
    }
    (tmp_path / "out/completions").mkdir(parents=True)
    pd.DataFrame(table).to_parquet(tmp_path / "out/completions/completions_00010.parquet")
    answers = answers_of(tmp_path, tmp_path / "out")
    run = get(answers, "runs")["runs"][0]
    assert (run["kind"], run["state"], run["last_step"]) == ("trl", "finished", 10)
    groups = sorted(get(answers, "groups")["rows"], key=lambda group: str(group["prompt_excerpt"]))
    assert [(group["prompt_excerpt"], [each["reward"] for each in group["samples"]]) for group in groups] == [
        ("2+2?", [1.5, 0.0]),
        ("3+3?", [0.0, 1.5]),
    ]
    one = get(answers, "trajectory", step=10, uid=groups[0]["uid"], sample=0)
    assert one["turns"][0]["text"] == "4"
    assert one["rewards"] == {"accuracy_reward": 1.0, "format_reward": 0.5}
    assert (one["metrics"], one["extras"]) == ({"advantage": 0.7}, {"source": "a"})
    assert (one["reexecute"], one["texts_from"], one["turns"][0]["tokens"]["ids"]) == (None, None, [])
    assert get(answers, "metrics")["series"]["reward/mean"] == [0.75]
    assert get(answers, "trajectories", text="^six$")["total"] == 1
    assert get(answers, "overview")["problems"] == []


def test_generations_of_verl_are_groups_of_their_inputs(tmp_path: Path) -> None:
    lines = [
        {"input": "user\n2+2?\nassistant\n", "output": "4", "gts": "4", "score": 1.0, "step": 3, "acc": True},
        {"input": "user\n2+2?\nassistant\n", "output": "<script>", "gts": "4", "score": 0.0, "step": 3, "acc": False},
    ]
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump/3.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "dump/4.jsonl").write_text(json.dumps({**lines[0], "step": 4}) + '\n{"input": "torn')
    answers = answers_of(tmp_path, tmp_path / "dump")
    assert get(answers, "runs")["runs"][0]["kind"] == "verl"
    found = get(answers, "groups", sort="step", order="asc")
    assert [(group["step"], group["num_samples"], group["reward_mean"]) for group in found["rows"]] == [
        (3, 2, 0.5),
        (4, 1, 1.0),
    ]
    assert len(found["problems"]) == 1
    assert "4.jsonl cannot be read to its end: line 2: " in found["problems"][0]
    one = get(answers, "trajectory", step=3, uid=found["rows"][0]["uid"], sample=1)
    assert one["turns"][0]["text"] == "<script>"
    assert (one["rewards"], one["metrics"], one["extras"]) == ({"score": 0.0}, {"acc": 0.0}, {"gts": "4"})
    assert [point["step"] for point in get(answers, "prompt", uid=one["uid"])["points"]] == [3, 4]


def test_what_trl_itself_dumps_is_shown(tmp_path: Path) -> None:
    answers = answers_of(tmp_path, DUMPS / "trl")
    run = get(answers, "runs")["runs"][0]
    assert (run["kind"], run["last_step"], run["num_rollout_files"]) == ("trl", 2, 2)
    (group,) = get(answers, "groups", step_min=1, step_max=1)["rows"]
    assert group["num_samples"] == 4
    one = get(answers, "trajectory", step=1, uid=group["uid"], sample=0)
    assert one["prompt"] == [{"role": "user", "content": "What is 0 + 1?"}]
    assert one["turns"][0]["text"] == "#### 4"
    assert one["rewards"] == {"ends": 1.0, "short_reward": pytest.approx(1 / 7)}
    assert (one["reward"], list(one["metrics"])) == (pytest.approx(8 / 7), ["advantage"])
    assert len(get(answers, "metrics")["series"]["reward/mean"]) == 2
    assert get(answers, "overview")["problems"] == []


def test_what_verl_itself_dumps_is_shown(tmp_path: Path) -> None:
    answers = answers_of(tmp_path, DUMPS / "verl")
    run = get(answers, "runs")["runs"][0]
    assert (run["kind"], run["last_step"], run["num_rollout_files"]) == ("verl", 2, 2)
    found = get(answers, "groups", step_min=2)
    assert [(group["num_samples"], group["reward_mean"]) for group in found["rows"]] == [(2, 0.5), (2, 0.5)]
    (row,) = get(answers, "trajectories", step_min=2, text="<b>")["rows"]
    one = get(answers, "trajectory", step=2, uid=row["uid"], sample=row["sample"])
    assert one["prompt"] == [{"role": "user", "content": "user\nWhat is 4*3?\nassistant\n"}]
    assert (one["turns"][0]["text"], one["rewards"], one["metrics"]) == ("<b>twelve</b>", {"score": 0.0}, {"acc": 0.0})
    assert one["extras"] == {"gts": "12"}
    assert found["problems"] == []


def test_json_lines_of_this_trainer_are_refused_with_what_makes_them_readable(tmp_path: Path) -> None:
    (tmp_path / "run/rollouts").mkdir(parents=True)
    (tmp_path / "run/rollouts/train_step_000001.jsonl").write_text('{"uid": "train-17", "turns": []}\n')
    (problem,) = get(answers_of(tmp_path, tmp_path / "run"), "groups", step_min=1)["problems"]
    assert "generator=replay generator.replay_path=" in problem


def test_answers_of_a_supervised_run_are_read(tmp_path: Path) -> None:
    (tmp_path / "run/samples").mkdir(parents=True)
    line = {
        "set": "held-out",
        "example": "3",
        "prompt": "2+2?",
        "answer": "4",
        "expected": "four",
        "stop_reason": "stop",
    }
    (tmp_path / "run/samples/step_000010.jsonl").write_text(json.dumps(line) + "\n")
    rows = get(answers_of(tmp_path, tmp_path / "run"), "trajectories")["rows"]
    assert [(row["purpose"], row["step"], row["uid"], row["text_excerpt"]) for row in rows] == [
        ("sample", 10, "held-out/3", "4")
    ]
