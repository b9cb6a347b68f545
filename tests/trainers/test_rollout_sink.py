import math
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from pyarrow.parquet import read_table

from skyrl_train.config import RolloutsConfig
from skyrl_train.errors import DataError, DeadlineError, SkyrlTrainError, StopRequested
from skyrl_train.rollout.stream import ReplayGenerator
from skyrl_train.runs import assembler
from skyrl_train.telemetry.records import read_facts, read_failed_rollouts, read_rollouts
from skyrl_train.trainers import rollout_sink
from skyrl_train.trainers.observers import StepInputs
from skyrl_train.trainers.rollout_sink import RolloutLog, columns_by_turn, cut_rollouts_after
from skyrl_train.types import RolloutBatch
from tests.support.fakes_trainer import failed_trajectory, make_config, make_prompts, make_trajectory, make_turn

TRAJECTORIES = (
    make_trajectory(make_turn((1, 2), (3, 4)), make_turn((1, 2, 3, 4, 9), (5,)), sample=0),
    failed_trajectory(sample=1),
    make_trajectory(make_turn((1, 2), (6, 7, 8)), sample=2),
)
ROLLOUTS = RolloutBatch(prompts=tuple(make_prompts(1)), trajectories=TRAJECTORIES, n_samples_per_prompt=3)


def numbered_batch(tmp_path, *, step_wise: bool, rows="per_trajectory", rollouts=ROLLOUTS):
    """The advantage of each trained token is its place among the trained tokens."""
    size = len(rollouts.prompts)
    config = make_config(tmp_path, train_batch_size=size, policy_mini_batch_size=size)
    generator = replace(
        config.generator,
        n_samples_per_prompt=rollouts.n_samples_per_prompt,
        step_wise_trajectories=step_wise,
        trajectory_rows=rows,
    )
    batch = assembler(replace(config, generator=generator))(rollouts, step=1, weight_version=0)
    numbers = torch.cumsum(batch["loss_mask"], 0).float()
    return batch.with_columns(advantages=torch.where(batch["loss_mask"], numbers, torch.tensor(-1.0)))


def advantages_by_turn(rollouts, batch):
    found = columns_by_turn(rollouts, batch)["advantages"]
    return [turns and [values.tolist() for values in turns] for turns in found]


@pytest.mark.parametrize("step_wise", [False, True])
def test_advantages_go_to_the_turns_whose_tokens_have_them(tmp_path, step_wise):
    batch = numbered_batch(tmp_path, step_wise=step_wise)
    assert advantages_by_turn(ROLLOUTS, batch) == [[[1.0, 2.0], [3.0]], None, [[4.0, 5.0, 6.0]]]


def test_what_was_scored_goes_to_the_turns_too(tmp_path):
    batch = numbered_batch(tmp_path, step_wise=False)
    batch = batch.with_columns(old_logprobs=-batch["advantages"], ref_logprobs=batch["advantages"] / 2)
    columns = columns_by_turn(ROLLOUTS, batch)
    assert list(columns) == ["advantages", "policy_logprobs", "reference_logprobs"]
    assert [each.tolist() for each in columns["policy_logprobs"][2]] == [[-4.0, -5.0, -6.0]]
    assert [each.tolist() for each in columns["reference_logprobs"][0]] == [[0.5, 1.0], [1.5]]


def test_what_was_not_scored_has_no_log_probabilities(tmp_path):
    batch = numbered_batch(tmp_path, step_wise=False)
    batch = batch.with_columns(old_logprobs=-batch["advantages"], ref_logprobs=batch["advantages"] / 2)
    batch = replace(batch, metadata=replace(batch.metadata, first_scored_row=1))
    columns = columns_by_turn(ROLLOUTS, batch)
    assert columns["policy_logprobs"][0] is None
    assert [each.tolist() for each in columns["policy_logprobs"][2]] == [[-4.0, -5.0, -6.0]]
    assert [each.tolist() for each in columns["reference_logprobs"][0]] == [[0.5, 1.0], [1.5]]


def in_chunks(trajectory, *, sizes):
    ends = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    return [trajectory.turns[start:stop] for start, stop in pairwise(ends)]


