"""What differs between the supported releases of torch, 2.11 to 2.13; docs/private_apis.md names what ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
"""Names in torch.distributed of the collectives of one tensor."""
VARLEN_OPTIONS = frozenset({"enable_gqa", "num_splits"} if torch.__version__ >= "2.12" else ())
"""Of these options of `varlen_attn`, those that there are. By the release: its module takes seconds to import."""


def all_gather(received: Tensor, sent: Tensor, **options: Any) -> Any:
    """Gather `sent` of all ranks into `received`, one after the other; options and result are torch's."""
    return getattr(dist, ALL_GATHER)(received, sent, **options)


def reduce_scatter(received: Tensor, sent: Tensor, **options: Any) -> Any:
    """Reduce `sent` over ranks, this rank's part of it into `received`; options and result are torch's."""
    return getattr(dist, REDUCE_SCATTER)(received, sent, **options)


def fsdp_groups(module: nn.Module) -> Sequence[Any]:
    """Return FSDP2's groups of the parameters that a sharded module gathers itself, none where it has none."""
    sharded: Any = module
    state = sharded._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
