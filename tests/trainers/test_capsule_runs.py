"""`skyrl-capsule` on real runs at the quickstart's scale: steps come out again bit by bit, and what spoils one is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl_train.trainers.capsules.record import read_batch, write_batch
from skyrl_train.trainers.checkpoints.folder import MANIFEST, seal
from tests.support import warm_python
from tests.support.capsule_parts import RARE
from tests.support.command_runs import start_command, wait_for

pytestmark = pytest.mark.slow

QUICKSTART = (
    "+experiment=gsm8k_multiturn",
    "platform=cpu",
    "data.validation=[]",
    "trainer.export_hf=false",
    "trainer.ckpt_interval=0",
)
LIMIT_S = 60.0


def capsule(*arguments: object) -> tuple[int, str]:
    """Status and output of `skyrl-capsule`, within the time of the processor that it may take."""
    done = warm_python.run("-m", "skyrl_train.main_capsule", *map(str, arguments), timeout_s=10 * LIMIT_S)
    print(f"\nskyrl-capsule {arguments[0]} {' '.join(map(str, arguments[2:]))}: {done.cpu_s:.1f} s\n{done.stdout}")
    assert 0 < done.cpu_s < LIMIT_S
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, with a capsule of each."""
    folder = tmp_path_factory.mktemp("capsules") / "run"
    status, said = wait_for(start_command(folder, *QUICKSTART, "trainer.total_steps=2", "trainer.capsules=2"))
    assert status == 0, said[-3000:]
    return folder


def files_of(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_a_step_comes_out_again_bit_by_bit_and_the_run_is_not_touched(finished: Path, tmp_path: Path) -> None:
    before = files_of(finished)
    for step in (1, 2):
        status, said = capsule("run", finished, "--step", step, "--output", tmp_path / str(step))
        assert status == 0, said
        assert "every bit is compared" in said
        again, state = tmp_path / str(step) / "policy", finished / "capsules" / "states" / f"step_{step:06d}"
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (again / name).read_bytes() == (state / "policy" / name).read_bytes()
    assert files_of(finished) == before


def resealed(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    seal(folder)


def copied(finished: Path, folder: Path) -> Path:
    """A copy of the run, whose second step may be spoilt."""
    shutil.copytree(finished, folder)
    return folder / "capsules" / "step_000002"


def spoilt(folder: Path, name: str, index: int, value: float) -> Tensor:
    """Writes the value into a column of a capsule's batch; the batch's row offsets."""
    batch = read_batch(folder / "batch.safetensors")
    column = batch[name].clone()
    column[index] = value
    write_batch(folder / "batch.safetensors", batch.with_columns(**{name: column}))
    resealed(folder)
    return batch.row_offsets


def test_a_step_that_was_recorded_otherwise_differs(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path / "run")
    batch = read_batch(folder / "batch.safetensors")
    trained = int(batch["loss_mask"].nonzero()[7])
    spoilt(folder, "advantages", trained, 3.5)
    status, said = capsule("run", tmp_path / "run", "--step", 2)
    assert status == 1
    assert f"index {trained}" in next(line for line in said.splitlines() if line.startswith("batch advantages"))


@pytest.mark.parametrize(
    "name",
    ["rewards", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("old_logprobs", "rollout_logprobs"))],
)
def test_a_nan_in_a_batch_is_traced_to_its_trajectory_and_token(finished: Path, tmp_path: Path, name: str) -> None:
    folder = copied(finished, tmp_path / "run")
    batch = read_batch(folder / "batch.safetensors")
    token = int(batch["loss_mask"].nonzero()[700])
    offsets = spoilt(folder, name, token, float("nan"))
    row = int(torch.searchsorted(offsets, token, right=True)) - 1
    status, said = capsule("bisect", tmp_path / "run", "--step", 2)
    assert status == 0, said
    assert f"not finite: {name} of 1 token, first nan" in said
    place = f"trajectory {batch.metadata.uids[row]}/{row % 8}, turn"
    assert place in said
    assert f"position {token - int(offsets[row])}, token {int(batch['input_ids'][token])}" in said


def refused(folder: Path, *overrides: str) -> str:
    """What a run says that is refused in its first step."""
    status, said = wait_for(start_command(folder, *QUICKSTART, "trainer.total_steps=1", *overrides))
    assert status == 2, said[-3000:]
    assert f"skyrl-capsule bisect {folder} --step 1" in said.replace("\n", " ")
    return said


@pytest.mark.nightly
def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "run", "trainer.policy.optimizer.name=tests.support.capsule_parts:spoils_a_weight")
    status, said = capsule("bisect", tmp_path / "run", "--step", 1)
    assert status == 0, said
    assert "a weight itself is not finite" in said
    assert "policy model: model.layers" in said
    assert "first at [1, 2]" in said


