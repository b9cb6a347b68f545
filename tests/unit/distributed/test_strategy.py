"""What ranks make of their gradients, on two real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from skyrl_train.distributed.strategy import Replicated
from tests.gloo_ranks import on_ranks


def reduce_own(rank: int, folder: Path) -> list[Tensor]:
    """Gradients after the reduction, of which this rank computed `rank + 1` times a ramp; the second has another type."""
    parameters = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        parameter = nn.Parameter(torch.zeros(2, 3, dtype=dtype))
        parameter.grad = (rank + 1) * torch.arange(6, dtype=dtype).view(2, 3)
        parameters.append(parameter)
    Replicated().reduce_gradients([*parameters, nn.Parameter(torch.zeros(1))])
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def test_replicas_add_their_gradients_and_do_not_average_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Denominators were counted over the whole mini-batch, so that the sum is the gradient."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for gradients in on_ranks(reduce_own, tmp_path):
        assert [gradient.tolist() for gradient in gradients] == [[[0, 3, 6], [9, 12, 15]]] * 3
