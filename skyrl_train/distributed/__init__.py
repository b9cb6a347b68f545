"""Ranks: process groups, meshes, sharding, gathering, and agreement on what all of them do."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.distributed.fsdp import reshard as reshard
    from skyrl_train.distributed.gather import gather_whole as gather_whole, own_box as own_box
    from skyrl_train.distributed.mesh import RankMesh as RankMesh, by_mesh as by_mesh
    from skyrl_train.distributed.oom_consensus import (
        Collective as Collective,
        OomConsensus as OomConsensus,
        is_out_of_memory as is_out_of_memory,
    )
    from skyrl_train.distributed.process_group import (
        as_default_group as as_default_group,
        backend_in as backend_in,
        is_broken_collective as is_broken_collective,
        join as join,
        leave as leave,
        open_store as open_store,
    )
    from skyrl_train.distributed.sequence_parallel import SequenceGroup as SequenceGroup
    from skyrl_train.distributed.strategy import (
        GradientSync as GradientSync,
        ModelStrategy as ModelStrategy,
        RankContext as RankContext,
        Replicated as Replicated,
        Sharded as Sharded,
        SingleProcess as SingleProcess,
        make_strategy as make_strategy,
    )

__getattr__ = lazily(__name__)
