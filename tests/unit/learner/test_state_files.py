"""A state is written as it was when it was held, whatever the model does meanwhile, with sums that are the files'."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from skyrl_train.errors import SaveError
from skyrl_train.learner import state_files
from skyrl_train.learner.policy import PolicyLearner
from skyrl_train.learner.state_files import TensorFile, free_host_bytes
from skyrl_train.system.files import FileSums
from tests.support.file_limits import file_size_limit
from tests.support.learner_cases import LENGTHS, close, make_batch, make_learner, save_tiny_model


@pytest.fixture
def learner(tmp_path: Path) -> PolicyLearner:
    made = make_learner(save_tiny_model(tmp_path / "tiny"))
    step(made, 0)
    return made


def step(learner: PolicyLearner, seed: int) -> None:
    learner.forward_backward(close(make_batch(LENGTHS, seed=seed, dtype=torch.float32)))
    learner.optim_step()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_is_the_one_that_the_library_writes(tmp_path: Path) -> None:
    types = [
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.float16,
        torch.int32,
    ]
    tensors = {f"{number}.ü": torch.arange(6).reshape(2, 3).to(dtype) for number, dtype in enumerate(types)}
    tensors |= {"step": torch.tensor(3.0), "none": torch.zeros(0, 4), "turned": torch.arange(6.0).reshape(2, 3).t()}
    for name, metadata in (("plain", {}), ("told", {"parts": '{"a": [1]}'})):
        size, sha256 = TensorFile(tensors=tensors, metadata=metadata).write(tmp_path / f"{name}.ours")
        plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(plain, tmp_path / f"{name}.theirs", metadata=metadata or None)
        content = (tmp_path / f"{name}.theirs").read_bytes()
        assert (tmp_path / f"{name}.ours").read_bytes() == content
        assert (size, sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert torch.equal(load_file(tmp_path / "plain.ours")["turned"], tensors["turned"])


def test_a_type_that_the_format_lacks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match=r"odd is of torch.complex128"):
        TensorFile(tensors={"odd": torch.zeros(1, dtype=torch.complex128)}).write(tmp_path / "x")


def test_steps_during_and_before_the_write_do_not_change_what_a_copy_writes(
    learner: PolicyLearner, tmp_path: Path
) -> None:
    learner.hold_state(copies=False).write(tmp_path / "then")
    held, live = learner.hold_state(copies=True), learner.hold_state(copies=False)
    assert held.is_copied
    assert not live.is_copied
    stopped = threading.Event()
    sums: list[FileSums] = []

    def write_again_and_again() -> None:
        while not stopped.is_set() or not sums:
            sums.append(held.write(tmp_path / f"copy{len(sums)}"))

    writer = threading.Thread(target=write_again_and_again)
    writer.start()
    for seed in (1, 2):
        step(learner, seed)
    stopped.set()
    writer.join(60)
    sums.append(held.write(tmp_path / f"copy{len(sums)}"))
    expected = contents(tmp_path / "then")
    for number, each in enumerate(sums):
        assert contents(tmp_path / f"copy{number}") == expected
        assert each == {name: (len(text), hashlib.sha256(text).hexdigest()) for name, text in expected.items()}
    live.write(tmp_path / "live")  # what is no copy does change
    assert contents(tmp_path / "live") != expected


def test_the_next_copy_takes_the_memory_of_the_one_before(learner: PolicyLearner, tmp_path: Path) -> None:
    learner.hold_state(copies=True)
    memory = learner._host_copy._memory
    places = {key: tensor.data_ptr() for key, tensor in memory.items()}
    step(learner, 1)
    learner.hold_state(copies=True).write(tmp_path / "copy")
    learner.hold_state(copies=False).write(tmp_path / "live")
    assert {key: tensor.data_ptr() for key, tensor in learner._host_copy._memory.items()} == places
    assert contents(tmp_path / "copy") == contents(tmp_path / "live")


def test_without_memory_for_a_copy_the_state_is_written_as_it_is(
    learner: PolicyLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_files, "free_host_bytes", lambda: 1000)
    held = learner.hold_state(copies=True)
    assert not held.is_copied
    assert "no room for a copy of the state" in caplog.text
    held.write(tmp_path / "live")
    assert sorted(contents(tmp_path / "live")) == ["model.safetensors", "optimizer.safetensors", "state.json"]


def test_a_full_disk_is_a_save_error_that_names_the_model(learner: PolicyLearner, tmp_path: Path) -> None:
    held = learner.hold_state(copies=True)
    with (
        file_size_limit(4096),
        pytest.raises(SaveError, match=r"the policy model could not be written: .*File too large"),
    ):
        held.write(tmp_path / "full")


def test_memory_that_is_free_is_less_than_what_there_is() -> None:
    free = free_host_bytes()
    assert free is None or 0 < free < 1 << 50
