"""What the viewer answers of a run, compared with what is in its files."""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("duckdb")

from skyrl_train.errors import DeadlineError
from skyrl_train.telemetry.reading import find_runs
from skyrl_train.telemetry.records import write_rollouts
from skyrl_train.types import (
    Failure,
    FailureKind,
    Outcome,
    Prompt,
    RolloutBatch,
    StopReason,
    Trajectory,
    Turn,
    VersionRun,
    token_ids,
)
from skyrl_train.view.answers import Answers, to_json
from skyrl_train.view.rollouts import RolloutIndex
from tests.support.rollout_folders import in_parts
from tests.support.view_runs import append_records, write_run

Json = dict[str, Any]
ENDPOINTS = ("runs", "metrics", "overview", "facets", "trajectories", "groups", "failures", "findings", "tail")


class Asked:
    """Answers about some folders, and their statuses."""

    def __init__(self, index: RolloutIndex, answers: Answers) -> None:
        self.index, self.answers = index, answers

    def __call__(self, path: str, status: int = 200, **arguments: Any) -> Json:
        pairs = [
            (name, str(each))
            for name, value in arguments.items()
            for each in (value if isinstance(value, list) else [value])
        ]
        found_status, found = self.answers.answer(f"api/{path}", pairs)
        assert found_status == status, found
        json.loads(to_json(found))
        return found


