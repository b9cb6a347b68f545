"""A piece of work that all ranks finish, or none: where memory runs out on one of them, each learns of it.

Work on a replica talks to nobody, so that it is enough to agree at its end. Work on a sharded model gathers parameters
and sums gradients block by block, and a rank that stops in the middle would leave the others waiting in the next of these
collectives. So each of them is preceded by a rendezvous: one number per rank over the CPU's process group, 0 for fine; all
learn the largest. The rules:

1. A rank that is well takes part in a rendezvous before every collective, and in one more at the end. A rank that fails
   takes part in one.
2. Between a rendezvous and its collective nothing is allocated, so that a rank that came to the rendezvous well comes to
   the collective too.
3. Who learns of a failure, its own or another's, leaves the work at once and takes part in no further one.

No rank can be left waiting: up to the first failure all ranks run the same rendezvous and collectives in the same order
(their number depends on the model alone). The failing rank's next call is a rendezvous, by 1; that of each other rank is
one too, either before the next collective or at the end; it is the same one, since they were in step so far. After it all
know and leave, by 3. Two ranks that fail at once find each other there. Before the work and after it no rank is inside a
collective, whatever happened.

A rendezvous takes one round trip of a few bytes between hosts and does not wait for a device. It happens only where the
work is open, that is, where micro-batches size themselves.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.errors import RankOutOfMemory, SkyrlTrainError

T = TypeVar("T")

FINE, OUT_OF_MEMORY, BROKEN = 0, 1, 2
"""What a rank says at a rendezvous."""

_ALLOCATION_FAILURE = re.compile(
    r"out of memory"  # CUDA's runtime and driver, torch's allocators, Triton's launcher, NCCL ("Cuda failure 2 '...'")
    r"|_ALLOC(ATION)?_FAILED"  # cuBLAS, cuSOLVER, cuFFT, cuDNN (9 says INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)
    r"|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES"
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|failed to (CUDA )?(host alloc|calloc|malloc)"  # NCCL
    r"|can('t|not) allocate memory"  # torch's CPU allocator, and the kernel
    r"|out of resource: ",  # Triton: a kernel's shared memory
    re.IGNORECASE,
)
"""Found in messages of errors which mean the same as torch.OutOfMemoryError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: torch and the libraries below it say so in many ways, Triton in an error of its own."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    is_of_triton = type(error).__module__.partition(".")[0] == "triton"
    return (isinstance(error, RuntimeError) or is_of_triton) and bool(_ALLOCATION_FAILURE.search(str(error)))


class _FailedElsewhere(Exception):
    """Another rank has failed."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


class OomConsensus:
    """Runs work with the other ranks."""

    def __init__(self, rendezvous: Callable[[int], int]) -> None:
        """`rendezvous` turns this rank's number into the largest of all ranks."""
        self._rendezvous = rendezvous
        self._open = False

    def before_collective(self) -> None:
        """Hold a rendezvous ahead of each collective inside the work; elsewhere do nothing."""
        if self._open:
            code = self._rendezvous(FINE)
            if code != FINE:
                raise _FailedElsewhere(code)

    def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns. Raises RankOutOfMemory on all ranks where memory ran out on one, SkyrlTrainError on
        the others where one failed otherwise, and there what it failed of.

        When RankOutOfMemory is raised, nothing refers to what `work` had made any more.
        """
        self._open = True
        code, reason = FINE, ""
        try:
            result = work()
        except _FailedElsewhere as elsewhere:
            code = elsewhere.code
        except Exception as error:
            if not is_out_of_memory(error):
                self._open = False
                self._rendezvous(BROKEN)
                raise
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            code = self._rendezvous(OUT_OF_MEMORY)
        else:
            code = self._rendezvous(FINE)
            if code == FINE:
                return result
            del result
        finally:
            self._open = False
        gc.collect()  # frames of a failed pass may refer to each other in a ring
        if code == BROKEN:
            raise SkyrlTrainError("another rank failed in this pass; its own error says why")
        raise RankOutOfMemory(reason)


class RendezvousAllGather:
    """FSDP2's gathering of parameters, after a rendezvous."""

    def __init__(self, consensus: OomConsensus) -> None:
        self._consensus = consensus

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._consensus.before_collective()
        handle: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return handle


class RendezvousReduceScatter:
    """FSDP2's summing of gradients, after a rendezvous."""

    def __init__(self, consensus: OomConsensus) -> None:
        self._consensus = consensus

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._consensus.before_collective()
        handle: dist.Work | None = dist.reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        return handle
