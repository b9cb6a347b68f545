"""Shards of tensors: written by each rank, read by any number of ranks, and never run as code."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Shard

from skyrl_train.errors import CheckpointError
from skyrl_train.learner import state
from skyrl_train.learner.state import StoredTensors
from skyrl_train.learner.state_files import StateFiles, shard_of
from tests.support.fake_ranks import as_rank
from tests.support.gloo_ranks import on_ranks

WHOLE = {
    "model/odd": torch.arange(15.0).reshape(5, 3),
    "model/one": torch.tensor([7.0]),
    "model/half": torch.arange(8).to(torch.bfloat16),
    "model/ids": torch.arange(6).reshape(2, 3),
    "optimizer/step.odd": torch.tensor(3.0),
}


def read_all(folder: Path) -> dict[str, Tensor]:
    stored = StoredTensors(folder)
    return {name: stored.take(name) for name in stored.facts}


def write_shard(folder: Path, rank: int, tensors: dict[str, Tensor]) -> None:
    shard_of(rank, tensors).write(folder / f"shard-{rank:05d}.safetensors")


def require_whole(found: dict[str, Tensor]) -> None:
    assert found.keys() == WHOLE.keys()
    for name, tensor in WHOLE.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_one_rank_writes_all_of_what_is_not_sharded(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, WHOLE)
    write_shard(tmp_path, 1, WHOLE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-00000.safetensors", "shard-00001.safetensors"]
    require_whole(read_all(tmp_path))


def test_files_of_torch_are_refused_by_what_they_are(tmp_path: Path) -> None:
    writer = FileSystemWriter(str(tmp_path), single_file_per_rank=True, sync_files=False, overwrite=True)
    save(dict(WHOLE), storage_writer=writer, no_dist=True)
    (tmp_path / "state.json").write_text('{"format": 1, "role": "policy"}')
    with pytest.raises(CheckpointError, match=r"torch\.distributed\.checkpoint.* read no more; go on with the version"):
        state.read_model(tmp_path)


def sharded_on(mesh: Any) -> dict[str, Any]:
    from torch.distributed.tensor import Shard, distribute_tensor

    return {name: distribute_tensor(value, mesh, [Shard(0)]) if value.ndim else value for name, value in WHOLE.items()}


def write_and_read(rank: int, folder: Path, source: str, target: str) -> None:
    """Reads what other ranks wrote into this rank's part, and writes that part again."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    own = sharded_on(init_device_mesh("cpu", (distributed.get_world_size(),)))
    if source:
        stored = StoredTensors(folder / source)
        for name, tensor in own.items():
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor).zero_()
            stored.fill(name, tensor)
    (folder / target).mkdir(exist_ok=True)
    write_shard(folder / target, rank, own)


@pytest.mark.slow
def test_shards_are_read_by_other_numbers_of_ranks(tmp_path: Path) -> None:
    on_ranks(write_and_read, tmp_path, "", "three", num_ranks=3)
    require_whole(read_all(tmp_path / "three"))
    on_ranks(write_and_read, tmp_path, "three", "two", num_ranks=2)
    require_whole(read_all(tmp_path / "two"))