def asked(scratch: Path, *folders: Path) -> Asked:
    scratch.mkdir(parents=True)
    runs = find_runs(folders)
    index = RolloutIndex(scratch, runs)
    return Asked(index, Answers(runs, index, version="1"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "a run [1]", steps=3, prompts=4, samples=4, turns=3)


@pytest.fixture(scope="module")
def ask(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    made = asked(tmp_path_factory.mktemp("scratch") / "a", folder)
    yield made
    made.index.close()


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[Json]:
    """All rows of all files, a row a turn."""
    return [row for file in sorted(folder.glob("rollouts/*")) for row in pq.read_table(file).to_pylist()]


def keys_of(rows: list[Json]) -> set[tuple[Any, ...]]:
    return {(row["purpose"], row["global_step"], row["uid"], row["sample"]) for row in rows}


def listed(answer: Json) -> set[tuple[Any, ...]]:
    return {(row["purpose"], row["step"], row["uid"], row["sample"]) for row in answer["rows"]}


def test_every_answer_names_its_problems_and_the_folder_stays_as_it_is(ask: Asked, folder: Path) -> None:
    before = {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}
    for path in ENDPOINTS:
        assert ask(path)["problems"] == []
    assert {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("arguments", "keeps"),
    [
        ({"purpose": "eval"}, lambda row: row["purpose"] == "eval"),
        ({"environment": ["search", "none"]}, lambda row: row["env_class"] == "search"),
        (
            {"outcome": "failed", "purpose": "train"},
            lambda row: row["outcome"] == "failed" and row["purpose"] == "train",
        ),
        ({"failure_kind": "engine_timeout"}, lambda row: row["failure_kind"] == "engine_timeout"),
        ({"reward_min": 0.5}, lambda row: (row["trajectory_reward"] or 0.0) >= 0.5),
        ({"step_min": 2, "step_max": 2}, lambda row: row["global_step"] == 2),
        ({"turns_min": 2, "turns_max": ""}, lambda row: row["num_turns"] >= 2),
        ({"uid": "train-1", "sample": 2}, lambda row: row["uid"] == "train-1" and row["sample"] == 2),
    ],
)
def test_a_filter_keeps_what_the_files_say(ask: Asked, rows: list[Json], arguments: Json, keeps: Any) -> None:
    expected = keys_of([row for row in rows if keeps(row)])
    answer = ask("trajectories", limit=500, **arguments)
    assert expected
    assert listed(answer) == expected
    assert answer["total"] == len(expected)
    groups = ask("groups", limit=500, **arguments)
    assert sum(group["num_samples"] for group in groups["rows"]) == len(expected)


@pytest.mark.parametrize("pattern", ["6\\*7=4[0-9]", "(?i)WRONG", "unknown city", "Question 3", "calculator"])
def test_a_text_is_found_in_prompts_responses_observations_tool_calls_and_messages(
    ask: Asked, rows: list[Json], pattern: str
) -> None:
    names = ("text", "observations", "prompt", "tool_calls", "failure_message")
    expected = keys_of([row for row in rows if any(re.search(pattern, row[name] or "") for name in names)])
    assert expected
    assert listed(ask("trajectories", limit=500, text=pattern)) == expected


def test_lengths_are_those_of_the_responses(ask: Asked, rows: list[Json]) -> None:
    lengths: Counter[Any] = Counter()
    for row in rows:
        key = (row["purpose"], row["global_step"], row["uid"], row["sample"])
        lengths[key] += len(row["response_token_ids"] or [])
    for row in ask("trajectories", limit=500)["rows"]:
        assert (row["tokens"] or 0) == lengths[row["purpose"], row["step"], row["uid"], row["sample"]]


def test_wrong_arguments_are_named(ask: Asked) -> None:
    assert "run=nobody" in ask("trajectories", 400, run="nobody")["error"]
    assert "text=( is no regular expression" in ask("trajectories", 400, text="(")["error"]
    assert "limit=501" in ask("trajectories", 400, limit=501)["error"]
    assert "sort=; DROP" in ask("groups", 400, sort="; DROP TABLE trajectories")["error"]
    assert "colour is no argument" in ask("trajectories", 400, colour="red")["error"]
    assert "step_min=nan" in ask("failures", 400, step_min="nan")["error"]
    assert "train-99/0 is not in train step 1" in ask("trajectory", 404, step=1, uid="train-99", sample=0)["error"]
    ask("secrets", 404)


@pytest.mark.parametrize("name", ["trajectories", "groups"])
def test_a_page_behind_the_last_says_how_many_there_are(ask: Asked, name: str) -> None:
    chosen = {"step_min": 2, "step_max": 2}
    total = ask(name, limit=1, **chosen)["total"]
    assert total > 1
    assert (ask(name, offset=total, **chosen)["rows"], ask(name, offset=total, **chosen)["total"]) == ([], total)


def test_groups_are_sorted_by_the_spread_of_their_rewards(ask: Asked, rows: list[Json]) -> None:
    groups = ask("groups", limit=500)["rows"]
    spreads = [group["spread"] for group in groups if group["spread"] is not None]
    assert spreads == sorted(spreads, reverse=True)
    first = groups[0]
    own = {
        row["sample"]: row["trajectory_reward"]
        for row in rows
        if (row["purpose"], row["global_step"], row["uid"]) == (first["purpose"], first["step"], first["uid"])
    }
    assert [sample["reward"] for sample in first["samples"]] == [own[sample] for sample in sorted(own)]


def test_a_token_has_its_text_and_its_numbers(ask: Asked, folder: Path, rows: list[Json]) -> None:
    row = next(row for row in rows if row["purpose"] == "train" and row["turn"] == 1 and row["parent"] == 0)
    found = ask("trajectory", purpose="train", step=row["global_step"], uid=row["uid"], sample=row["sample"])
    turn = found["turns"][1]
    tokens = turn["tokens"]
    assert tokens["ids"] == row["response_token_ids"]
    assert "".join(tokens["texts"]) == row["text"] == turn["text"]
    assert turn["messages"] == json.loads(
        next(each for each in rows if keys_of([each]) == keys_of([row]))["observations"]
    )
    for index, (engine, policy) in enumerate(zip(row["logprobs"], row["policy_logprobs"])):
        if not row["loss_mask"][index]:  # the trainer computes nothing of it
            assert {tokens[name][index] for name in ("difference", "ratio", "clipped", "entropy")} == {None}
            continue
        assert tokens["entropy"][index] == pytest.approx(row["entropies"][index], rel=1e-6)
        assert tokens["difference"][index] == pytest.approx(policy - engine, abs=1e-6)
        assert tokens["ratio"][index] == pytest.approx(math.exp(policy - engine), rel=1e-5)
        high, low = tokens["ratio"][index] > 1.28, tokens["ratio"][index] < 0.8
        assert tokens["clipped"][index] == (high if row["advantages"][index] > 0 else low)
    assert tokens["mask"] == row["loss_mask"]
    assert tokens["version"] == [row["versions"][0]["version"]] * len(tokens["ids"])
    assert tokens["reference_logprob"] is None
    assert "reference_logprob" not in [column["name"] for column in found["columns"]]
    assert found["reexecute"] is None, "the run kept no capsules"
    (folder / "capsules" / f"step_{row['global_step']:06d}").mkdir(parents=True)
    found = ask("trajectory", purpose="train", step=row["global_step"], uid=row["uid"], sample=row["sample"])
    assert found["reexecute"].endswith(f"--step {row['global_step']}")


def test_turns_with_one_parent_make_a_tree(ask: Asked, rows: list[Json]) -> None:
    row = next(row for row in rows if row["turn"] == 2 and row["parent"] == 0)
    found = ask("trajectory", purpose=row["purpose"], step=row["global_step"], uid=row["uid"], sample=row["sample"])
    assert found["is_tree"]
    assert found["turns"][0]["children"] == [1, 2]
    assert [turn["depth"] for turn in found["turns"][:3]] == [0, 1, 1]


def test_a_trajectory_that_failed_before_its_first_turn_is_shown(ask: Asked, rows: list[Json]) -> None:
    row = next(row for row in rows if row["turn"] is None)
    found = ask("trajectory", purpose=row["purpose"], step=row["global_step"], uid=row["uid"], sample=row["sample"])
    assert found["turns"] == []
    assert found["failure"]["message"] == row["failure_message"]
    assert found["reward"] is None
    assert found["prompt"][0]["role"] == "user"


def test_every_trajectory_of_a_step_is_reached_by_going_to_the_next(ask: Asked, rows: list[Json]) -> None:
    reached, place = [], {"purpose": "train", "step": 1, "uid": "train-4", "sample": 0}
    while place:
        reached.append((place["uid"], place["sample"]))
        following = ask("trajectory", **place)["neighbours"]["next"]
        place = {name: following[name] for name in place} if following else {}
    assert reached == sorted(
        {(row["uid"], row["sample"]) for row in rows if row["purpose"] == "train" and row["global_step"] == 1}
    )


def test_failures_are_counted_by_kind_with_the_first_of_each(ask: Asked, rows: list[Json]) -> None:
    failed = {key: row["failure_kind"] for row in rows for key in keys_of([row]) if row["failure_kind"]}
    found = ask("failures")
    assert {kind["kind"]: kind["count"] for kind in found["kinds"]} == Counter(failed.values())
    for kind in found["kinds"]:
        assert sum(count for _, count in kind["steps"]) == kind["count"]
        assert kind["first"]["step"] == min(key[1] for key, name in failed.items() if name == kind["kind"])
    assert found["failed_steps"] == [{"step": 2, "error": "NonFiniteError: the loss is nan", "num_trajectories": 16}]
    assert [line["level"] for line in found["log"]] == ["WARNING", "ERROR"]
    assert "NonFiniteError" in found["log"][1]["text"]


def test_findings_are_those_of_the_doctor_and_name_rows_that_can_be_opened(ask: Asked) -> None:
    found = ask("findings")["findings"]
    assert (found[0]["rule"], found[0]["level"], found[0]["since"]) == ("not_finite", "problem", 2)
    named = [row for finding in found for row in finding["rows"]]
    assert named
    for row in named:
        key = {name: row[name] for name in ("purpose", "step", "uid", "sample")}
        assert ask("trajectory", **key)["uid"] == row["uid"]


def test_the_solve_rate_of_a_prompt_is_told_for_each_step(ask: Asked, rows: list[Json]) -> None:
    found = ask("prompt", uid="train-4", purpose="train")
    assert [point["step"] for point in found["points"]] == [1, 3]
    solved = {
        row["sample"]: json.loads(row["metrics"])["solved"]
        for row in rows
        if row["uid"] == "train-4" and row["global_step"] == 3 and row["metrics"] and not row["failure_kind"]
    }
    assert found["points"][1]["solved"] == pytest.approx(sum(solved.values()) / len(solved))


def test_the_overview_holds_steps_plan_and_settings_without_secrets(ask: Asked) -> None:
    found = ask("overview")
    assert [step["step"] for step in found["steps"]] == [0, 1, 2, 3]
    assert found["steps"][2]["is_failed"]
    assert found["steps"][1]["num_failed"] == 1
    assert {"name": "total_steps", "planned": 3, "happened": 3.0} in found["plan"]
    assert {"name": "num_samples_per_batch", "planned": 16, "happened": 16.0} in found["plan"]
    assert ["generator.api_key", "<redacted>"] in found["config"]
    assert [line["step"] for line in found["timeline"]] == [0, 1, 2, 3]
    assert found["memory"]["roles"][0]["limit_bytes"] == 53687091


def test_series_are_aligned_and_what_was_not_finite_is_null(ask: Asked) -> None:
    found = ask("metrics", names="eval/accuracy,policy/grad_norm")
    assert found["steps"] == [0, 1, 2, 3]
    assert [value is None for value in found["series"]["eval/accuracy"]] == [False, True, False, True]
    assert found["series"]["policy/grad_norm"][2] is None
    assert found["tokens"] == [0.0, 960.0, 1920.0, 2880.0]
    assert ask("metrics", max_points=2)["steps"] == [0, 2, 3]


def test_two_runs_differ_in_what_was_set_differently(tmp_path: Path) -> None:
    for name, steps in (("a", 1), ("b", 2)):
        write_run(tmp_path / name, steps=steps, prompts=1, samples=1)
    found = asked(tmp_path / "scratch", tmp_path / "a", tmp_path / "b")("diff", runs="a,b")
    assert {row["name"] for row in found["rows"]} == {"run_name", "output_dir", "trainer.total_steps"}
    assert found["rows"][-1]["values"] == [1, 2]


def test_a_tail_has_what_is_new_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1, prompts=1, samples=1, complete=False)
    ask = asked(tmp_path / "scratch", folder)
    offsets = ask("tail")["offsets"]
    append_records(folder, [2])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    found = ask("tail", **offsets)
    assert [record["step"] for record in found["metrics"]] == [2]
    assert [line["step"] for line in found["timeline"]] == [2]
    assert ask("tail", **found["offsets"])["metrics"] == []
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('ard/mean": 1.0}\n')
    assert [record["step"] for record in ask("tail", **found["offsets"])["metrics"]] == [3]
    assert ask("metrics")["steps"] == [0, 1, 2, 3]


def test_a_file_that_a_resumed_run_cut_is_told_from_its_start(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3, prompts=1, samples=1, complete=False)
    ask = asked(tmp_path / "scratch", folder)
    offsets = ask("tail")["offsets"]
    assert ask("metrics")["steps"] == [0, 1, 2, 3]
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "cut").write_bytes(b"".join(lines[:2]))
    (folder / "cut").replace(folder / "metrics.jsonl")
    found = ask("tail", **offsets)
    assert found["reset"] == ["metrics"]
    assert [record["step"] for record in found["metrics"]] == [0, 1]
    assert ask("metrics")["steps"] == [0, 1]