@pytest.mark.nightly
def test_a_loss_that_is_no_number_is_traced_by_halving_to_the_first_such_token(tmp_path: Path) -> None:
    run = tmp_path / "run"
    refused(run, "trainer.algorithm.policy_loss=tests.support.capsule_parts:nan_at_rare_tokens")
    batch = read_batch(run / "capsules" / "failed" / "step_000001" / "batch.safetensors")
    token = int((batch["loss_mask"] & (batch["rollout_logprobs"] < RARE)).nonzero()[0])
    row = int(torch.searchsorted(batch.row_offsets, token, right=True)) - 1
    status, said = capsule("bisect", run, "--step", 1)
    assert status == 0, said
    assert f"trajectory {batch.metadata.uids[row]}/{row % 8}, turn" in said
    assert f"position {token - int(batch.row_offsets[row])}, token {int(batch['input_ids'][token])}" in said
    status, said = capsule("run", run, "--step", 1)
    assert status == 0
    assert "here: policy, optimizer step 0: loss nan" in said


@pytest.mark.nightly
def test_a_gradient_out_of_range_is_traced_to_its_trajectory_and_token(tmp_path: Path) -> None:
    run = tmp_path / "run"
    loss = "trainer.algorithm.policy_loss=tests.support.capsule_parts:spike_at_rare_tokens"
    status, said = wait_for(start_command(run, *QUICKSTART, "trainer.total_steps=1", "trainer.capsules=1", loss))
    assert status == 0, said[-3000:]
    status, said = capsule("bisect", run, "--step", 1, "--outlier")
    assert status == 0, said
    batch = read_batch(run / "capsules" / "step_000001" / "batch.safetensors")
    rare = (batch["loss_mask"] & (batch["rollout_logprobs"] < RARE)).nonzero().squeeze(1)
    rows = (torch.searchsorted(batch.row_offsets, rare, right=True) - 1).tolist()
    told = [
        f"trajectory {batch.metadata.uids[row]}/{row % 8}, turn" in said
        and f"position {int(token) - int(batch.row_offsets[row])}, token {int(batch['input_ids'][token])}" in said
        for row, token in zip(rows, rare)
    ]
    assert any(told)
    assert not all(told) or len(told) == 1


SUPERVISED = ("data.validation=[]", "trainer.export=none", "trainer.ckpt_interval=0", "trainer.batch_size=32")


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_supervised_step_comes_out_again_bit_by_bit_and_a_bad_token_of_it_is_found(
    tmp_path: Path, layout: str
) -> None:
    run = tmp_path / "run"
    chosen = (*SUPERVISED, "trainer.num_steps=3", "trainer.capsules=2", f"trainer.layout={layout}")
    status, said = wait_for(start_command(run, *chosen, module="skyrl_train.main_sft"))
    assert status == 0, said[-3000:]
    status, said = capsule("run", run, "--step", 3, "--output", tmp_path / "again")
    assert status == 0, said
    assert "every bit is compared" in said
    state = run / "capsules" / "states" / "step_000003" / "policy"
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "again" / "policy" / name).read_bytes() == (state / name).read_bytes()

    folder = run / "capsules" / "step_000003"
    batch = read_batch(folder / "batch.safetensors")
    token = int(batch["loss_mask"].nonzero()[200])
    offsets = spoilt(folder, "loss_weights", token, float("nan"))
    row = int(torch.searchsorted(offsets, token, right=True)) - 1
    status, said = capsule("bisect", run, "--step", 3)
    assert status == 0, said
    assert f"position {token - int(offsets[row])}, token {int(batch['input_ids'][token])}" in said
    assert batch.metadata.uids[row] in said


@pytest.mark.nightly
def test_a_supervised_step_that_is_refused_names_the_command_that_finds_the_weight(tmp_path: Path) -> None:
    run = tmp_path / "run"
    spoils = "trainer.optimizer.name=tests.support.capsule_parts:spoils_a_weight"
    status, said = wait_for(
        start_command(run, *SUPERVISED, "trainer.num_steps=3", spoils, module="skyrl_train.main_sft")
    )
    assert status == 2, said[-3000:]
    assert f"skyrl-capsule bisect {run} --step 2" in said.replace("\n", " ")
    status, said = capsule("bisect", run, "--step", 2)
    assert status == 0, said
    assert "first at [1, 2]" in said
