"""Layers in parts: experts and tensor parallelism, and what differs between versions of torch."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.model.parallel.expert_routing import follow_routing, record_routing, replayed, replaying
    from skyrl_train.model.parallel.experts import check_experts, expert_modules
    from skyrl_train.model.parallel.tensor_parallel import TensorGroup, check_divisible, cut_matrices
    from skyrl_train.model.parallel.tiles import tiles_for_trace
    from skyrl_train.model.parallel.torch_versions import (
        ALL_GATHER,
        REDUCE_SCATTER,
        all_gather,
        fsdp_groups,
        reduce_scatter,
    )

__all__ = [
    "ALL_GATHER",
    "REDUCE_SCATTER",
    "TensorGroup",
    "all_gather",
    "check_divisible",
    "check_experts",
    "cut_matrices",
    "expert_modules",
    "follow_routing",
    "fsdp_groups",
    "record_routing",
    "reduce_scatter",
    "replayed",
    "replaying",
    "tiles_for_trace",
]

__getattr__ = lazily(__name__)
