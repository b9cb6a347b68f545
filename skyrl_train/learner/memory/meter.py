"""How much memory a process holds, the most that it held, and where an allocation is refused.

    CudaMeter       the CUDA allocator's own figures; its limit is what this process may take of the device
    CountingMeter   a byte budget on a CPU, counted tensor by tensor: what is tested without a device

The counting meter adds up the storages of tensors: of the models that were given to it (parameters, buffers, gradients,
optimizer state), and of every tensor that is made while it counts, for as long as something holds it (autograd's saved
tensors are such, and so are parameters that a sharded model gathers). It does not see a kernel's own scratch space, the
interpreter, or what is allocated while it does not count (a rollout engine in the same process, batches at rest).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GIB = 1 << 30
Gathered = Callable[[], Iterable[Tensor]]


class MemoryMeter:
    """Counts one process's memory. Passes run inside `counting()`."""

    limit_bytes: int
    """What the process may hold."""

    def counting(self, gathered: Gathered = tuple) -> AbstractContextManager[None]:  # noqa: ARG002
        """While it is open, allocations count, and one past the limit raises torch.OutOfMemoryError. Reentrant.

        `gathered` gives the tensors whose storages a sharded model empties and fills again, which is no operation of
        tensors. An allocator that always counts has nothing to open.
        """
        return nullcontext()

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made outside of `counting()`, each once, for as long as they live; an allocator knows
        them. Never refuses, since they are there already."""

    def in_use_bytes(self) -> int:
        """Return what is held now."""
        raise NotImplementedError

    def peak_bytes(self) -> int:
        """Return the most that was held at once since `reset_peak`; a refused allocation is not part of it."""
        raise NotImplementedError

    def reserved_peak_bytes(self) -> int:
        """Return the most that was taken from the device at once since `reset_peak`: what was held, and what lay between,
        which is nothing where tensors are counted one by one."""
        return self.peak_bytes()

    def reset_peak(self) -> None:
        """Begin a new peak at what is held now."""
        raise NotImplementedError

    def release_cached(self) -> None:
        """Give back what the allocator keeps for later, after an out-of-memory: blocks of the sizes that failed."""


class CudaMeter(MemoryMeter):
    """The caching allocator of one CUDA device."""

    def __init__(self, device: torch.device, *, limit_bytes: int = 0) -> None:
        """`limit_bytes`: a cap, enforced by the allocator; 0 is what the device has free, beside what is held already.

        Where others use the device too, what they take later is not known here: state a cap then.
        """
        self._device = device
        free, total = torch.cuda.mem_get_info(device)
        # What this process has reserved counts as taken on the device, but is its own: held, or free for it to use.
        available = free + torch.cuda.memory_reserved(device)
        self.limit_bytes = min(limit_bytes, available) if limit_bytes else available
        if limit_bytes:
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)

    def in_use_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def peak_bytes(self) -> int:
        # What is reserved beyond it is mostly the allocator's cache, which it gives back before it refuses.
        return int(torch.cuda.max_memory_allocated(self._device))

    def reserved_peak_bytes(self) -> int:
        # After an empty cache what is beyond the allocated is lost to the sizes of blocks and to gaps between them.
        return int(torch.cuda.max_memory_reserved(self._device))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()


class CountingMeter(MemoryMeter):
    """A byte budget over the tensors of one process on a CPU."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._storages: dict[int, _Counted] = {}
        self._held = 0
        self._peak = 0
        self._depth = 0
        self._gathered: Gathered = tuple

    @contextmanager
    def counting(self, gathered: Gathered = tuple) -> Iterator[None]:
        """Count what is allocated on this thread, the backward pass included."""
        if self._depth:
            yield
            return
        self._depth, self._gathered = 1, gathered
        try:
            with _Watch(self):
                yield
        finally:
            self._look_at_gathered()
            self._depth, self._gathered = 0, tuple

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._count_tensor(tensor)
        self._peak = max(self._peak, self._held)

    def in_use_bytes(self) -> int:
        self._look_at_gathered()
        return self._held

    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._held

    def made(self, result: Any) -> None:
        """Count an operation's new tensors. Raises torch.OutOfMemoryError where they pass the limit."""
        before = self._held
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count_tensor(tensor)
        if self._held > before:
            self._require_room(before)

    def require_room(self) -> None:
        """Count what was gathered since the last operation. Raises torch.OutOfMemoryError where it passes the limit."""
        before = self._held
        self._look_at_gathered()
        if self._held > before:
            self._require_room(before)

    def _look_at_gathered(self) -> None:
        """Count storages that have changed their size since the last operation."""
        for tensor in self._gathered():
            storage = tensor.untyped_storage()
            counted = self._storages.get(storage._cdata)
            if counted is None:
                self._count(storage)
            else:
                self._held += storage.nbytes() - counted.num_bytes
                # What `forget` takes off is this number, so that it has to follow.
                counted.num_bytes = storage.nbytes()

    def _count_tensor(self, tensor: Tensor) -> None:
        local = getattr(tensor, "_local_tensor", tensor)  # of a sharded tensor this rank's part
        if local.device.type != "meta" and local.layout == torch.strided:  # else there is no memory behind it
            self._count(local.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        counted = _Counted(storage.nbytes())

        def forget(_: weakref.ref[torch.UntypedStorage]) -> None:
            self._storages.pop(key, None)
            self._held -= counted.num_bytes

        # The wrapper lives as long as the storage itself, whoever holds it (autograd's saved tensors in C++, too).
        counted.reference = weakref.ref(storage, forget)
        self._storages[key] = counted
        self._held += counted.num_bytes

    def _require_room(self, before: int) -> None:
        if self._held > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"{self._held - before} bytes were to be allocated, but of the budget of {self.limit_bytes} bytes only "
                f"{max(0, self.limit_bytes - before)} are left"
            )
        self._peak = max(self._peak, self._held)


class _Counted:
    """The size of a storage, and the reference that says when it ends."""

    __slots__ = ("num_bytes", "reference")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a meter what operations return."""

    supports_higher_order_operators = True  # flex attention is one

    def __init__(self, meter: CountingMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # FSDP2 resizes storages without an operation: they are looked at ahead of the next one.
        self._meter.require_room()
        result = func(*args, **(kwargs or {}))
        self._meter.made(result)
        return result
