"""A checkpoint whose contents were changed and whose sums were made again is refused by name, or passed over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from skyrl_train.errors import CheckpointError
from skyrl_train.learner import PolicyLearner
from skyrl_train.trainers.checkpoints.folder import seal
from skyrl_train.trainers.checkpoints.state import DataFingerprint, LoopState, TrainerState
from skyrl_train.trainers.checkpoints.store import CheckpointStore
from tests.support.learner_cases import LENGTHS, close, make_batch, make_learner, same, save_tiny_model, snapshot

TRAINER, LEARNER = "trainer_state.json", "policy/state.json"
MODEL, OPTIMIZER = "policy/model.safetensors", "policy/optimizer.safetensors"
Edit = Callable[[Path], None]


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> PolicyLearner:
    made = make_learner(save_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True))
    made.forward_backward(close(make_batch(LENGTHS)))
    made.optim_step()
    return made


@pytest.fixture(scope="module")
def whole(learner: PolicyLearner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2 of a real learner."""
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    data = DataFingerprint(num_prompts=8, sha256="0" * 64)
    for step in (1, 2):
        state = TrainerState.at(step, LoopState.first(None), config={"seed": 0}, data=data)

        def write(folder: Path, state: TrainerState = state) -> None:
            learner.save(folder / "policy")
            state.write(folder)

        CheckpointStore(root, keep=2).write(step, write)
    return root


def text(name: str, content: str) -> Edit:
    return lambda folder: (folder / name).write_text(content) and None