def test_rollouts_that_appear_change_and_vanish_are_followed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2, prompts=1, samples=2, eval_every=0, failures=False, hostile=False)
    ask = asked(tmp_path / "scratch", folder)
    assert ask("trajectories")["total"] == 4
    shutil.copy(folder / "rollouts/train_step_000001.parquet", tmp_path / "kept.parquet")
    (folder / "rollouts/train_step_000001.parquet").unlink()
    assert ask("trajectories")["total"] == 2
    (tmp_path / "kept.parquet").replace(folder / "rollouts/train_step_000001.parquet")
    assert ask("trajectories", text="####")["total"] == 4


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3, prompts=2, samples=2, eval_every=0, failures=False)
    torn = folder / "rollouts/train_step_000002.parquet"
    torn.write_bytes(torn.read_bytes()[:-100])
    (folder / "plan.json").write_text('{"total_steps": ')
    (folder / "config.yaml").write_text("a: [")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe nonsense\n[1]\n")
    ask = asked(tmp_path / "scratch", folder)
    found = ask("trajectories")
    assert {row["step"] for row in found["rows"]} == {1, 3}
    assert len(found["problems"]) == 1
    assert "train_step_000002.parquet cannot be read" in found["problems"][0]
    problems = ask("overview")["problems"]
    assert [any(name in problem for problem in problems) for name in ("plan.json", "config.yaml", "2 lines")] == [
        True
    ] * 3
    assert ask("metrics")["steps"] == [0, 1, 2, 3]


