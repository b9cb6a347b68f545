"""What a run on GPUs keeps in the memory of a node, by owner, and whether that fits. No torch.

Copies of what models and sleeping engines hold while others have their devices, copies from which checkpoints are written,
state that never leaves the host: for a model of 32 billion parameters on eight GPUs that is over a terabyte. Python, Ray and
environments are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from skyrl_train.config.models import PlacementConfig
from skyrl_train.config.placement import Layout, Role
from skyrl_train.errors import Violation, byte_size
from skyrl_train.learner.memory import PredictedPasses

_GPUS_PER_NODE = 8
"""Of a node, where the placement binds nothing to one."""
_MARGIN = 0.9
"""Of a node's memory that these may take: the rest is for processes, the object store and files that are read."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """What one node keeps in its memory at most."""

    owners: Mapping[str, int]
    """Bytes by what they are."""
    node_bytes: int
    """The memory of a node; 0 where it is not known."""

    @property
    def num_bytes(self) -> int:
        return sum(self.owners.values())

    def violations(self) -> tuple[Violation, ...]:
        """Return that it does not fit, where the memory of a node is known."""
        if not self.node_bytes or self.num_bytes <= _MARGIN * self.node_bytes:
            return ()
        parts = ", ".join(f"{name} {byte_size(count)}" for name, count in self.owners.items())
        return (
            Violation(
                field="placement.host_memory_gb",
                rule=f"a node must hold what the run keeps in its memory, {byte_size(self.num_bytes)} and a tenth beside "
                f"it: {parts}",
                value=f"{self.node_bytes / 1e9:g}",
                remedy="more nodes, trainer.background_checkpoints=false, models and engines on devices of their own "
                "(placement.colocate_all=false), or model.lora.rank=32",
            ),
        )


def host_lines(memory: HostMemory) -> Iterator[str]:
    """Yield the lines of a terminal."""
    for name, count in memory.owners.items():
        yield f"{byte_size(count):>9}  {name}"
    there = f"of {byte_size(memory.node_bytes)}" if memory.node_bytes else "placement.host_memory_gb=G checks it"
    yield f"{byte_size(memory.num_bytes):>9}  in all ({there})"


def plan_host_memory(
    models: Mapping[Role, PredictedPasses],
    layout: Layout,
    placement: PlacementConfig,
    *,
    shared: bool,
    engine_number_bytes: int,
    background_checkpoints: bool,
) -> HostMemory:
    """Reckon the node that keeps most, against `placement.host_memory_gb`.

    Args:
        models: What predicts their passes, by role.
        shared: Whether models and engines leave devices to one another.
        engine_number_bytes: Of a number of an engine's weights; 0 where engines have no devices of their own.
        background_checkpoints: As of `trainer`.
    """

    def owners(seats: Mapping[str, int]) -> Iterator[tuple[str, int]]:
        for role, model in models.items():
            ranks = seats.get(role, 0)
            trained = role != "reference"
            state = model.share.state_bytes + 4 if trained else 0
            on_a_rank = model.counts.trained // max(1, model.share.num_shards)  # of a model that is cut, a rank's part
            if ranks and shared:
                yield f"{role}, while others have its devices", ranks * model.resident_bytes("scoring")
            if ranks and model.share.cpu_offload and trained:
                yield f"{role}, by strategy.cpu_offload", ranks * on_a_rank * (state + 4)
            if ranks and model.state_in_host_bytes:
                yield f"{role}, optimizer state by strategy.cpu_offload", ranks * model.state_in_host_bytes
            if ranks and trained and background_checkpoints:
                yield f"{role}, copy that a checkpoint is written from", ranks * on_a_rank * state
        engines = seats.get("engine", 0)
        if engines and shared and engine_number_bytes:
            policy = models["policy"]
            yield "engines asleep", engines * policy.counts.total * policy.share.tensor_ranks * engine_number_bytes

    found = [dict(owners(seats)) for seats in _seats_by_node(layout).values()]
    most = max(found, key=lambda one: sum(one.values()), default={})
    return HostMemory(owners=most, node_bytes=int(placement.host_memory_gb * 1e9))


def _seats_by_node(layout: Layout) -> dict[int, Counter[str]]:
    """By node, how many seats each role has on it."""
    nodes: dict[int, Counter[str]] = {}
    for role, (group, places) in layout.seats.items():
        for place in places:
            node = layout.groups[group][place].node
            nodes.setdefault(place // _GPUS_PER_NODE if node is None else node, Counter())[role] += 1
    return nodes
