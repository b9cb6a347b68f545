"""Ranks: process groups, meshes, sharding, gathering, and agreement on what all of them do."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.distributed.fsdp import reshard
    from skyrl_train.distributed.gather import gather_whole, own_box
    from skyrl_train.distributed.mesh import RankMesh, by_mesh
    from skyrl_train.distributed.oom_consensus import Collective, OomConsensus, is_out_of_memory
    from skyrl_train.distributed.process_group import (
        as_default_group,
        backend_in,
        is_broken_collective,
        join,
        leave,
        open_store,
    )
    from skyrl_train.distributed.sequence_parallel import SequenceGroup
    from skyrl_train.distributed.strategy import (
        GradientSync,
        ModelStrategy,
        RankSettings,
        Replicated,
        Sharded,
        SingleProcess,
        make_strategy,
    )

__all__ = [
    "Collective",
    "GradientSync",
    "ModelStrategy",
    "OomConsensus",
    "RankMesh",
    "RankSettings",
    "Replicated",
    "SequenceGroup",
    "Sharded",
    "SingleProcess",
    "as_default_group",
    "backend_in",
    "by_mesh",
    "gather_whole",
    "is_broken_collective",
    "is_out_of_memory",
    "join",
    "leave",
    "make_strategy",
    "open_store",
    "own_box",
    "reshard",
]

__getattr__ = lazily(__name__)