def test_a_file_whose_texts_are_damaged_is_left_out_of_a_search(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2, prompts=2, samples=2, eval_every=0, failures=False)
    path = folder / "rollouts/train_step_000001.parquet"
    group = pq.ParquetFile(path).metadata.row_group(0)
    column = next(
        group.column(index)
        for index in range(group.num_columns)
        if group.column(index).path_in_schema == "observations"
    )
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)
    ask = asked(tmp_path / "scratch", folder)
    assert ask("trajectories")["total"] == 8
    found = ask("trajectories", text="Question")
    assert {row["step"] for row in found["rows"]} == {2}
    assert "train_step_000001.parquet cannot be searched" in found["problems"][0]


def test_a_step_in_parts_is_shown_as_one_in_a_file_is_and_left_out_where_a_part_is_missing(
    ask: Asked, folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / folder.name))
    step = in_parts(copy / "rollouts/train_step_000002.parquet")
    (run,) = find_runs([copy])
    (file,) = [each for each in run.rollout_files() if (each.purpose, each.step) == ("train", 2)]
    assert file.num_bytes == sum(each.stat().st_size for each in step.glob("part-*"))
    other = asked(tmp_path / "scratch", copy)

    def answer(asked: Asked, path: str, **arguments: Any) -> Json:
        """Without the time it took; rows that the query does not order by anything, in some order."""
        found = {name: value for name, value in asked(path, **arguments).items() if name != "seconds"}
        return {**found, "rows": sorted(map(json.dumps, found.get("rows", ())))}

    for path, arguments in (
        *(("facets", {}), ("failures", {}), ("findings", {}), ("groups", {"limit": 500})),
        *(("trajectories", {"limit": 500}), ("trajectories", {"limit": 500, "text": "Question"})),
    ):
        assert answer(other, path, **arguments) == answer(ask, path, **arguments), path
    shown = [row for row in ask("trajectories", limit=500)["rows"] if row["step"] == 2]
    for row in shown:
        key = {"purpose": row["purpose"], "step": 2, "uid": row["uid"], "sample": row["sample"]}
        assert answer(other, "trajectory", **key) == answer(ask, "trajectory", **key)
    assert len(shown) > 10
    (step / "part-00001.parquet").unlink()
    damaged = asked(tmp_path / "again", copy)
    found = damaged("trajectories", limit=500)
    assert [row for row in found["rows"] if (row["purpose"], row["step"]) == ("train", 2)] == []
    assert ["part-00001.parquet" in problem for problem in found["problems"]] == [True]
    assert any("part-00001.parquet" in problem for problem in damaged("findings")["problems"])


