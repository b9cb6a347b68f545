"""Checkpoints at a URL: whatever is cut off, fails, hangs or lags, a run goes on from what is there, as it would have."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import TrainerConfig
from skyrl_train.config.rules import validate_config
from skyrl_train.errors import CheckpointError, SaveError
from skyrl_train.trainers.checkpoints.store import CheckpointStore
from skyrl_train.trainers.evaluation.evaluate import read_evaluations
from tests.reliability import recordings
from tests.support.fakes_trainer import FakeLearner, FakeRun, fake_run, make_config, records_without_timings
from tests.support.stores import Bucket, Killed, empty_bucket

URL = "lab://bucket/run"
SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with empty_bucket() as found:
        yield found


def run_in(folder: Path, *, learner: FakeLearner | None = None, **trainer: Any) -> FakeRun:
    settings = {"ckpt_interval": 1, "checkpoint_url": URL, "checkpoint_timeout_s": 20.0, **trainer}
    return fake_run(folder, config=make_config(folder, **settings), learner=learner or FakeLearner())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run_in(folder, checkpoint_url="").run()
    return folder


def require_same(folder: Path, alone: Path) -> None:
    assert records_without_timings(folder / "metrics.jsonl") == records_without_timings(alone / "metrics.jsonl")
    assert (folder / "export" / "model.json").read_bytes() == (alone / "export" / "model.json").read_bytes()
    assert read_evaluations(folder / "evaluation.json") == read_evaluations(alone / "evaluation.json")
    for name in ("learner.json",):
        newest = folder / "checkpoints" / "step_000004" / "policy" / name
        assert newest.read_bytes() == (alone / "checkpoints" / "step_000004" / "policy" / name).read_bytes()


def checkpoints_in(bucket: Bucket) -> list[str]:
    names = {path.split("/")[3] for path in bucket.objects}
    return sorted(name.partition("-")[0] for name in names)


def pointer_of(bucket: Bucket) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bucket.objects["bucket/run/checkpoints/latest"])
    return found


def test_each_checkpoint_is_brought_to_the_url_and_older_ones_go(tmp_path: Path, bucket: Bucket, alone: Path) -> None:
    run_in(tmp_path).run()
    require_same(tmp_path, alone)
    assert checkpoints_in(bucket) == ["latest", "step_000003", "step_000004"]
    kept = pointer_of(bucket)["checkpoints"]
    assert [name.partition("-")[0] for name in kept] == ["step_000004", "step_000003"]
    manifest = json.loads(bucket.objects[f"bucket/run/checkpoints/{kept[0]}/manifest.json"])
    assert {"policy/learner.json", "trainer_state.json", "history/metrics.jsonl"} <= manifest["files"].keys()


def test_files_come_first_then_the_manifest_then_the_pointer_then_removals(tmp_path: Path, bucket: Bucket) -> None:
    run_in(tmp_path, max_ckpts_to_keep=1, total_steps=2).run()
    second = [said.removeprefix("put bucket/run/checkpoints/") for said, _ in bucket.states]
    second = second[[index for index, said in enumerate(second) if said == "latest"][1] + 1 :]
    last = second.index("latest")
    assert second[last - 1].endswith("/manifest.json")
    assert all(said.startswith("step_000002-") for said in second[:last] if not said.startswith("rm "))
    assert second[last + 1 :]
    assert all(said.startswith("rm bucket/run/checkpoints/step_000001-") for said in second[last + 1 :])


def states_of_a_run(bucket: Bucket, folder: Path, **trainer: Any) -> list[tuple[str, dict[str, bytes]]]:
    run_in(folder, **trainer).run()
    return list(bucket.states)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "stride"), [(1, 4), pytest.param(1, 1, marks=NIGHTLY), pytest.param(2, 1, marks=NIGHTLY)]
)
def test_cut_after_any_operation_a_lost_run_goes_on_from_what_is_there(
    tmp_path: Path, bucket: Bucket, alone: Path, keep: int, stride: int
) -> None:
    states = states_of_a_run(bucket, tmp_path / "first", max_ckpts_to_keep=keep)
    assert len(states) > 25
    reached = set()
    for index, (_, objects) in list(enumerate(states))[::-stride]:
        folder = tmp_path / f"{index}"
        bucket.objects, bucket.states = dict(objects), []
        run = run_in(folder, max_ckpts_to_keep=keep)
        reached.add(run.start().global_step)
        run.run()
        require_same(folder, alone)
        assert checkpoints_in(bucket)[0] == "latest"
        assert len(checkpoints_in(bucket)) == 1 + keep
        shutil.rmtree(folder)
    assert reached >= {2, 3, 4}


@SLOW
def test_no_later_cut_goes_on_from_an_earlier_step(tmp_path: Path, bucket: Bucket) -> None:
    steps = []
    for index, (_, objects) in enumerate(states_of_a_run(bucket, tmp_path / "first")):
        bucket.objects = dict(objects)
        steps.append(run_in(tmp_path / f"{index}").start().global_step)
    assert steps == sorted(steps)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=NIGHTLY)])
def test_killed_in_any_operation_the_same_folder_goes_on_and_the_url_catches_up(
    tmp_path: Path, bucket: Bucket, alone: Path, stride: int
) -> None:
    count = len(states_of_a_run(bucket, tmp_path / "first"))
    for kill_at in range(count - 1, 0, -stride):
        with empty_bucket() as fresh:
            fresh.hook = lambda operation, path, kill_at=kill_at: kill(fresh, operation, kill_at)
            folder = tmp_path / f"{kill_at}"
            with pytest.raises(Killed):
                run_in(folder).run()
            fresh.hook = lambda operation, path: None
            run_in(folder).run()
            require_same(folder, alone)
            assert checkpoints_in(fresh) == ["latest", "step_000003", "step_000004"]


def kill(bucket: Bucket, operation: str, after: int) -> None:
    if operation in ("put", "rm") and len(bucket.states) >= after:
        raise Killed


def test_what_the_folder_lost_comes_back_with_the_record_of_its_run(
    tmp_path: Path, bucket: Bucket, alone: Path
) -> None:
    run_in(tmp_path / "first", total_steps=4).run()
    pointer = pointer_of(bucket)
    del bucket.objects[f"bucket/run/checkpoints/{pointer['checkpoints'][0]}/manifest.json"]
    run = run_in(tmp_path / "second")
    assert run.start().global_step == 3  # the newest lacks a file
    run.run()
    require_same(tmp_path / "second", alone)


def test_a_run_that_is_killed_behind_its_download_has_the_record_at_the_next_start(
    tmp_path: Path, bucket: Bucket, alone: Path
) -> None:
    run_in(tmp_path / "first").run()
    assert run_in(tmp_path / "second").start().global_step == 4
    run_in(tmp_path / "second").run()
    require_same(tmp_path / "second", alone)


def damaged_pointer(bucket: Bucket) -> None:
    bucket.objects["bucket/run/checkpoints/latest"] = b'{"format": 1, "che'


def missing_pointer(bucket: Bucket) -> None:
    del bucket.objects["bucket/run/checkpoints/latest"]


def escaping_pointer(bucket: Bucket) -> None:
    entries = {"format": 1, "writer": "", "checkpoints": ["../../secret"], "set_aside": []}
    bucket.objects["bucket/run/checkpoints/latest"] = json.dumps(entries).encode()


def flip_a_byte(bucket: Bucket) -> None:
    name = pointer_of(bucket)["checkpoints"][0]
    path = f"bucket/run/checkpoints/{name}/policy/learner.json"
    bucket.objects[path] = bytes([bucket.objects[path][0] ^ 1]) + bucket.objects[path][1:]


def another_manifest(bucket: Bucket) -> None:
    first, second = pointer_of(bucket)["checkpoints"]
    paths = [f"bucket/run/checkpoints/{name}/manifest.json" for name in (first, second)]
    bucket.objects[paths[0]] = bucket.objects[paths[1]]


def delete_a_file(bucket: Bucket) -> None:
    del bucket.objects[f"bucket/run/checkpoints/{pointer_of(bucket)['checkpoints'][0]}/trainer_state.json"]


@pytest.mark.parametrize(
    ("damage", "step", "told"),
    [
        (damaged_pointer, 4, "latest is damaged"),
        (missing_pointer, 4, ""),
        (escaping_pointer, 4, "latest is damaged"),
        (flip_a_byte, 3, "policy/learner.json does not have the SHA-256 sum"),
        (another_manifest, 3, "manifest.json does not have the SHA-256 sum in the name"),
        (delete_a_file, 3, "a file is missing"),
    ],
)
def test_damage_is_passed_over_with_its_reason(
    tmp_path: Path,
    bucket: Bucket,
    damage: Callable[[Bucket], None],
    step: int,
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_in(tmp_path / "first").run()
    damage(bucket)
    assert run_in(tmp_path / "second").start().global_step == step
    assert told in caplog.text
    assert not list((tmp_path / "second" / "checkpoints").glob(".tmp-*"))


def test_where_none_is_whole_the_run_does_not_silently_begin_again(tmp_path: Path, bucket: Bucket) -> None:
    run_in(tmp_path / "first", max_ckpts_to_keep=1).run()
    flip_a_byte(bucket)
    with pytest.raises(CheckpointError, match=r"no checkpoint under lab://bucket/run/checkpoints is whole"):
        run_in(tmp_path / "second").start()


def test_a_store_that_does_not_answer_is_no_reason_to_go_back(tmp_path: Path, bucket: Bucket) -> None:
    run_in(tmp_path / "first").run()

    def refuse(operation: str, path: str) -> None:
        if operation == "get" and path.endswith("learner.json"):
            raise ConnectionError("reset by peer")

    bucket.hook = refuse
    with pytest.raises(SaveError, match=r"download of step_000004-\w+ failed: ConnectionError: reset by peer"):
        run_in(tmp_path / "second").start()


@pytest.mark.parametrize("error", [OSError(5, "busy"), PermissionError("denied"), RuntimeError("of a library")])
@pytest.mark.parametrize("failing", ["learner.json", "manifest.json", "latest"])
def test_a_store_that_fails_once_is_tried_again_after_the_next_step(
    tmp_path: Path, bucket: Bucket, alone: Path, failing: str, error: Exception
) -> None:
    seen = []

    def fail_once(operation: str, path: str) -> None:
        if (
            operation == "put"
            and path.endswith(failing)
            and not seen
            and any("step_" in said for said, _ in bucket.states)
        ):
            seen.append(path)
            raise error

    bucket.hook = fail_once
    run = run_in(tmp_path)
    run.run()
    said = run.output.getvalue()
    assert "could not be written in full (1 of at most trainer.max_failed_saves=3 steps in a row)" in said
    assert type(error).__name__ in said
    require_same(tmp_path, alone)
    assert checkpoints_in(bucket) == ["latest", "step_000003", "step_000004"]


def test_a_store_that_goes_on_failing_ends_the_run_and_the_same_command_ends_it_well(
    tmp_path: Path, bucket: Bucket, alone: Path
) -> None:
    def refuse(operation: str, path: str) -> None:
        if operation == "put" and "step_" in path:
            raise OSError(28, "quota exceeded")

    bucket.hook = refuse
    with pytest.raises(SaveError, match=r"step 2 could not be written .*quota exceeded.*Its weights are in"):
        run_in(tmp_path, max_failed_saves=2).run()
    bucket.hook = lambda operation, path: None
    run_in(tmp_path).run()
    require_same(tmp_path, alone)
    assert checkpoints_in(bucket) == ["latest", "step_000003", "step_000004"]


def test_a_call_that_hangs_is_given_up_and_what_it_does_later_breaks_nothing(
    tmp_path: Path, bucket: Bucket, alone: Path
) -> None:
    hung = []

    def hang_once(operation: str, path: str) -> None:
        if operation == "put" and path.endswith("latest") and "step_" in "".join(bucket.objects) and not hung:
            hung.append(path)
            time.sleep(1.0)  # and then takes effect

    bucket.hook = hang_once
    run = run_in(tmp_path / "first", checkpoint_timeout_s=0.4)
    run.run()
    assert "did not answer within 0.4 s" in run.output.getvalue()
    time.sleep(1.2)
    run_in(tmp_path / "second").run()
    require_same(tmp_path / "second", alone)


@pytest.mark.parametrize("lag", [1, 3, 8, 20])
def test_listings_that_lag_behind_change_nothing_but_when_things_are_removed(
    tmp_path: Path, bucket: Bucket, alone: Path, lag: int
) -> None:
    bucket.lag = lag
    run_in(tmp_path / "first").run()
    kept = {name.partition("-")[0] for name in pointer_of(bucket)["checkpoints"]}
    assert kept == {"step_000003", "step_000004"}
    assert kept <= set(checkpoints_in(bucket))
    run_in(tmp_path / "second").run()
    require_same(tmp_path / "second", alone)


def test_a_run_that_goes_back_sets_later_checkpoints_aside(tmp_path: Path, bucket: Bucket, alone: Path) -> None:
    run_in(tmp_path / "first", max_ckpts_to_keep=3).run()
    newest, third, second = pointer_of(bucket)["checkpoints"]
    run = run_in(tmp_path / "second", resume_mode="from_path", resume_path=f"{URL}/checkpoints/{second}")
    assert run.start().global_step == 2
    run.run()
    require_same(tmp_path / "second", alone)
    assert pointer_of(bucket)["set_aside"] == [newest, third]
    assert f"bucket/run/checkpoints/{newest}/manifest.json" in bucket.objects


def test_a_run_that_begins_anew_at_the_same_url_removes_nothing(tmp_path: Path, bucket: Bucket) -> None:
    run_in(tmp_path / "first").run()
    old = pointer_of(bucket)["checkpoints"]
    run_in(tmp_path / "second", resume_mode="none", total_steps=1, max_ckpts_to_keep=1).run()
    assert [name.partition("-")[0] for name in pointer_of(bucket)["checkpoints"]] == ["step_000001"]
    assert pointer_of(bucket)["set_aside"] == old
    assert all(f"bucket/run/checkpoints/{name}/manifest.json" in bucket.objects for name in old)


def test_a_folder_behind_its_url_goes_on_from_the_url(tmp_path: Path, bucket: Bucket, alone: Path) -> None:
    first = replace(run_in(tmp_path / "first"), on_call=killed_in(3))
    with pytest.raises(Killed):
        first.run()
    second = replace(run_in(tmp_path / "second"), on_call=killed_in(4))
    with pytest.raises(Killed):
        second.run()  # which went on from step 2 and saved step 3
    again = run_in(tmp_path / "first")
    assert again.start().global_step == 3
    again.run()
    require_same(tmp_path / "first", alone)


def killed_in(step: int) -> Callable[[int, str], None]:
    def on_call(current: int, purpose: str) -> None:
        if (current, purpose) == (step, "train"):
            raise Killed

    return on_call


def test_a_second_run_at_the_same_url_is_noticed(tmp_path: Path, bucket: Bucket) -> None:
    def another_takes_over(step: int, purpose: str) -> None:
        if (step, purpose) == (2, "train"):
            other = CheckpointStore(tmp_path / "other", keep=1, url=f"{URL}/checkpoints")
            other.take_over(None)

    run = replace(run_in(tmp_path / "first", max_failed_saves=1), on_call=another_takes_over)
    with pytest.raises(SaveError, match=r"lab://bucket/run/checkpoints was taken by another run"):
        run.run()


def test_a_new_run_forks_from_a_url(tmp_path: Path, bucket: Bucket) -> None:
    run_in(tmp_path / "first").run()
    fork = run_in(
        tmp_path / "fork",
        resume_mode="fork",
        resume_path=URL,
        checkpoint_url="lab://bucket/fork",
        total_steps=5,
        policy_mini_batch_size=4,
    )
    assert fork.start().global_step == 4
    fork.run()
    assert json.loads((tmp_path / "fork" / "fork.json").read_text())["resume_path"] == URL
    assert "bucket/fork/checkpoints/latest" in bucket.objects


def test_a_file_url_is_a_folder(tmp_path: Path, alone: Path) -> None:
    url = f"file://{tmp_path}/mounted/run"
    run_in(tmp_path / "first", checkpoint_url=url).run()
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "mounted/run/checkpoints").iterdir()) == [
        "latest",
        "step_000003",
        "step_000004",
    ]
    run_in(tmp_path / "second", checkpoint_url=url).run()
    require_same(tmp_path / "second", alone)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s3://bucket/run", r"needs a package for s3:// that is not installed; .* Pip install s3fs"),
        ("gs://bucket/run", r"needs a package for gs:// that is not installed; .* Pip install gcsfs"),
        ("abfs://bucket/run", r"needs a package for abfs:// that is not installed; .* Pip install adlfs"),
        ("s4://bucket/run", r"must be a URL that fsspec knows"),
        ("bucket/run", r"must be a URL that fsspec knows, .* Try s3://BUCKET/RUN"),
        ("memory://x", r"of a place that outlives the run; .* Try s3://BUCKET/RUN"),
        ("s3://", r"must be a URL that fsspec knows"),
    ],
)
def test_a_url_that_nothing_can_reach_is_refused_before_anything_starts(tmp_path: Path, url: str, told: str) -> None:
    config = make_config(tmp_path, checkpoint_url=url)
    (violation,) = [each for each in validate_config(config) if "url" in each.field]
    assert violation.field == "trainer.checkpoint_url"
    assert re.search(told, str(violation)), violation


def test_a_store_without_access_is_refused_when_it_is_opened(tmp_path: Path, bucket: Bucket) -> None:
    def refuse(operation: str, path: str) -> None:
        raise PermissionError("Forbidden: no credentials")

    bucket.hook = refuse
    with pytest.raises(SaveError, match=r"lab://bucket/run/checkpoints: .* PermissionError: Forbidden.*credentials"):
        run_in(tmp_path)


def test_a_fork_needs_a_url_of_its_own(tmp_path: Path) -> None:
    trainer: dict[str, Any] = {
        "resume_mode": "fork",
        "resume_path": "file:///tmp/a/b",
        "checkpoint_url": "file:///tmp/a/b",
    }
    assert TrainerConfig(**trainer)
    (violation,) = validate_config(make_config(tmp_path, **trainer))
    assert "must be another than that of the run that is forked" in str(violation)
    assert not validate_config(make_config(tmp_path, **{**trainer, "checkpoint_url": "file:///tmp/a/b2"}))
    assert not validate_config(make_config(tmp_path, **{**trainer, "resume_path": "file:///tmp/a/b2"}))


def run_command(kind: recordings.Kind, folder: Path, model: Path, *more: str, kill_at: int | None = None) -> int:
    """The exit status of the real command in `folder`, killed after the step `kill_at`."""
    command = [sys.executable, "-m", recordings.KINDS[kind][0], f"hydra.run.dir={folder}"]
    done = subprocess.run(
        [*command, *recordings.overrides(kind, model), *more],
        cwd=recordings.REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", recordings.KILL_AT: str(kill_at)},
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()[-3000:]
    return done.returncode


@SLOW
@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_the_real_command_goes_on_from_the_url_alone_byte_for_byte(tmp_path: Path, kind: recordings.Kind) -> None:
    model = recordings.build_model(tmp_path / "model")
    url = f"trainer.checkpoint_url=file://{tmp_path}/url"
    assert run_command(kind, tmp_path / "alone", model) == 0
    assert run_command(kind, tmp_path / "lost", model, url, kill_at=3) == -signal.SIGKILL
    shutil.rmtree(tmp_path / "lost")
    assert run_command(kind, tmp_path / "again", model, url) == 0
    assert not (tmp_path / "again" / "checkpoints" / "step_000002").exists()  # it went on behind it
    for name in ("export/model.safetensors", "checkpoints/step_000005/policy/optimizer.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    found, expected = (records_without_timings(tmp_path / name / "metrics.jsonl") for name in ("again", "alone"))
    assert found == expected
