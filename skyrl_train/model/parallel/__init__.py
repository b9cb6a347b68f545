"""Layers in parts: experts and tensor parallelism, and what differs between versions of torch."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.model.parallel.expert_routing import (
        follow_routing as follow_routing,
        record_routing as record_routing,
        replayed as replayed,
        replaying as replaying,
    )
    from skyrl_train.model.parallel.experts import check_experts as check_experts, expert_modules as expert_modules
    from skyrl_train.model.parallel.tensor_parallel import (
        TensorGroup as TensorGroup,
        check_divisible as check_divisible,
        cut_matrices as cut_matrices,
    )
    from skyrl_train.model.parallel.tiles import tiles_for_trace as tiles_for_trace
    from skyrl_train.model.parallel.torch_versions import (
        ALL_GATHER as ALL_GATHER,
        REDUCE_SCATTER as REDUCE_SCATTER,
        all_gather as all_gather,
        fsdp_groups as fsdp_groups,
        reduce_scatter as reduce_scatter,
    )

__getattr__ = lazily(__name__)