def test_a_folder_without_anything_has_answers(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    ask = asked(tmp_path / "scratch", tmp_path / "nothing")
    assert ask("runs")["runs"][0]["state"] == "empty"
    for path in ENDPOINTS:
        ask(path)
    assert ask("trajectories", text="a")["rows"] == []


def test_a_query_ends_at_its_deadline(tmp_path: Path) -> None:
    index = RolloutIndex(tmp_path, [], timeout_s=0.2)
    with pytest.raises(DeadlineError, match=r"the query did not answer within 0.2 s. Narrow the filter"):
        index.rows("SELECT sum(a.range * b.range) FROM range(100000000) a, range(1000000) b")
    assert index.rows("SELECT 1 AS one") == [{"one": 1}]


def test_nothing_but_the_runs_can_be_read_by_a_query(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "secret.csv").write_text("a\n1\n")
    index = RolloutIndex(tmp_path / "scratch", [])
    with pytest.raises(Exception, match="disabled"):
        index.rows(f"SELECT * FROM read_csv('{tmp_path}/secret.csv')")


def test_several_threads_ask_at_once(ask: Asked) -> None:
    totals: list[int] = []
    threads = [
        threading.Thread(target=lambda: totals.append(ask("trajectories", text="####")["total"])) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(set(totals)) == 1
    assert len(totals) == 8


def test_what_the_store_writes_is_what_is_shown(tmp_path: Path) -> None:
    turn = Turn(
        parent=None,
        added_token_ids=token_ids([1, 2]),
        response_token_ids=token_ids([3, 4]),
        response_logprobs=np.array([-0.5, -0.25], dtype=np.float32),
        loss_mask=np.array([True, False]),
        response_text="four ✓",
        reward=1.0,
        observations=({"role": "tool", "content": "ok"},),
        stop_reason=StopReason.STOP,
        weight_versions=(VersionRun(0, 7), VersionRun(1, 8)),
    )
    failure = Failure(kind=FailureKind.ENGINE_ERROR, message="gone", turn_index=0)
    prompt = Prompt(
        uid="train-1", messages=({"role": "user", "content": "2+2?"},), env_class="gsm8k", extras={"a": [1]}
    )
    batch = RolloutBatch(
        prompts=(prompt,),
        trajectories=(
            Trajectory(
                prompt_uid="train-1", sample_index=0, turns=(turn,), outcome=Outcome.DONE, rewards={"right": 1.0}
            ),
            Trajectory(prompt_uid="train-1", sample_index=1, turns=(), outcome=Outcome.FAILED, failure=failure),
        ),
        n_samples_per_prompt=2,
    )
    columns = {"advantages": [[np.array([0.5, 0.5], dtype=np.float32)], None]}
    write_rollouts(tmp_path / "run/rollouts", batch, purpose="train", global_step=9, columns=columns)
    ask = asked(tmp_path / "scratch", tmp_path / "run")
    listing = [(row["sample"], row["reward"], row["tokens"], row["outcome"]) for row in ask("trajectories")["rows"]]
    assert listing == [(0, 1.0, 2, "done"), (1, None, None, "failed")]
    one = ask("trajectory", step=9, uid="train-1", sample=0)
    tokens = one["turns"][0]["tokens"]
    assert (tokens["logprob"], tokens["advantage"], tokens["mask"]) == ([-0.5, -0.25], [0.5, None], [True, False])
    assert (tokens["version"], tokens["ids"], tokens["policy_logprob"]) == ([7, 8], [3, 4], None)
    assert one["turns"][0]["observations"] == [{"role": "tool", "content": "ok"}]
    assert (one["rewards"], one["extras"], one["environment"]) == ({"right": 1.0}, {"a": [1]}, "gsm8k")
    assert ask("trajectory", step=9, uid="train-1", sample=1)["failure"]["message"] == "gone"


def test_the_documentation_names_every_question(ask: Asked) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/viewer.md").read_text()
    names = re.findall(r"`(\w+)`", text[text.index("## Answers") : text.index("Each answer has")])
    assert set(names) == set(ask.answers.endpoints)


def test_the_settings_that_are_read_are_those_of_a_run(ask: Asked) -> None:
    reference = (Path(__file__).resolve().parents[3] / "docs/configuration.md").read_text()
    names = {name for name, _ in ask("overview")["config"]}
    read = {"model.path", "model.tokenizer_path", "trainer.algorithm.eps_clip_low", "trainer.algorithm.eps_clip_high"}
    assert read <= names
    assert {name for name in read if f"`{name}`" in reference} == read


def test_shapes_that_no_run_writes_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1, prompts=1, samples=1)
    (folder / "memory.json").write_text('{"policy": [{"training": {"probes": 3, "tokens": "x"}}, null], "critic": 1}')
    (folder / "plan.json").write_text('{"total_steps": "many", "num_prompts_per_batch": true}')
    with (folder / "timeline.jsonl").open("a") as file:
        file.write('{"step": 9, "began": 1, "seconds": 1, "learner": [], "engine": [1], "groups": []}\n')
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": "high", "batch/tokens": 1e400}\n')
    ask = asked(tmp_path / "scratch", folder)
    found = ask("overview")
    assert (found["run"]["total_steps"], found["plan"]) == (None, [])
    assert found["memory"]["roles"][0]["probes"] == []
    assert [line["step"] for line in found["timeline"]] == [0, 1]
    assert ask("metrics")["series"]["reward/mean"][2] is None
    assert ask("tail", metrics="0")["metrics"][2]["reward/mean"] is None


def test_lists_are_narrowed_and_sorted_by_metrics_components_of_rewards_cut_answers_and_age(
    ask: Asked, rows: list[Json]
) -> None:
    whole = ask("trajectories", limit=500)
    facets = ask("facets")["metrics"]
    assert [each["name"] for each in facets] == ["rewards/environment", "solved", "turns"]
    solved = [row for row in whole["rows"] if (row["metrics"] or {}).get("solved") == 1.0]
    assert 0 < len(solved) < whole["total"]
    assert ask("trajectories", metric="solved", metric_min=1)["total"] == len(solved)
    assert ask("trajectories", metric="rewards/environment", metric_max=0)["total"] > 0
    turns = [row["metrics"]["turns"] for row in ask("trajectories", metric="turns", sort="metric")["rows"][:5]]
    assert turns == sorted(turns, reverse=True)
    cut = [row for row in whole["rows"] if row["cut"]]
    assert len(cut) == ask("trajectories", cut_min=1, limit=500)["total"] > 0
    aged = ask("trajectories", age_min=1, limit=500)["rows"]
    assert {(row["purpose"], row["age"]) for row in aged} == {("train", 1)}
    groups = ask("groups", metric="solved", sort="metric", order="asc", limit=500)["rows"]
    assert not any((sample["metrics"] or {}).get("solved") for sample in groups[0]["samples"])
    assert {group["oldest"] for group in ask("groups", sort="age")["rows"][:1]} == {1}
    assert "sort=metric is not one of" in ask("trajectories", 400, sort="metric")["error"]
    assert ask("trajectories", metric="it's none", metric_min=0)["total"] == 0


def test_of_a_long_run_the_newest_files_come_first_and_those_of_a_chosen_step_before_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", steps=9, eval_every=0, failures=False)
    size = max(path.stat().st_size for path in run.glob("rollouts/*"))
    monkeypatch.setattr("skyrl_train.view.rollouts._BYTES_AT_A_TIME", 3 * size)
    ask = asked(tmp_path / "scratch", run)

    first = ask("trajectories", sort="step", order="asc", limit=1)
    assert first["rows"][0]["step"] > 5
    assert "of 9 files are listed" in first["problems"][0]
    assert ask("trajectories", step_max=1)["rows"][0]["step"] == 1
    assert ask("group", purpose="train", step=2, uid="train-0")["step"] == 2
    for _ in range(3):
        ask("facets")
    assert ask("facets")["problems"] == []
    assert ask("trajectories")["total"] == 9 * 16


def test_a_table_that_is_full_gives_up_other_steps_for_those_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", steps=4, eval_every=0, failures=False)
    monkeypatch.setattr("skyrl_train.view.rollouts._MOST_ROWS", 32)
    monkeypatch.setattr("skyrl_train.view.rollouts._BYTES_AT_A_TIME", 1)
    ask = asked(tmp_path / "scratch", run)
    for _ in range(4):
        newest = ask("facets")
    assert (newest["step_min"], newest["step_max"], newest["num_trajectories"]) == (3, 4, 32)
    assert ask("trajectories", step_max=1)["total"] == 16
    assert ask("facets")["step_min"] == 1