def entry(name: str, path: str, value: Any) -> Edit:
    """Sets an entry of a JSON file, by dotted name."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        *parents, last = path.split(".")
        place = content
        for parent in parents:
            place = place[parent]
        place[last] = value
        (folder / name).write_text(json.dumps(content))

    return edit


def without(name: str, key: str) -> Edit:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        del content[key]
        (folder / name).write_text(json.dumps(content))

    return edit


def digits(name: str, key: str) -> Edit:
    """A whole number of 5,000 digits."""

    def edit(folder: Path) -> None:
        entry(name, key, "DIGITS")(folder)
        content = (folder / name).read_text()
        (folder / name).write_text(content.replace('"DIGITS"', "9" * 5000))

    return edit


def tensors(name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Edit:
    def edit(folder: Path) -> None:
        content = load_file(folder / name)
        change(content)
        save_file(content, folder / name)

    return edit


def set_first(kind: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(content: dict[str, torch.Tensor]) -> None:
        key = sorted(key for key in content if key.startswith(kind))[0]
        content[key].view(-1)[0] = value

    return change


def drop_first(kind: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda content: content.__delitem__(sorted(key for key in content if key.startswith(kind))[0])


def count_again(folder: Path) -> None:
    """States as many tensors of the optimizer as there are."""
    entry(LEARNER, "num_optimizer_tensors", len(load_file(folder / OPTIMIZER)))(folder)


def both(*edits: Edit) -> Edit:
    return lambda folder: [edit(folder) for edit in edits] and None


def gone(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


PASSED_OVER: dict[str, tuple[Edit, str]] = {
    "step -3": (entry(TRAINER, "global_step", -3), "global_step must be a whole number"),
    "step 1e30": (entry(TRAINER, "global_step", 1e30), "global_step must be a whole number"),
    "step 10**30": (entry(TRAINER, "global_step", 10**30), "global_step must be a whole number"),
    "step of 5,000 digits": (digits(TRAINER, "global_step"), "cannot be used"),
    "step true": (entry(TRAINER, "global_step", True), "global_step must be a whole number"),
    "step text": (entry(TRAINER, "global_step", "2"), "global_step must be a whole number"),
    "step null": (entry(TRAINER, "global_step", None), "global_step must be a whole number"),
    "step of another": (
        both(entry(TRAINER, "global_step", 7), entry(TRAINER, "weight_version", 7)),
        "is of global_step 7: the folder was renamed",
    ),
    "version -1": (entry(TRAINER, "weight_version", -1), "weight_version must be a whole number"),
    "version of another step": (entry(TRAINER, "weight_version", 9), "weight_version is 9, global_step 2"),
    "position -1": (entry(TRAINER, "data_position", -1), "data_position must be a whole number"),
    "totals -1": (entry(TRAINER, "totals.tokens", -1), "tokens must be a whole number"),
    "totals unknown": (entry(TRAINER, "totals.others", 1), "others"),
    "totals list": (entry(TRAINER, "totals", []), "totals must be an object"),
    "KL weight NaN": (entry(TRAINER, "kl_controller.coef", float("nan")), "NaN is no JSON number"),
    "KL weight -1": (entry(TRAINER, "kl_controller.coef", -1.0), "must be at least 0"),
    "KL weight of 4,000 digits": (entry(TRAINER, "kl_controller.coef", 10**4000), "coef must be a finite number"),
    "prompts text": (entry(TRAINER, "data.num_prompts", "8"), "num_prompts must be a whole number"),
    "fingerprint short": (entry(TRAINER, "data.sha256", "00"), "data.sha256 is '00'"),
    "config empty": (entry(TRAINER, "config", {}), "config must be an object with entries"),
    "format 2": (entry(TRAINER, "format", 2), "not of format 1"),
    "state missing": (gone(TRAINER), TRAINER),
    "state no JSON": (text(TRAINER, "{"), TRAINER),
    "state a list": (text(TRAINER, "[1]"), f"{TRAINER} must be an object"),
    "state deep": (text(TRAINER, '{"a":' * 50_000 + "1" + "}" * 50_000), "nested deeper than 64 levels"),
    "state without config": (without(TRAINER, "config"), "config is missing"),
}
REFUSED: dict[str, tuple[Edit, str]] = {
    "optimizer steps -3": (entry(LEARNER, "num_optimizer_steps", -3), "num_optimizer_steps must be a whole number"),
    "optimizer steps 1e30": (entry(LEARNER, "num_optimizer_steps", 1e30), "num_optimizer_steps must be a whole number"),
    "optimizer steps of 5,000 digits": (digits(LEARNER, "num_optimizer_steps"), LEARNER.split("/")[1]),
    "documents null": (entry(LEARNER, "num_documents", None), "num_documents must be a whole number"),
    "budgets -1": (entry(LEARNER, "memory_budgets", [-1, -1, -1, -1]), r"memory_budgets\[0\] must be a whole number"),
    "dtypes 5": (entry(LEARNER, "dtypes", 5), "dtypes must be names of types; got 5"),
    "dtypes of numbers": (entry(LEARNER, "dtypes", [5]), "dtypes must be names of types"),
    "budgets text": (entry(LEARNER, "memory_budgets", "many"), "memory_budgets must be"),
    "learner deep": (text(LEARNER, "[" * 50_000 + "]" * 50_000), "nested deeper than 64 levels"),
    "learner without role": (without(LEARNER, "role"), "'role' is missing"),
    "weights NaN": (tensors(MODEL, set_first("model.norm", float("nan"))), r"model.norm.* not finite"),
    "weights infinite": (tensors(MODEL, set_first("model.embed", float("inf"))), r"model.embed_tokens.* not finite"),
    "moments NaN": (
        tensors(OPTIMIZER, set_first("exp_avg_sq.", float("nan"))),
        r"the optimizer's exp_avg_sq.* not finite",
    ),
    "moment missing": (tensors(OPTIMIZER, drop_first("exp_avg.")), r"tensors; state.json states"),
    "moment missing, counted again": (
        both(tensors(OPTIMIZER, drop_first("exp_avg.")), count_again),
        r"the optimizer's state lacks exp_avg\.",
    ),
    "moment's step -3": (tensors(OPTIMIZER, set_first("step.", -3.0)), r"the optimizer's step\..* is -3"),
    "moment's step 1e30": (tensors(OPTIMIZER, set_first("step.", 1e30)), r"the optimizer's step\..* is 1e\+30"),
    "parameter missing": (tensors(MODEL, drop_first("model.norm")), r"model.norm.weight is absent in the checkpoint"),
}


def resealed(whole: Path, root: Path, edit: Edit) -> Path:
    """The two checkpoints, of which the newer is changed and has sums that agree."""
    shutil.copytree(whole, root)
    folder = root / "step_000002"
    (folder / "manifest.json").unlink()
    edit(folder)
    seal(folder)
    return folder


@pytest.mark.parametrize("name", PASSED_OVER)
def test_a_state_that_no_run_writes_is_passed_over_and_named(
    name: str, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit, reason = PASSED_OVER[name]
    folder = resealed(whole, tmp_path / "checkpoints", edit)
    assert CheckpointStore(folder.parent, keep=2).latest() == folder.with_name("step_000001")
    assert reason in caplog.text
    assert str(folder) in caplog.text
    with pytest.raises(CheckpointError, match="step_000002"):
        CheckpointStore(folder.parent, keep=2).find(str(folder))


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_no_run_writes_is_refused_by_name_and_changes_nothing(
    name: str, whole: Path, tmp_path: Path, learner: PolicyLearner
) -> None:
    edit, reason = REFUSED[name]
    folder = resealed(whole, tmp_path / "checkpoints", edit)
    before = snapshot(learner)
    with pytest.raises(CheckpointError, match=reason):
        learner.load(folder / "policy")
    assert same(snapshot(learner), before)


def test_the_same_checkpoint_unchanged_is_accepted(whole: Path, tmp_path: Path, learner: PolicyLearner) -> None:
    folder = resealed(whole, tmp_path / "checkpoints", lambda folder: None)
    assert CheckpointStore(folder.parent, keep=2).latest() == folder
    learner.load(folder / "policy")


@pytest.mark.parametrize("name", ["step_000009", "step_9", "step_9999999999999999999"])
def test_a_renamed_checkpoint_is_no_newer_one(name: str, whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(whole, root)
    (root / "step_000002").rename(root / name)
    (root / "latest").write_text(f"{name}\n")
    assert CheckpointStore(root, keep=2).latest() == root / "step_000001"


@pytest.mark.parametrize("position", range(0, 400, 13))
def test_damage_to_the_manifest_names_it(position: int, whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(whole, root)
    file = root / "step_000002" / "manifest.json"
    content = bytearray(file.read_bytes())
    content[position % len(content)] ^= 4
    file.write_bytes(content)
    said = ""
    try:
        CheckpointStore(root, keep=2).find(str(root / "step_000002"))
    except CheckpointError as error:
        said = str(error)
    assert "manifest.json" in said or json.loads(content) == json.loads(
        (whole / "step_000002" / file.name).read_bytes()
    )
