"""A piece of work that all ranks finish, or none: where memory runs out on one of them, each learns of it.

Work on a replica talks to nobody, so that it is enough to agree at its end. Work on a sharded model gathers parameters
and sums gradients block by block, and a rank that stopped in the middle would leave the others waiting in the next of these
collectives. So a rank that failed goes on taking part in those of its micro-batch, with zeros, and only then do all agree:
one number per rank over the CPU's process group, 0 for fine, of which all learn the largest. The rules:

1. Which collectives a micro-batch consists of depends on the model, on what of it is gathered already, and on whether there
   is a backward pass, and of which kind: never on rows. The first micro-batch of a kind is noted, the later ones follow.
2. All ranks agree ahead of each micro-batch, and once at the end of the work. A rank that failed takes part in what is left
   of its micro-batch's collectives, then in the next agreement, and in nothing after it. Who learns there of a failure,
   its own or another's, leaves the work at once.
3. While a kind is not known, and where collectives do depend on rows (ranks that share forwards), each collective is
   preceded by a rendezvous, which is such an agreement: a rank that fails takes part in the next one at once.
4. Between a rendezvous and its collective, and between a collective's being counted and its call, nothing is allocated.

No rank can be left waiting: up to the first failure all ranks run the same agreements and collectives in the same order.
By 2 (or 3) the one that failed and the others go on doing so up to an agreement, after which all know and leave. Two ranks
that fail in one micro-batch find each other there. Before the work and after it no rank is inside a collective, whatever
happened. What others computed from zeros is dropped with the pass.

An agreement takes one round trip of a few bytes between hosts and does not wait for a device. It happens only where the
work is open, that is, where micro-batches size themselves.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.errors import RankOutOfMemory, SkyrlTrainError
from skyrl_train.model.parallel import all_gather, reduce_scatter

T = TypeVar("T")

FINE, BROKEN, OUT_OF_MEMORY = 0, 1, 2
"""What a rank says at a rendezvous. Where memory ran out on one, an error on another may come of the zeros that the first
sent; if it does not, it comes again."""

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
    """Another rank has failed in the same step, for the reason that `code` names."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a pass, as far as a rank must know it that has nothing to say in it."""

    num_sent: int
    num_received: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    op: dist.ReduceOp | None
    """How it is summed; None where it gathers."""
    replicas: dist.ProcessGroup | None = None
    """Who sum up what was received once more (HSDP)."""

    def take_part(self) -> None:
        """Join it with zeros. Raises what `is_out_of_memory` knows where there is not even room for these."""
        sent = torch.zeros(self.num_sent, dtype=self.dtype, device=self.device)
        received = torch.empty(self.num_received, dtype=self.dtype, device=self.device)
        if self.op is None:
            all_gather(received, sent, group=self.group)
            return
        reduce_scatter(received, sent, op=self.op, group=self.group)
        if self.replicas is not None:
            dist.all_reduce(received, group=self.replicas)


class OomConsensus:
    """Runs work with the other ranks."""

    def __init__(self, rendezvous: Callable[[int], int], *, follows: bool = True) -> None:
        """
        Args:
            rendezvous: Turns this rank's number into the largest of all ranks.
            follows: Whether all collectives of a micro-batch are known from an earlier one of its kind; False where some
                depend on its rows.
        """
        self._rendezvous = rendezvous
        self._open = False
        self.follows = follows
        self._known: dict[Hashable, tuple[Collective, ...]] = {}
        self._kind: Hashable = None
        """That of the micro-batch that is computed, where it is being noted or followed."""
        self._expected: tuple[Collective, ...] | None = None
        """Collectives of the micro-batch that is computed; None while each has a rendezvous."""
        self._done: list[Collective] = []

    def begin_micro_batch(self, kind: Hashable) -> None:
        """Agree that the one before was finished, and begin one of this kind, the same on all ranks."""
        if self._open:
            self._agree()
            self._kind, self._done = kind, []
            self._expected = self._known.get(kind) if self.follows else None

    def before_collective(self, collective: Collective | None = None) -> None:
        """Count a collective of the work, or hold a rendezvous ahead of it; outside the work do nothing.

        `collective`: None where it depends on the micro-batch's rows.
        """
        if not self._open:
            return
        if self._expected is None:
            self._require_fine(self._rendezvous(FINE))
        elif collective not in self._expected[len(self._done) : len(self._done) + 1]:
            raise SkyrlTrainError(
                f"collective {len(self._done)} of a micro-batch is not that of an earlier one of its kind: {collective} "
                f"in place of one of {self._expected[len(self._done) :]}; after {self._done}; {self._kind}"
            )
        if collective is not None:
            self._done.append(collective)

    def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns. Raises RankOutOfMemory on all ranks where memory ran out on one, SkyrlTrainError on
        the others where one failed otherwise, and there what it failed of.

        When RankOutOfMemory is raised, nothing refers to what `work` had made any more.
        """
        self._open, self._kind, self._expected, self._done = True, None, None, []
        code, reason = FINE, ""
        try:
            result = work()
            self._agree()
            return result
        except _FailedElsewhere as elsewhere:
            code = elsewhere.code
        except Exception as error:
            if not is_out_of_memory(error):
                self._open = False
                self._take_part()
                code = self._rendezvous(BROKEN)
                if code == BROKEN:
                    raise
            else:
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
        finally:
            self._open = False
        result = None  # type: ignore[assignment]
        gc.collect()  # frames of a failed pass may refer to each other in a ring
        if reason:
            self._take_part()
            code = self._rendezvous(OUT_OF_MEMORY)
        if code == BROKEN:
            raise SkyrlTrainError("another rank failed in this pass; its own error says why")
        raise RankOutOfMemory(reason)

    def _agree(self) -> None:
        """Have all ranks say that they are fine, and keep what was noted."""
        self._require_fine(self._rendezvous(FINE))
        if self._expected is None and self.follows and self._kind is not None:
            self._known[self._kind] = tuple(self._done)

    def _require_fine(self, code: int) -> None:
        if code != FINE:
            raise _FailedElsewhere(code)

    def _take_part(self) -> None:
        """Join what is left of the micro-batch's collectives, so that the others come to its end."""
        for collective in (self._expected or ())[len(self._done) :]:
            try:
                collective.take_part()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if torch.accelerator.is_available():
                    torch.accelerator.empty_cache()
                collective.take_part()


class CountedAllGather:
    """FSDP2's gathering of parameters, as the consensus knows it."""

    def __init__(self, consensus: OomConsensus) -> None:
        self._consensus = consensus

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer of torch's, as FSDP2 would by itself."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._consensus.before_collective(_described(output_tensor, input_tensor, group, None))
        handle: dist.Work | None = all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return handle


class CountedReduceScatter:
    """FSDP2's summing of gradients, as the consensus knows it."""

    def __init__(self, consensus: OomConsensus, replicas: dist.ProcessGroup | None = None) -> None:
        """`replicas`: ranks among which FSDP2 sums the shards once more, right after."""
        self._consensus, self._replicas = consensus, replicas

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer of torch's, as FSDP2 would by itself."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._consensus.before_collective(_described(output_tensor, input_tensor, group, op, self._replicas))
        handle: dist.Work | None = reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return handle


def _described(
    received: Tensor,
    sent: Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp | None,
    replicas: dist.ProcessGroup | None = None,
) -> Collective:
    return Collective(
        num_sent=sent.numel(),
        num_received=received.numel(),
        dtype=sent.dtype,
        device=sent.device,
        group=group,
        op=op,
        replicas=replicas,
    )