def test_a_rank_reads_its_own_rows_of_what_one_rank_wrote(tmp_path: Path) -> None:
    whole = WHOLE["model/odd"]
    write_shard(tmp_path, 0, {"model/odd": whole})
    stored = StoredTensors(tmp_path)
    with as_rank(1, 2) as mesh:
        target = DTensor.from_local(
            torch.zeros(2, 3), mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        stored.fill("model/odd", target)
        assert torch.equal(target.to_local(), whole[3:])


@pytest.mark.parametrize("sharded", [False, True])
def test_a_rank_reads_its_own_rows_of_a_state_in_either_form(tmp_path: Path, sharded: bool) -> None:
    whole, moments = torch.arange(15.0).reshape(5, 3), torch.arange(15.0).reshape(5, 3) / 7
    optimizer = {"step.odd": torch.tensor(1.0), "exp_avg.odd": moments, "exp_avg_sq.odd": moments}
    facts: dict[str, Any] = {"role": "policy", "optimizer_name": "adamw", "steps": 1, "documents": 0}
    StateFiles.of(model={"odd": whole}, optimizer=optimizer, sharded=sharded, **facts).write(tmp_path)
    with as_rank(1, 2) as mesh:
        mine = DTensor.from_local(
            torch.zeros(2, 3), mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        stored = state.read(tmp_path, role="policy", model={"odd": mine}, with_optimizer=True, optimizer_name="adamw")
        assert torch.equal(stored.model["odd"].to_local(), whole[3:])  # type: ignore[attr-defined]
        assert torch.equal(stored.optimizer["exp_avg.odd"].to_local(), moments[3:])  # type: ignore[attr-defined]
        assert stored.optimizer["step.odd"] == 1.0


class Bomb:
    """Writes a file when it is unpickled by anything that runs what it is told."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_a_planted_pickle_never_runs(tmp_path: Path) -> None:
    folder, target = tmp_path / "policy", tmp_path / "owned"
    write_shard_of_a_model(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(target)))
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        state.read_model(folder)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        state.read(folder, role="policy", model={"odd": torch.zeros(5, 3)}, with_optimizer=True)
    assert not target.exists()


def test_the_bomb_would_go_off(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "owned")))
    assert (tmp_path / "owned").exists()


def write_shard_of_a_model(folder: Path) -> None:
    files = StateFiles.of(
        role="policy",
        model={"odd": torch.ones(5, 3)},
        optimizer={"step.odd": torch.tensor(1.0), "exp_avg.odd": torch.ones(5, 3), "exp_avg_sq.odd": torch.ones(5, 3)},
        optimizer_name="adamw",
        steps=1,
        documents=0,
        sharded=True,
    )
    files.write(folder)


def half(shape: list[Any], offset: list[Any], tensor: Tensor) -> tuple[dict[str, Tensor], str]:
    return {"model/odd": tensor}, json.dumps({"model/odd": {"shape": shape, "offset": offset}})


@pytest.mark.parametrize(
    ("tensors", "parts", "reason"),
    [
        (*half([5, 3], [0, 0], torch.ones(3, 3)), r"model/odd: no file has all of it"),
        (*half([5, 3], [3, 0], torch.ones(3, 3)), r"is not within \(5, 3\)"),
        (*half([5, 3], [-1, 0], torch.ones(3, 3)), r"an offset is \[-1, 0\]"),
        (*half([5, 3], [0.0, 0], torch.ones(3, 3)), r"an offset is \[0.0, 0\]"),
        (*half([5, 3], [True, 0], torch.ones(3, 3)), r"an offset is \[True, 0\]"),
        (*half([5], [0], torch.ones(5, 3)), r"is not within \(5,\)"),
        (*half([5, 10**30], [0, 0], torch.ones(5, 3)), r"odd is float32 \[5, 1000000000000000000000000000000\]"),
        ({"model/odd": torch.ones(5, 3)}, "{}", r"KeyError"),
        ({"model/odd": torch.ones(5, 3)}, "[" * 100_000, r"nested deeper than 64 levels"),
        ({"model/odd": torch.ones(5, 3)}, "{", r"JSONDecodeError"),
        ({"model/odd": torch.ones(5, 3)}, "[]", r"TypeError"),
        ({"model/odd": torch.ones(5, 3)}, '{"model/odd": 3}', r"TypeError"),
    ],
)
def test_headers_that_contradict_their_tensors_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], parts: str, reason: str
) -> None:
    write_shard_of_a_model(tmp_path)
    save_file(tensors, tmp_path / "shard-00000.safetensors", metadata={"parts": parts})
    with pytest.raises(CheckpointError, match=reason):
        state.read(tmp_path, role="policy", model={"odd": torch.zeros(5, 3)}, with_optimizer=False)


def test_files_that_disagree_about_a_tensor_are_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, {"a": torch.ones(2)})
    save_file(
        {"a": torch.ones(2)},
        tmp_path / "shard-00001.safetensors",
        metadata={"parts": '{"a": {"shape": [3], "offset": [0]}}'},
    )
    with pytest.raises(ValueError, match=r"in one file"):
        StoredTensors(tmp_path)


def test_a_torn_shard_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, {"a": torch.ones(200)})
    file = tmp_path / "shard-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"shard-00000.safetensors: SafetensorError"):
        StoredTensors(tmp_path)
