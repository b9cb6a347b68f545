"""What a learner on ranks does to hold a state and to write it, with ranks of this process in place of actors."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.cluster.calls import SAVES
from skyrl_train.cluster.learner_worker import LearnerRank
from skyrl_train.cluster.learners import RayLearner
from skyrl_train.endpoints import LocalEndpoint
from skyrl_train.errors import SaveError
from skyrl_train.learner import PolicyLearner
from skyrl_train.weight_sync import DeviceSharing
from tests.support.learner_cases import LENGTHS, close, make_batch, make_learner, save_tiny_model


class Group:
    """Stands for an `ActorGroup`; the second rank is a replica, which writes nothing."""

    role = "policy"

    def __init__(self, *learners: PolicyLearner) -> None:
        self.actors = learners
        self.ranks = [LearnerRank(learner, self.role) for learner in learners]
        self.asked: list[str] = []

    def of(self, kind: type[Any], *, concurrency_group: str = "") -> LocalEndpoint[Any]:
        assert kind is LearnerRank
        self.asked.append(concurrency_group)
        return LocalEndpoint(*self.ranks)


@pytest.fixture
def group(tmp_path: Path) -> Group:
    folder = save_tiny_model(tmp_path / "tiny")
    learners = [make_learner(folder), make_learner(folder)]
    learners[1].engine.strategy.rank = 1
    for learner in learners:
        step(learner)
    return Group(*learners)


def step(learner: PolicyLearner) -> None:
    learner.forward_backward(close(make_batch(LENGTHS, dtype=torch.float32)))
    learner.optim_step()


def learner_of(group: Group) -> RayLearner:
    return RayLearner(group, sharing=DeviceSharing())  # type: ignore[arg-type]


def sums_of(folder: Path) -> dict[str, tuple[int, str]]:
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()}


def test_a_copy_is_written_beside_other_calls_and_stays_while_the_ranks_train(group: Group, tmp_path: Path) -> None:
    learner = learner_of(group)
    now = learner.hold_state(copies=False).write(tmp_path / "now")
    assert group.asked == [""]
    held = learner.hold_state(copies=True)
    assert (held.is_copied, group.asked) == (True, ["", SAVES])
    for each in group.actors:
        step(each)
    assert held.write(tmp_path / "copy") == now == sums_of(tmp_path / "copy")
    assert learner.hold_state(copies=False).write(tmp_path / "later") != now


def test_one_rank_without_memory_has_all_of_them_waited_for(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_train.learner.state_files.free_host_bytes", lambda: 1000)
    held = learner_of(group).hold_state(copies=True)
    assert (held.is_copied, group.asked) == (False, [""])
    assert held.write(tmp_path / "live") == sums_of(tmp_path / "live")


def test_a_rank_that_cannot_write_answers_and_so_do_the_others(group: Group, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    with pytest.raises(SaveError, match=r"taken: the policy model could not be written"):
        learner_of(group).hold_state(copies=True).write(tmp_path / "taken")
    assert group.ranks[1].write_state(tmp_path / "taken", True) == {}
