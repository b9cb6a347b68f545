"""A rank's part in a weight sync: gathers whole parameters from all ranks, and hands them over in one of four ways."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from skyrl_train.distributed.process_group import Rendezvous
from skyrl_train.model.lora import adapter_tensors, weights_by_name
from skyrl_train.weight_sync.broadcast import WeightGroup
from skyrl_train.weight_sync.buckets import Bucket, in_file, pack, pack_bucket
from skyrl_train.weight_sync.lending import Loan, device_name

if TYPE_CHECKING:
    from torch import nn

    from skyrl_train.distributed.strategy import ModelStrategy


@dataclass(frozen=True, kw_only=True)
class ParameterFact:
    """What can be known of a parameter without gathering it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Whole, however it is sharded."""


class WeightSender:
    """The weights of one rank's model. Methods that gather are called by all ranks, in step and with the same names."""

    def __init__(
        self,
        model: nn.Module,
        strategy: ModelStrategy,
        device: torch.device,
        *,
        require_there: Callable[[], None] = lambda: None,
    ) -> None:
        """`device` computes; parameters may be elsewhere. `require_there` raises where they cannot be read now."""
        self._model, self._strategy, self._device = model, strategy, device
        self._require_there = require_there
        self._group: WeightGroup | None = None
        self._loan: Loan | None = None

    def describe(self) -> tuple[ParameterFact, ...]:
        """Every parameter, tied ones once, in the model's order; an adapter is part of what it adapts."""
        return _facts({name: weight.parameter for name, weight in weights_by_name(self._model).items()})

    def describe_adapter(self) -> tuple[ParameterFact, ...]:
        """The parameters of the adapter by themselves, under names of their own; none where there is no adapter."""
        return _facts(adapter_tensors(self._model))

    def device(self) -> str:
        """Name of the device on which this rank computes."""
        return device_name(self._device)

    def carry(self, planned: Bucket) -> Bucket | None:
        """A bucket that carries the parameters of `planned`, in its types, on rank 0; None elsewhere."""
        return pack_bucket(self._whole(planned)) if self._takes_part(planned, self._strategy.rank == 0) else None

    def write(self, planned: Bucket, path: Path) -> Bucket | None:
        """The same in a file. Raises OSError where the disk refuses."""
        bucket = self.carry(planned)
        return None if bucket is None else in_file(bucket, path)

    def meet(self, rendezvous: Rendezvous | None) -> None:
        """Rank 0 joins the engines' workers, in place of any group that it was in; the other ranks are given None."""
        if self._group is not None:
            self._group.close()
            self._group = None
        if rendezvous is not None:
            self._group = WeightGroup(rendezvous, self._device)

    def broadcast(self, planned: Bucket) -> None:
        """Sends these parameters to those whom `meet` met, who must be waiting for them."""
        if self._takes_part(planned, self._strategy.rank == 0):
            if self._group is None:
                raise RuntimeError("rank 0 was not told to meet the engines")
            self._group.send(pack(self._whole(planned), self._device)[1])

    def lend(self, planned: Bucket, borrowers: Collection[str]) -> Bucket | None:
        """A rank on whose device somebody borrows lends these parameters, until the next `lend` or `reclaim`; None on the
        others, whose copy nobody would ever open."""
        self.reclaim()
        if not self._takes_part(planned, self.device() in borrowers):
            return None
        bucket, flat = pack(self._whole(planned), self._device)
        self._loan = Loan(flat)
        return replace(bucket, handles=self._loan.handles)

    def reclaim(self) -> None:
        """Nobody reads any more what was lent. Idempotent."""
        if self._loan is not None:
            self._loan.close()
            self._loan = None

    def _takes_part(self, planned: Bucket, hands_over: bool) -> bool:
        """`hands_over`; a rank that does not takes part in the gathering and is done."""
        if not hands_over:
            for _ in self._whole(planned):
                pass
        return hands_over

    def _whole(self, planned: Bucket) -> Iterator[tuple[str, Tensor]]:
        self._require_there()
        weights, adapter, full = weights_by_name(self._model), adapter_tensors(self._model), self._strategy.full
        for name, dtype in zip(planned.names, planned.dtypes):
            type_ = getattr(torch, dtype)
            is_adapter = name in adapter
            yield name, full(adapter[name].detach().to(type_)) if is_adapter else weights[name].whole(full, type_)


def _facts(parameters: Mapping[str, Tensor]) -> tuple[ParameterFact, ...]:
    return tuple(
        ParameterFact(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in parameters.items()
    )
