"""Weights through a group of processes of their own: rank 0 of a learner sends, every worker of every engine receives.

The group stands beside whatever groups learner and engine have. Its backend follows the device: gloo between CPUs, NCCL
between CUDA devices, where a bucket never leaves device memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.distributed.process_group import Rendezvous, meet
from skyrl_train.weight_sync.buckets import checksum_of


class WeightGroup:
    """One process's end. Calls block until all have made theirs, or the rendezvous' deadline."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        """Raises what torch raises where the others do not come in time."""
        self._device = device
        self._backend: Any = meet(rendezvous, device)

    def send(self, flat: Tensor) -> None:
        """A bucket's bytes, and their checksum behind them."""
        self._broadcast(flat)
        self._broadcast(torch.tensor([checksum_of(flat)], dtype=torch.int64, device=self._device))

    def receive(self, num_bytes: int) -> tuple[Tensor, int]:
        """The bytes, in memory of their own, and the checksum that came behind them."""
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._broadcast(flat)
        checksum = torch.empty(1, dtype=torch.int64, device=self._device)
        self._broadcast(checksum)
        return flat, int(checksum)

    def close(self) -> None:
        """Leaves without waiting for anybody: others may be dead."""
        abort = getattr(self._backend, "abort", None)
        if self._device.type == "cuda" and abort is not None:
            abort()
        self._backend = None

    def _broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._backend.broadcast([tensor], options).wait()
