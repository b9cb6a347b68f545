"""Whole runs with images, some of which observations of a later turn show: recorded, replayed, and executed again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.data.sources import IMAGES
from skyrl_train.errors import DataError, ModelError
from skyrl_train.runs import train
from skyrl_train.telemetry.records import read_rollouts
from skyrl_train.trainers.capsules.record import read_batch
from tests.support import warm_python
from tests.support.command_runs import records
from tests.support.vision_runs import forget_images, png, rl_config, rl_settings, save_model, weights, write_rows

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_images(monkeypatch)


@pytest.fixture(scope="module", params=["qwen", pytest.param("gemma", marks=pytest.mark.nightly)])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of two steps with a capsule of each, and its settings."""
    folder = tmp_path_factory.mktemp(request.param)
    settings = rl_settings(save_model(folder / "model", request.param), write_rows(folder / "rows")[0])
    settings |= {"trainer.capsules": 2, "trainer.ckpt_interval": 2, "trainer.layout": "padded"}
    with pytest.MonkeyPatch.context() as patch:
        forget_images(patch)
        train(rl_config(folder / "run", settings))
    shutil.rmtree(folder / "rows")  # what follows finds its images in the run's folder alone
    return folder / "run", settings


def trained(run: Path) -> list[dict[str, Any]]:
    """The records of steps, without times."""
    found = records(run)
    return [
        {name: value for name, value in each.items() if "timing" not in name and "memory" not in name} for each in found
    ]


def test_rollouts_keep_where_images_stand_and_the_run_keeps_the_images(finished: tuple[Path, dict[str, Any]]) -> None:
    run, _ = finished
    batch = read_rollouts(run / "rollouts" / "train_step_000001.parquet")[1]
    turns = [trajectory.turns for trajectory in batch.trajectories]
    assert [len(each) for each in turns] == [2] * 8
    spans = [span for each in turns for turn in each for span in turn.images]
    assert len(spans) == 16
    sums = {span.image.key for span in spans}
    assert len(sums) == 8  # of four prompts, and of what is shown after each
    assert {file.name for file in (run / "images").iterdir()} == sums
    assert IMAGES.folder is None
    differences = [record["policy/rollout_logprob_diff_max"] for record in trained(run)]
    print(f"\nlargest differences between engine and trainer: {differences}")
    assert max(differences) < 1e-5


def test_a_replayed_run_trains_on_the_same_images(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, settings = finished
    replayed = {**settings, "generator.backend": "replay", "generator.replay_path": str(run / "rollouts")}
    train(rl_config(tmp_path / "again", replayed))
    names = [name for name in trained(run)[0] if name.startswith(("policy/", "loss", "advantages/"))]
    assert names
    for expected, found in zip(trained(run), trained(tmp_path / "again")):
        assert {name: found[name] for name in names} == {name: expected[name] for name in names}
    checkpoints = [each / "checkpoints/step_000002/policy" for each in (run, tmp_path / "again")]
    assert weights(checkpoints[:1]) == weights(checkpoints[1:])
    assert sorted(each.name for each in (run / "images").iterdir()) == sorted(
        each.name for each in (tmp_path / "again" / "images").iterdir()
    )


def test_a_replayed_run_says_which_image_is_missing_or_changed(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run, settings = finished
    shutil.copytree(run / "rollouts", tmp_path / "rollouts")
    shutil.copytree(run / "images", tmp_path / "images")
    replayed = {**settings, "generator.backend": "replay", "generator.replay_path": str(tmp_path / "rollouts")}
    (one, *_) = sorted((tmp_path / "images").iterdir())
    one.write_bytes(png(99))
    with pytest.raises(DataError, match=f"sha256:{one.name}: .* was changed"):
        train(rl_config(tmp_path / "changed", replayed))
    one.unlink()
    with pytest.raises(DataError, match=rf"sha256:{one.name} is not in .*{tmp_path}/images"):
        train(rl_config(tmp_path / "missing", replayed))
    with pytest.raises(ModelError, match="reads no images, and rollouts have some"):
        train(rl_config(tmp_path / "blind", {**replayed, "model.path": "builtin:tiny_qwen2"}))


@pytest.mark.nightly
def test_a_capsule_comes_out_again_bit_by_bit(finished: tuple[Path, dict[str, Any]]) -> None:
    run, _ = finished
    for step in (1, 2):
        done = warm_python.run("-m", "skyrl_train.main_capsule", "run", str(run), "--step", str(step))
        assert done.returncode == 0, done.stdout
        assert "every bit is compared" in done.stdout
    batch = read_batch(run / "capsules" / "step_000002" / "batch.safetensors")
    assert [len(spans) for spans in batch.metadata.images] == [2] * 8


def test_a_stream_trains_on_images_that_older_weights_were_shown_and_is_replayed(tmp_path: Path) -> None:
    settings = rl_settings(save_model(tmp_path / "model"), write_rows(tmp_path / "rows", 8)[0])
    settings |= {"trainer.total_steps": 3, "trainer.ckpt_interval": 3}
    train(rl_config(tmp_path / "stream", settings | {"trainer.max_staleness": 1}))
    found = trained(tmp_path / "stream")
    assert found[0]["policy/rollout_logprob_diff_max"] < 1e-5
    assert [each["off_policy/age/max"] for each in found] == [0, 1, 1]
    shown = {
        span.image.key
        for step in (1, 2, 3)
        for trajectory in read_rollouts(tmp_path / f"stream/rollouts/train_step_{step:06d}.parquet")[step].trajectories
        for turn in trajectory.turns
        for span in turn.images
    }
    assert shown <= {file.name for file in (tmp_path / "stream" / "images").iterdir()}
    recording = {"generator.backend": "replay", "generator.replay_path": str(tmp_path / "stream" / "rollouts")}
    train(rl_config(tmp_path / "again", settings | recording))
    checkpoints = [tmp_path / each / "checkpoints/step_000003/policy" for each in ("stream", "again")]
    assert weights(checkpoints[:1]) == weights(checkpoints[1:])