@pytest.mark.parametrize("sizes", [[2, 1, 1], [1, 2, 1], [2, 2]])
def test_advantages_of_rows_with_several_turns_go_to_their_turns(tmp_path, sizes):
    """The third turn starts anew: its row is shorter than the one before it."""
    roots = sizes != [1, 2, 1]
    turns = (
        make_turn((1, 2), (3, 4)),
        make_turn((1, 2, 3, 4, 9), (5,)),
        make_turn((7,), (8, 8)) if roots else make_turn((1, 2, 3, 4, 9, 5, 9), (8, 8)),
        make_turn((7, 8, 8, 9), (6,)) if roots else make_turn((1, 3), (6,)),
    )
    rollouts = RolloutBatch(
        prompts=tuple(make_prompts(1)), trajectories=(make_trajectory(*turns),), n_samples_per_prompt=1
    )
    rows = {"_target_": f"{__name__}:in_chunks", "sizes": sizes}
    batch = numbered_batch(tmp_path, step_wise=False, rows=rows, rollouts=rollouts)
    assert batch.num_rows == len(sizes)
    assert advantages_by_turn(rollouts, batch) == [[[1.0, 2.0], [3.0], [4.0, 5.0], [6.0]]]


def test_what_is_flushed_is_on_disk(tmp_path):
    log = RolloutLog(tmp_path / "rollouts")
    log.write(ROLLOUTS, numbered_batch(tmp_path, step_wise=False), step=7)
    log.write_evaluation(7, ROLLOUTS)
    log.flush()
    rows = read_table(tmp_path / "rollouts" / "train_step_000007.parquet").to_pylist()
    assert [row["advantages"] for row in rows] == [[1.0, 2.0], [3.0], None, [4.0, 5.0, 6.0]]
    assert read_rollouts(tmp_path / "rollouts" / "eval_step_000007.parquet") == {7: ROLLOUTS}
    log.close()


def written(tmp_path, *, steps=(1,), rollouts=ROLLOUTS, **settings):
    log = RolloutLog(tmp_path / "rollouts", RolloutsConfig(**settings))
    batch = numbered_batch(tmp_path / "batch", step_wise=False, rollouts=rollouts)
    batch = batch.with_columns(old_logprobs=-batch["advantages"] / 3)
    for step in steps:
        log.write(rollouts, batch, step=step)
        log.write_evaluation(step, rollouts)
    log.flush()
    log.close()
    return tmp_path / "rollouts"


def test_columns_that_are_not_asked_for_are_not_written(tmp_path):
    (tmp_path / "batch").mkdir()
    asked = ("policy_logprobs", "reference_logprobs")
    file = written(tmp_path, columns=asked, columns_dtype="bfloat16") / "train_step_000001.parquet"
    rows = read_table(file).to_pylist()
    assert {row["advantages"] for row in rows} == {None}
    assert rows[0]["policy_logprobs"] == [-0.333984375, -0.66796875]
    assert read_facts(file).float_columns == {"policy_logprobs": "bfloat16"}


def test_older_steps_are_deleted_but_not_failed_ones(tmp_path):
    (tmp_path / "batch").mkdir()
    (tmp_path / "rollouts").mkdir()
    for name in ("train_step_000001.jsonl", "eval_step_000000.parquet", "failed_step_000001.parquet", "notes.txt"):
        (tmp_path / "rollouts" / name).touch()
    folder = written(tmp_path, steps=(2, 3, 4), keep_last=2)
    assert sorted(path.name for path in folder.iterdir()) == [
        "eval_step_000003.parquet",
        "eval_step_000004.parquet",
        "failed_step_000001.parquet",
        "notes.txt",
        "train_step_000003.parquet",
        "train_step_000004.parquet",
    ]


def test_a_share_of_the_prompts_is_the_same_at_each_step_and_is_not_replayed(tmp_path):
    (tmp_path / "batch").mkdir()
    prompts = make_prompts(10)
    trajectories = tuple(
        make_trajectory(make_turn((1, 2), (3, 4)), uid=prompt.uid, sample=sample)
        for prompt in prompts
        for sample in range(2)
    )
    rollouts = RolloutBatch(prompts=tuple(prompts), trajectories=trajectories, n_samples_per_prompt=2)
    folder = written(tmp_path, steps=(1, 2), rollouts=rollouts, sample_fraction=0.25)
    one, two = (read_rollouts(folder / f"train_step_00000{step}.parquet")[step] for step in (1, 2))
    assert one == two
    kept = [prompt.uid for prompt in one.prompts]
    assert len(kept) == 3
    assert kept == [prompt.uid for prompt in prompts if prompt.uid in kept]
    assert [each.prompt_uid for each in one.trajectories] == [uid for uid in kept for _ in range(2)]
    first = read_table(folder / "train_step_000001.parquet").to_pylist()[0]
    place = trajectories.index(one.trajectories[0])
    assert first["advantages"] == [2.0 * place + 1, 2.0 * place + 2]
    assert read_rollouts(folder / "eval_step_000001.parquet") == {1: rollouts}
    with pytest.raises(DataError, match=r"holds 0.25 of its step's prompts.*rollouts.sample_fraction=1"):
        ReplayGenerator(folder)


