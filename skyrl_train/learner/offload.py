"""Offload and onload of a model: its memory on its device, or in the host while others use the device.

Storages are emptied and filled again in place. No tensor, parameter or optimizer state is replaced by another, so whatever
holds on to one (FSDP2's shards, an optimizer, a gradient) needs not know, and training goes on bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from skyrl_train.distributed import reshard
from skyrl_train.errors import SkyrlTrainError

if TYPE_CHECKING:
    from torch import nn

Tensors = Callable[[], Iterable[Tensor]]


class Offloader:
    """Memory of one model that comes and goes: parameters, buffers and gradients together, the optimizer's state by
    itself."""

    def __init__(self, model: nn.Module, *, name: str, device: torch.device, held: Tensors, optimizer: Tensors) -> None:
        """`held` is all there is between passes, `optimizer` what of it belongs to the optimizer; both are asked at each
        move. Memory that is not on `device` stays where it is."""
        self._model, self._name, self._device = model, name, device
        self._held, self._optimizer_tensors = held, optimizer
        self._model_part, self._optimizer_part = _Part(), _Part()

    def offload(self) -> None:
        """Everything to the host. The device's memory is free for others when this returns. Idempotent."""
        # Parameters that a forward gathered and keeps are none of the tensors below, and would stay on the device.
        reshard(self._model)
        moments = _storages(self._optimizer_tensors(), self._device)
        everything = _storages(self._held(), self._device)
        # The state is among what is held. It is a part by itself, since scoring brings the model back without it.
        of_model = {key: storage for key, storage in everything.items() if key not in moments}
        self._optimizer_part.copy_out(moments)
        self._model_part.copy_out(of_model)
        # Before anything is emptied: copies are enqueued, and one wait does for both parts.
        self._await_copies()
        self._optimizer_part.leave(moments)
        self._model_part.leave(of_model)
        self.release()

    def onload(self, *, optimizer: bool) -> None:
        """The model back on the device, and the optimizer's state where asked for. Idempotent."""
        self._model_part.come_back()
        if optimizer:
            self._optimizer_part.come_back()
        self._await_copies()

    def release(self) -> None:
        """Give memory that was freed back to the device."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _await_copies(self) -> None:
        """Copies are enqueued one behind the other; wait once for all of them."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def require(self, *, optimizer: bool) -> None:
        """Raises SkyrlTrainError where what is about to be used is in the host."""
        if self._model_part.away or (optimizer and self._optimizer_part.away):
            raise SkyrlTrainError(f"the {self._name} model is in the host's memory; call onload before it is used")


class _Part:
    """Storages that come and go together, and the host's copies of them, which are kept for the next time."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}
        self._away: dict[int, torch.UntypedStorage] = {}

    @property
    def away(self) -> bool:
        return bool(self._away)

    def copy_out(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Enqueue their copies to the host."""
        for key, storage in storages.items():
            size = storage.nbytes()
            if key not in self._copies or len(self._copies[key]) != size:
                # A copy to memory that is not pinned makes the host wait for each storage.
                pinned = storage.device.type == "cuda"
                self._copies[key] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            self._copies[key].untyped_storage().copy_(storage, non_blocking=True)

    def leave(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Empty them, once their copies are whole."""
        for key, storage in storages.items():
            storage.resize_(0)
            self._away[key] = storage
        # Copies of storages that are gone, as those of gradients that
        # were dropped, are let go: their memory would stay taken.
        self._copies = {key: copy for key, copy in self._copies.items() if key in self._away}

    def come_back(self) -> None:
        """Fill them again: copies are enqueued."""
        for key, storage in self._away.items():
            storage.resize_(len(self._copies[key]))
            storage.copy_(self._copies[key].untyped_storage(), non_blocking=True)
        self._away = {}


def _storages(tensors: Iterable[Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """Each storage once, by its identity; without those that are empty, elsewhere, or mapped from a file."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        # Of a sharded tensor the part that this rank has: the DTensor itself has no memory.
        local = getattr(tensor, "_local_tensor", tensor)
        storage: torch.UntypedStorage = local.untyped_storage()
        if storage.nbytes() and storage.resizable() and storage.device.type == device.type:
            found[storage._cdata] = storage
    return found
