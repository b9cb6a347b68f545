"""Which way the bytes of a weight sync take from ranks to the workers of engines, planned once for those that are there.

    rank ──enter──> one worker ──across──> one worker of each other node ──within──> all workers of that node

A *stream* is what enters at one worker: shards travel as they lie, each over the network once for each node that needs it.
The first worker of each node is in the first *lane*, the second in the second, as many as every node has; a lane joins one
leader of each node, so that streams cross between nodes over as many adapters side by side. Within a node each leader copies
what its lane brought to the others. A rank whose node has workers enters there, and the others are dealt over all leaders.

Nothing here imports torch: `plan/` counts bytes by it, of machines that are not there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from skyrl_train.weights import StreamPlan

Stage = Literal["enter", "across", "within"]


class Group(NamedTuple):
    """Participants that pass bytes to each other: the ranks by their number, then the workers."""

    name: str
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """The most bytes that one link carries in one direction in a stage."""

    network: int = 0
    """Of one participant, to or from other nodes."""
    node_network: int = 0
    """Of one node, to or from others: where its participants share an adapter."""
    local: int = 0
    """Of one participant, to or from others of its node."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Where everybody is, and what follows: every participant derives the same groups from it by itself."""

    sender_nodes: tuple[str, ...]
    """Address of each rank's node, by rank."""
    receiver_nodes: tuple[str, ...]
    """Node of each worker of an engine."""
    sending: tuple[int, ...]
    """Ranks that have anything to send: replicas of others have not."""

    @classmethod
    def of(cls, plan: StreamPlan) -> Topology:
        """Return the way of a plan's bytes."""
        sending = tuple(rank for rank, buckets in enumerate(plan.boxes) if any(buckets))
        return cls(sender_nodes=plan.sender_nodes, receiver_nodes=plan.receiver_nodes, sending=sending)

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Workers of each node, as participants."""
        found: dict[str, list[int]] = {}
        for index, node in enumerate(self.receiver_nodes):
            found.setdefault(node, []).append(len(self.sender_nodes) + index)
        return tuple(map(tuple, found.values()))

    @cached_property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """The leaders of each lane, one of each node."""
        # zip ends with the node of the fewest workers, so that each lane has a leader on every node.
        return tuple(zip(*self.nodes))

    @cached_property
    def streams(self) -> dict[int, tuple[int, ...]]:
        """The ranks that enter at each leader, in the order in which bytes lie in a bucket: lane by lane, node by node."""
        found: dict[int, list[int]] = {leader: [] for lane in self.lanes for leader in lane}
        by_node = dict(zip(dict.fromkeys(self.receiver_nodes), zip(*self.lanes)))
        all_leaders = tuple(leader for node in by_node.values() for leader in node)
        dealt: dict[tuple[int, ...], int] = defaultdict(int)
        for rank in self.sending:
            # At its own node where that has workers, which is no network
            # at all; dealt in turn, so that leaders get as many.
            leaders = by_node.get(self.sender_nodes[rank], all_leaders)
            found[leaders[dealt[leaders] % len(leaders)]].append(rank)
            dealt[leaders] += 1
        return {leader: tuple(ranks) for leader, ranks in found.items()}

    @property
    def order(self) -> tuple[int, ...]:
        """The ranks that send, in the order in which their bytes lie in a bucket."""
        return tuple(rank for ranks in self.streams.values() for rank in ranks)

    @cached_property
    def groups(self) -> dict[Stage, tuple[Group, ...]]:
        """All groups by stage: whom a leader receives from, its lane, its node. One participant alone is no group."""
        # The leader comes first: it is rank 0 of the group, to which all others send.
        enter = [Group(f"enter/{leader}", (leader, *ranks)) for leader, ranks in self.streams.items() if ranks]
        across = [Group(f"across/{index}", lane) for index, lane in enumerate(self.lanes) if len(lane) > 1]
        within = [Group(f"within/{index}", node) for index, node in enumerate(self.nodes) if len(node) > 1]
        return {"enter": tuple(enter), "across": tuple(across), "within": tuple(within)}

    def link_bytes(self, sizes: Sequence[int]) -> dict[Stage, StageBytes]:
        """Return the most that a link carries in each stage, where each rank sends `sizes[rank]` bytes. A broadcast is a
        chain, from its root on: every member receives all bytes once, and all but the last pass them on."""
        nodes = (*self.sender_nodes, *self.receiver_nodes)
        carried: dict[tuple[Stage, str], dict[tuple[object, str], int]] = defaultdict(lambda: defaultdict(int))

        def carry(stage: Stage, participant: int, way: str, num_bytes: int, *, is_near: bool) -> None:
            carried[stage, "local" if is_near else "network"][participant, way] += num_bytes
            if not is_near:
                carried[stage, "node_network"][nodes[participant], way] += num_bytes

        for leader, ranks in self.streams.items():
            for rank in ranks:
                is_near = nodes[rank] == nodes[leader]
                carry("enter", rank, "out", sizes[rank], is_near=is_near)
                carry("enter", leader, "in", sizes[rank], is_near=is_near)
        for stage, members, begun in self.rings(sizes):
            for member, own, following in zip(members, begun, (*begun[1:], *begun[:1])):
                carry(stage, member, "in", sum(begun) - own, is_near=stage == "within")
                # The last of a chain passes nothing on, who is the one ahead of its root.
                carry(stage, member, "out", sum(begun) - following, is_near=stage == "within")
        stages: tuple[Stage, ...] = ("enter", "across", "within")
        kinds = ("network", "node_network", "local")
        return {
            stage: StageBytes(**{kind: max(carried[stage, kind].values(), default=0) for kind in kinds})
            for stage in stages
        }

    def rings(self, sizes: Sequence[int]) -> Iterator[tuple[Stage, tuple[int, ...], tuple[int, ...]]]:
        """Yield the members of each group that broadcasts, and the bytes that each of them has and the others want."""
        entered = {leader: sum(sizes[rank] for rank in ranks) for leader, ranks in self.streams.items()}
        for lane in self.lanes:
            yield "across", lane, tuple(entered[leader] for leader in lane)
        brought = {leader: sum(entered[each] for each in lane) for lane in self.lanes for leader in lane}
        for node in self.nodes:
            yield "within", node, tuple(brought.get(member, 0) for member in node)

    def most_calls(self) -> int:
        """Return how many times the busiest participant passes bytes on, for each bucket and each of its two parts."""
        calls: dict[int, int] = defaultdict(int)
        for leader, ranks in self.streams.items():
            for participant in (*ranks, *(leader for _ in ranks)):
                calls[participant] += 1
        for lane in self.lanes:
            for leader in lane:
                calls[leader] += sum(bool(self.streams[each]) for each in lane) if len(lane) > 1 else 0
        for node in self.nodes:
            for participant in node:
                calls[participant] += len(self.lanes) if len(node) > 1 else 0
        return max(calls.values())