def test_a_full_disk_is_reported_at_the_flush(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rollout_sink, "write_rollouts", full)
    log = RolloutLog(tmp_path)
    log.write_evaluation(1, ROLLOUTS)
    with pytest.raises(SkyrlTrainError, match=r"No space left on device.*trainer\.dump_rollouts=false"):
        log.flush()
    log.flush()
    log.close()


def test_a_disk_that_hangs_is_a_deadline(tmp_path, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(rollout_sink, "write_rollouts", lambda *args, **kwargs: release.wait(10))
    log = RolloutLog(tmp_path, flush_timeout_s=0.01)
    log.write_evaluation(1, ROLLOUTS)
    with pytest.raises(DeadlineError, match="writing rollouts"):
        log.flush()
    release.set()
    log.close()


def test_a_writer_that_hangs_is_not_waited_for_at_the_end(tmp_path, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(rollout_sink, "write_rollouts", lambda *args, **kwargs: release.wait(10))
    log = RolloutLog(tmp_path, close_timeout_s=0.01)
    log.write_evaluation(1, ROLLOUTS)
    with pytest.raises(DeadlineError, match="writing rollouts"):
        log.close()
    release.set()
    log.close()


def fail(log, step, error, rollouts=None):
    with log.failures_kept(step, StepInputs(rollouts=rollouts)):
        raise error


def test_a_step_that_fails_leaves_its_rollouts_with_the_error_in_place_of_its_own_file(tmp_path):
    log = RolloutLog(tmp_path)
    log.write(ROLLOUTS, numbered_batch(tmp_path / "batch", step_wise=False), step=7)
    with pytest.raises(SkyrlTrainError, match="no weight was changed"):
        fail(log, 7, SkyrlTrainError("no weight was changed, api_key=abc"), ROLLOUTS)
    log.close()
    assert [path.name for path in tmp_path.glob("*step*")] == ["failed_step_000007.parquet"]
    lines = read_table(tmp_path / "failed_step_000007.parquet").to_pylist()
    assert [line["outcome"] for line in lines] == ["done", "done", "failed", "done"]
    assert {line["error"] for line in lines} == {"SkyrlTrainError: no weight was changed, api_key=<redacted>"}
    assert {line["purpose"] for line in lines} == {"failed"}


def test_generating_that_fails_leaves_what_was_complete_even_where_it_is_not_finite(tmp_path):
    log, error = RolloutLog(tmp_path), SkyrlTrainError("2 of 3 trajectories failed")
    infinite = make_trajectory(replace(make_turn((1, 2), (3, 4)), reward=math.inf), sample=0)
    error.trajectories = ((ROLLOUTS.prompts[0], TRAJECTORIES[1]), (ROLLOUTS.prompts[0], infinite))
    with pytest.raises(SkyrlTrainError):
        fail(log, 3, error)
    log.close()
    (_, failed), (_, other) = read_failed_rollouts(tmp_path / "failed_step_000003.parquet")
    assert failed.failure == TRAJECTORIES[1].failure
    assert other.turns[0].reward == math.inf


def test_a_stop_is_no_failure(tmp_path):
    log = RolloutLog(tmp_path)
    with pytest.raises(StopRequested):
        fail(log, 3, StopRequested("SIGTERM", 3), ROLLOUTS)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_later_steps_and_torn_files_are_cut(tmp_path):
    kept = ["train_step_000002.parquet", "train_step_000001.jsonl", "eval_step_000000.jsonl", "notes.txt"]
    cut = [
        "train_step_000003.jsonl",
        "train_step_000003.parquet",
        "failed_step_000003.parquet",
        "eval_step_000004.jsonl",
        ".train_step_000001.jsonl.tmp",
        ".train_step_000002.parquet.tmp",
    ]
    for name in kept + cut:
        (tmp_path / name).touch()
    cut_rollouts_after(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == set(kept)
