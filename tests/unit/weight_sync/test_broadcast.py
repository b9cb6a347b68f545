"""A group of processes for weights alone: what arrives is what was sent, by whichever rank; nobody waits for ever."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skyrl_train.distributed import as_default_group, join, leave
from skyrl_train.endpoints import Rendezvous
from skyrl_train.errors import EngineError
from skyrl_train.weight_sync import WeightGroup
from skyrl_train.weights import Bucket, pack, unpack

CPU = torch.device("cpu")
TENSORS = {"embed": torch.arange(600, dtype=torch.float32).view(200, 3), "scale": torch.tensor(1.5)}


def rendezvous(folder: Path, rank: int, num_ranks: int, timeout_s: float = 30.0) -> Rendezvous:
    return Rendezvous(rank=rank, num_ranks=num_ranks, init_method=f"file://{folder}/meet", timeout_s=timeout_s)


def test_every_receiver_gets_the_bytes_of_the_sender(tmp_path: Path) -> None:
    bucket, flat = pack(TENSORS.items(), CPU)
    found: dict[int, dict[str, torch.Tensor]] = {}

    def receive(rank: int) -> None:
        group = WeightGroup(rendezvous(tmp_path, rank, 3), CPU)
        found[rank] = dict(unpack(bucket, group.receive(bucket.num_bytes)))
        group.close()

    receivers = [threading.Thread(target=receive, args=(rank,)) for rank in (1, 2)]
    for receiver in receivers:
        receiver.start()
    sender = WeightGroup(rendezvous(tmp_path, 0, 3), CPU)
    sender.send(flat)
    for receiver in receivers:
        receiver.join(30)
    for rank in (1, 2):
        assert all(torch.equal(found[rank][name], tensor) for name, tensor in TENSORS.items())


def test_ranks_send_in_turn_and_one_that_has_nothing_keeps_nobody_waiting(tmp_path: Path) -> None:
    sent = [torch.full((48,), 1, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
    sent.append(torch.arange(16, dtype=torch.uint8))

    def take_part(rank: int) -> list[torch.Tensor]:
        group = WeightGroup(rendezvous(tmp_path, rank, 4), CPU)
        received = []
        for root, flat in enumerate(sent):
            if root == rank:
                group.send(flat)
            else:
                received.append(group.receive(len(flat), root))
        group.close()
        return received

    with ThreadPoolExecutor(4) as ranks:
        found = [each.result(30) for each in [ranks.submit(take_part, rank) for rank in range(4)]]
    for rank, received in enumerate(found):
        others = [flat for root, flat in enumerate(sent) if root != rank]
        assert all(torch.equal(*pair) for pair in zip(received, others, strict=True))


@pytest.mark.parametrize("named", [None, "eth9"])
def test_a_group_on_one_node_leaves_no_network_interface_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    WeightGroup(rendezvous(tmp_path, 0, 1), CPU).close()
    join(replace(rendezvous(tmp_path, 0, 1), init_method=f"file://{tmp_path}/join"), CPU)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    with as_default_group():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    if named is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
        with as_default_group():
            pass
        assert os.environ["GLOO_SOCKET_IFNAME"] == named, "the user's own stays"
    leave()


def test_bytes_without_the_right_checksum_are_refused() -> None:
    bucket, flat = pack(TENSORS.items(), CPU)
    with pytest.raises(EngineError, match="arrived damaged"):
        list(unpack(Bucket(**{**bucket.fields(), "checksum": 1}), flat))


def test_a_meeting_to_which_nobody_comes_ends(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        WeightGroup(rendezvous(tmp_path, 0, 2, timeout_s=0.5), CPU)
