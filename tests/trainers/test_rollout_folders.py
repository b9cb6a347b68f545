"""Rollouts of a step that several nodes write: a folder that appears whole or not at all, and reads as one file would."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from pyarrow.parquet import read_table

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.plane import DataPlane
from skyrl_train.config import RolloutsConfig
from skyrl_train.errors import DataError, SaveError
from skyrl_train.rollout.stream import ReplayGenerator
from skyrl_train.runs import assembler
from skyrl_train.runs.capsule import open_capsule
from skyrl_train.runs.planning import _lengths
from skyrl_train.telemetry.records import KINDS, read_columns, read_facts, read_rollouts, rollouts_sum, write_parts
from skyrl_train.trainers import RolloutLog
from skyrl_train.trainers.capsules.record import Capsule
from skyrl_train.trainers.checkpoints.folder import verify
from skyrl_train.trainers.rollout_sink import cut_rollouts_after
from skyrl_train.types import RolloutBatch, SamplingParams
from tests.reliability.file_operations import FileOperations
from tests.support.fakes_trainer import (
    failed_trajectory,
    fake_run,
    make_config,
    make_prompts,
    make_trajectory,
    make_turn,
)
from tests.support.kills import Killed, killed_in
from tests.support.rollout_folders import TwoPlaces

NAME = "train_step_000007.parquet"


def made(folder: Path, prompts: int = 6) -> tuple[RolloutBatch, TrainingInputBatch]:
    """Groups of three, one of which failed; the first five rows were not scored. Each token has numbers of its own."""
    trajectories = []
    for number, prompt in enumerate(make_prompts(prompts)):
        first, long = make_turn((1, number), (3, 4)), make_turn((1, number, 3, 4, 9), range(5, 6 + number))
        group = (
            make_trajectory(first, long, sample=0),
            failed_trajectory(sample=1),
            make_trajectory(first, sample=2),
        )
        trajectories += [replace(each, prompt_uid=prompt.uid) for each in group]
    rollouts = RolloutBatch(
        prompts=tuple(make_prompts(prompts)), trajectories=tuple(trajectories), n_samples_per_prompt=3
    )
    config = make_config(folder, train_batch_size=prompts, policy_mini_batch_size=2)
    config = replace(config, generator=replace(config.generator, n_samples_per_prompt=3, step_wise_trajectories=True))
    batch = assembler(config)(rollouts, step=7, weight_version=0)
    numbers = torch.cumsum(batch["loss_mask"], 0).float()
    batch = batch.with_columns(advantages=numbers, old_logprobs=-numbers / 3, ref_logprobs=-numbers / 7)
    return rollouts, replace(batch, metadata=replace(batch.metadata, first_scored_row=5))


def written(folder: Path, plane: DataPlane, **settings: Any) -> Path:
    """Where step 7 is."""
    log = RolloutLog(folder, RolloutsConfig(**settings), plane=plane)
    log.write(*made(folder / "batch"), step=7)
    log.flush()
    log.close()
    return folder / NAME


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("rollouts"), TwoPlaces())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"columns": ("reference_logprobs", "policy_logprobs"), "columns_dtype": "bfloat16"},
        {"sample_fraction": 0.6},
    ],
)
def test_a_folder_reads_as_the_one_file_does_to_the_last_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    file = written(tmp_path / "one", DataPlane(), **settings)
    folder = written(tmp_path / "two", TwoPlaces(), **settings)
    assert (file.is_file(), sorted(each.name for each in folder.iterdir())) == (
        True,
        ["_index.json", "part-00000.parquet", "part-00001.parquet"],
    )
    assert read_rollouts(folder) == read_rollouts(file)
    assert read_facts(folder) == read_facts(file)
    columns = read_columns(folder, tuple(KINDS))
    assert columns.equals(read_table(file).select(columns.column_names))
    assert columns.num_columns == len(KINDS)
    others = pandas.read_parquet(folder).sort_values(["uid", "sample", "turn"])["text"].tolist()
    assert others == pandas.read_parquet(file).sort_values(["uid", "sample", "turn"])["text"].tolist()


def test_the_index_says_which_trajectories_of_the_batch_each_part_has(whole: Path) -> None:
    index = json.loads((whole / "_index.json").read_text())
    assert (index["format"], index["trajectories"]) == (1, 18)
    assert [part["ranges"] for part in index["parts"]] == [[[0, 3], [6, 12], [15, 18]], [[3, 6], [12, 15]]]
    assert [part["trajectories"] for part in index["parts"]] == [12, 6]
    sums = [rollouts_sum(whole / part["file"]) for part in index["parts"]]
    assert [(part["bytes"], part["sha256"]) for part in index["parts"]] == sums


def test_a_part_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    class FullDisk(TwoPlaces):
        def save(self, function: Callable[..., Any], calls: Any) -> Any:
            first, *_ = calls.values()
            function(*first)
            raise SaveError("No space left on device")

    log = RolloutLog(tmp_path, plane=FullDisk())
    log.write(*made(tmp_path / "batch"), step=7)
    with pytest.raises(SaveError, match=r"No space left on device.*trainer.dump_rollouts=false"):
        log.flush()
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_is_not_on_this_disk_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match=r"part-00000.parquet: its node wrote 4 bytes.*share no folder"):
        write_parts(tmp_path, 7, [[0]], lambda: [(4, "")])
    assert list(tmp_path.iterdir()) == []


def test_whenever_the_writer_is_killed_the_folder_is_whole_or_the_next_start_removes_what_is_left(
    tmp_path: Path, whole: Path
) -> None:
    places = [[*range(3), *range(6, 12), *range(15, 18)], [*range(3, 6), *range(12, 15)]]
    parts = sorted(whole.glob("part-*"))
    expected, outcomes = read_rollouts(whole), []

    def write(folder: Path) -> list[tuple[int, str]]:
        for part in parts:
            (folder / f".{NAME}.tmp" / part.name).write_bytes(part.read_bytes())
        return list(map(rollouts_sum, parts))

    for killed_at in range(1, 100):
        folder = tmp_path / str(killed_at)
        folder.mkdir()
        if (child := os.fork()) == 0:
            os.setsid()
            FileOperations(folder, killed_at)
            write_parts(folder, 7, places, lambda: write(folder))  # noqa: B023
            os.kill(os.getpid(), signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        outcomes.append((folder / NAME).exists())
        assert not outcomes[-1] or read_rollouts(folder / NAME) == expected
        cut_rollouts_after(folder, 7)
        assert [each.name for each in folder.iterdir()] == [NAME] * outcomes[-1]
        if os.WTERMSIG(status) == signal.SIGTERM:  # it got to its end
            break
    assert len(outcomes) > 5
    assert outcomes == sorted(outcomes)
    assert outcomes[-1]


def index_with(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda index: index.update(changes)


def part_with(number: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["parts"][number].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (index_with(format=2), "its format is 2, and 1 is what this version reads"),
        (index_with(parts=[]), "it lists 0 trajectories, and there were 18"),
        (index_with(trajectories=19), "it lists 18 trajectories, and there were 19"),
        (index_with(trajectories="18"), "trajectories must be a whole number"),
        (index_with(parts=7), "TypeError"),
        (lambda index: index.pop("parts"), "KeyError: 'parts'"),
        (lambda index: index["parts"].reverse(), r"it names 'part-00001.parquet' where part-00000.parquet belongs"),
        (part_with(1, file="../x"), r"it names '../x' where part-00001.parquet belongs"),
        (part_with(1, ranges=[[3, 6], [11, 14]]), "trajectory 11 is listed twice"),
        (part_with(1, ranges=[[3, 6], [13, 16]]), "trajectory 12 is listed nowhere"),
        (part_with(1, ranges=[[12, 15], [3, 6]]), "the ranges of part-00001.parquet do not ascend"),
        (part_with(1, ranges=[[3, 6], [12, 14]]), "the ranges of part-00001.parquet .* not of its trajectories"),
        (part_with(1, ranges=[[3, 6.0], [12, 15]]), "TypeError"),
        (part_with(1, ranges=[[3, 6], [12, 10**30]]), "not of its trajectories"),
        (
            lambda index: (
                index["parts"][1].update(ranges=[[3, 6], [12, 16]], trajectories=7) or index.update(trajectories=19)
            ),
            "trajectory 15 is listed twice",
        ),
    ],
)
def test_an_index_that_gives_not_each_trajectory_once_is_refused(
    tmp_path: Path, whole: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / NAME))
    index = json.loads((folder / "_index.json").read_text())
    change(index)
    (folder / "_index.json").write_text(json.dumps(index))
    for read in (read_rollouts, read_facts, lambda path: read_columns(path, ("uid",))):
        with pytest.raises(DataError, match=rf"{NAME}/_index.json: no index .*{message}"):
            read(folder)


def cut_index(folder: Path) -> None:
    index = folder / "_index.json"
    index.write_bytes(index.read_bytes()[:-20])


def exchanged(folder: Path) -> None:
    """The trajectories of one part are those of the other, and so are the sums in the index."""
    one, two = folder / "part-00000.parquet", folder / "part-00001.parquet"
    one.rename(folder / ".kept")
    two.rename(one)
    (folder / ".kept").rename(two)
    index = json.loads((folder / "_index.json").read_text())
    for number, file in enumerate((one, two)):
        index["parts"][number]["bytes"], index["parts"][number]["sha256"] = rollouts_sum(file)
    (folder / "_index.json").write_text(json.dumps(index))


def appended(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes() + b"x")


def flipped(folder: Path) -> None:
    content = bytearray((folder / "part-00001.parquet").read_bytes())
    content[100] ^= 1
    (folder / "part-00001.parquet").write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "_index.json").unlink(), "_index.json: no index .*No such file"),
        (cut_index, "_index.json: no index .*JSONDecodeError"),
        (lambda folder: (folder / "part-00001.parquet").unlink(), r"part-00001.parquet: .* got 0 bytes, missing"),
        (appended("part-00000.parquet"), r"part-00000.parquet: _index.json states \d+ bytes, .* got \d+ bytes"),
        (flipped, "part-00001.parquet: _index.json states"),
        (
            lambda folder: shutil.copy(folder / "part-00000.parquet", folder / "part-00002.parquet"),
            "part-00002.parquet: _index.json does not list it",
        ),
        (exchanged, "part-00000.parquet: it has fewer trajectories than _index.json states"),
    ],
)
def test_parts_that_are_not_those_of_the_index_are_refused_by_name(
    tmp_path: Path, whole: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / NAME))
    damage(folder)
    for read in (read_rollouts, lambda path: read_columns(path, ("uid",))):
        with pytest.raises(DataError, match=rf"{NAME}/(?:{message})"):
            read(folder)


def test_a_part_with_more_trajectories_than_the_index_states_is_refused(tmp_path: Path, whole: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / NAME))
    index = json.loads((folder / "_index.json").read_text())
    index["parts"][1].update(ranges=[[3, 6], [12, 14]], trajectories=5)
    index["parts"][0].update(ranges=[[0, 3], [6, 12], [14, 17]])
    index["trajectories"] = 17
    (folder / "_index.json").write_text(json.dumps(index))
    for read in (read_rollouts, lambda path: read_columns(path, ("uid",))):
        with pytest.raises(DataError, match=r"part-00001.parquet: it has more trajectories than _index.json states"):
            read(folder)


def test_a_step_is_replayed_from_its_folder(tmp_path: Path, whole: Path) -> None:
    (rollouts,) = read_rollouts(whole).values()
    for path in (whole, whole.parent):
        generator = ReplayGenerator(path)
        assert generator.images_folder == whole.parent.parent / "images"
        found = generator.generate(
            generator.prompts_for_step(1),
            n_samples_per_prompt=3,
            sampling=SamplingParams(),
            global_step=1,
            purpose="train",
        )
        assert found == rollouts
    file = written(tmp_path / "one", DataPlane())
    of_folder, of_file = (_lengths(str(path), step_wise=True) for path in (whole, file.parent))
    assert of_folder is not None
    assert of_file is not None
    assert [each.tolist() for each in of_folder.trajectories] == [each.tolist() for each in of_file.trajectories]


def test_a_run_in_folders_is_the_run_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts, capsules that link to them, the deletion of old steps, and resuming behind a step that was written."""

    def settings(name: str) -> Any:
        return replace(make_config(tmp_path / name, capsules=2), rollouts=RolloutsConfig(keep_last=3))

    files = fake_run(tmp_path / "files", config=settings("files"))
    files.run()
    monkeypatch.setattr(DataPlane, "shares", TwoPlaces.shares)
    with pytest.raises(Killed):
        fake_run(tmp_path / "folders", config=settings("folders"), on_call=killed_in(4, "train")).run()
    folders = fake_run(tmp_path / "folders", config=settings("folders"))
    torn = folders.folder.rollouts / ".train_step_000002.parquet.tmp"
    torn.mkdir()
    (torn / "part-00000.parquet").touch()
    folders.run()
    names = sorted(path.name for path in files.folder.rollouts.iterdir())
    assert sorted(path.name for path in folders.folder.rollouts.iterdir()) == names
    assert "train_step_000001.parquet" not in names
    for step in (2, 3, 4):
        name = f"train_step_{step:06d}.parquet"
        assert (folders.folder.rollouts / name).is_dir()
        assert read_rollouts(folders.folder.rollouts / name) == read_rollouts(files.folder.rollouts / name)
    folder = folders.folder.capsules / "step_000004"
    verify(folder)
    capsule = Capsule.read(folder)
    assert capsule.rollouts_sha256 == rollouts_sum(folder / capsule.rollouts / "_index.json")[1]
    linked = [(folder / capsule.rollouts / f"part-0000{number}.parquet") for number in (0, 1)]
    assert all(each.samefile(folders.folder.rollouts / capsule.rollouts / each.name) for each in linked)
    assert read_rollouts(folder / capsule.rollouts) == read_rollouts(files.folder.rollouts / capsule.rollouts)
    assert open_capsule(folders.root, 4).capsule == capsule
