"""A capsule's files say what was written, or which of them does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.errors import DataError
from skyrl_train.images import Image, ImageSpan
from skyrl_train.runs import assembler
from skyrl_train.trainers.capsules.record import (
    CAPSULE_FILE,
    BadInput,
    Capsule,
    Refusal,
    cut_capsules_after,
    find_capsule,
    read_batch,
    steps_in,
    write_batch,
)
from skyrl_train.types import RolloutBatch
from tests.support.fakes_trainer import failed_trajectory, make_config, make_prompts, make_trajectory, make_turn

CAPSULE = Capsule(
    step=12,
    seed=3,
    config_sha256="c" * 64,
    rollouts="train_step_000012.jsonl",
    rollouts_sha256="d" * 64,
    versions={"torch": "2"},
    git_commit="e" * 40,
    metrics={"loss/total": 0.5, "policy/entropy": None},
    refusal=Refusal(error="gradient norm nan", learner="policy", optimizer_steps=1),
    bad_inputs=(BadInput(uid="p0", sample=1, turn=0, column="reward", token=0, value="nan", text="x"),),
)


def some_batch(folder: Path) -> TrainingInputBatch:
    rollouts = RolloutBatch(
        prompts=tuple(make_prompts(1)),
        trajectories=(make_trajectory(make_turn((1, 2), (3, 4))), failed_trajectory(sample=1)),
        n_samples_per_prompt=2,
    )
    config = make_config(folder, train_batch_size=1, policy_mini_batch_size=1)
    return assembler(config)(rollouts, step=12, weight_version=11)


def test_a_capsule_is_read_as_it_was_written(tmp_path: Path) -> None:
    CAPSULE.write(tmp_path)
    assert Capsule.read(tmp_path) == CAPSULE
    finished = replace(CAPSULE, refusal=None, bad_inputs=())
    finished.write(tmp_path)
    assert Capsule.read(tmp_path) == finished


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2}', '{"format": 1, "step": -1}'])
def test_what_is_no_capsule_is_refused_by_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / CAPSULE_FILE).write_text(text)
    with pytest.raises(DataError, match=CAPSULE_FILE):
        Capsule.read(tmp_path)


def test_a_batch_is_read_as_it_was_written_nan_included(tmp_path: Path) -> None:
    batch = some_batch(tmp_path)
    rewards = batch["rewards"].clone()
    rewards[1] = torch.nan
    batch = batch.with_columns(rewards=rewards)
    spans = [(ImageSpan(1, Image(key="ab" * 32, num_tokens=2)),), *[()] * (batch.num_rows - 1)]
    batch = replace(batch, metadata=replace(batch.metadata, images=tuple(spans)))
    write_batch(tmp_path / "batch", batch)
    found = read_batch(tmp_path / "batch")
    assert found.metadata == batch.metadata
    assert {*found.token_columns, *found.row_columns} == {*batch.token_columns, *batch.row_columns}
    for name in (*batch.token_columns, *batch.row_columns):
        assert found[name].dtype == batch[name].dtype
        assert torch.equal(found[name].nan_to_num(nan=-7.0), batch[name].nan_to_num(nan=-7.0)), name
    (tmp_path / "batch").write_bytes(b"none")
    with pytest.raises(DataError, match="damaged"):
        read_batch(tmp_path / "batch")


def made(root: Path, *steps_of_capsules: int) -> None:
    for step in steps_of_capsules:
        (root / f"step_{step:06d}").mkdir(parents=True)
        CAPSULE.write(root / f"step_{step:06d}")


def test_the_refused_step_is_found_before_the_one_that_was_finished(tmp_path: Path) -> None:
    made(tmp_path, 3, 4)
    made(tmp_path / "failed", 5)
    assert find_capsule(tmp_path, 4) == tmp_path / "step_000004"
    assert find_capsule(tmp_path, 5) == tmp_path / "failed" / "step_000005"
    with pytest.raises(DataError, match=r"no capsule of step 6. There are capsules of steps 3, 4 and of the refused"):
        find_capsule(tmp_path, 6)
    with pytest.raises(DataError, match=r"trainer.capsules=5"):
        find_capsule(tmp_path / "nothing", 1)


def test_a_folder_of_another_name_is_no_step(tmp_path: Path) -> None:
    made(tmp_path, 3)
    (tmp_path / "step_notes").mkdir()
    assert steps_in(tmp_path) == [3]


def test_capsules_and_states_of_later_steps_go_and_those_of_refused_steps_stay(tmp_path: Path) -> None:
    made(tmp_path, 2, 3, 4)
    made(tmp_path / "states", 1, 2, 3, 4)
    made(tmp_path / "failed", 5)
    cut_capsules_after(tmp_path, 2)
    assert (steps_in(tmp_path), steps_in(tmp_path / "states"), steps_in(tmp_path / "failed")) == ([2], [1, 2], [5])
