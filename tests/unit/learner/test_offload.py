"""Copies of an offload: all are begun, waited for once, and only then is what they were made of emptied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from skyrl_train.learner.offload import Offloader


def test_memory_is_emptied_once_all_copies_are_whole_and_comes_back_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    held = [*model.parameters(), *(each.grad for each in model.parameters() if each.grad is not None), *moments]
    before = [tensor.detach().clone() for tensor in held]
    waits: list[list[int]] = []
    monkeypatch.setattr(
        Offloader, "_await_copies", lambda _: waits.append([tensor.untyped_storage().nbytes() for tensor in held])
    )
    offloader = Offloader(
        model, name="policy", device=torch.device("cpu"), held=lambda: held, optimizer=lambda: moments
    )
    offloader.offload()
    assert len(waits) == 1
    assert all(waits[0]), "nothing is emptied before"
    assert not any(tensor.untyped_storage().nbytes() for tensor in held)
    offloader.onload(optimizer=True)
    assert len(waits) == 2
    assert all(torch.equal(tensor, was) for tensor, was in zip(held, before))
