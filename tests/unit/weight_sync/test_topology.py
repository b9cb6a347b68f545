"""The way of a weight sync's bytes: each node gets each byte once, whoever is where, and what is counted is what travels."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict

import pytest
from hypothesis import given, settings, strategies as st

from skyrl_train.weight_sync.topology import StageBytes, Topology
from tests.support.weight_streams import hops


def topology(senders: str, receivers: str, *, sending: int | None = None) -> Topology:
    """Participants by the letters of their nodes."""
    ranks = range(len(senders) if sending is None else sending)
    return Topology(sender_nodes=tuple(senders), receiver_nodes=tuple(receivers), sending=tuple(ranks))


def test_two_nodes_of_each_by_hand() -> None:
    found = topology("aabb", "ccdd")
    assert found.lanes == ((4, 6), (5, 7)), "the first workers of both nodes, and the second ones"
    assert found.streams == {4: (0,), 6: (2,), 5: (1,), 7: (3,)}
    assert [group.name for group in found.groups["enter"]] == ["enter/4", "enter/6", "enter/5", "enter/7"]
    assert [group.members for group in found.groups["within"]] == [(4, 5), (6, 7)]
    assert found.link_bytes([10, 20, 30, 40]) == {
        "enter": StageBytes(network=40, node_network=70, local=0),  # out of node b, or into d
        "across": StageBytes(network=40, node_network=70, local=0),
        "within": StageBytes(network=0, node_network=0, local=60),
    }


def test_a_rank_enters_on_its_own_node_where_that_has_workers() -> None:
    found = topology("ab", "ccbb")
    assert 1 in found.streams[4] + found.streams[5]
    assert found.link_bytes([0, 5])["enter"] == StageBytes(network=0, node_network=0, local=5)


def test_one_worker_alone_is_in_no_group_but_that_in_which_it_receives() -> None:
    found = topology("aa", "b")
    assert (found.groups["across"], found.groups["within"]) == ((), ())
    assert [group.members for group in found.groups["enter"]] == [(2, 0, 1)]


@st.composite
def topologies(draw: st.DrawFn) -> tuple[Topology, list[int]]:
    nodes = st.sampled_from("abcdefg")
    senders = draw(st.text(nodes, min_size=1, max_size=20))
    receivers = draw(st.text(nodes, min_size=1, max_size=20))
    made = topology(senders, receivers, sending=draw(st.integers(1, len(senders))))
    sizes = [draw(st.integers(0, 1000)) if rank in made.sending else 0 for rank in range(len(senders))]
    return made, sizes


@settings(max_examples=200, deadline=None)
@given(topologies())
def test_every_worker_gets_every_byte_once_and_every_node_once_over_the_network(
    case: tuple[Topology, list[int]],
) -> None:
    made, sizes = case
    nodes = (*made.sender_nodes, *made.receiver_nodes)
    received: dict[int, int] = defaultdict(int)
    over_network: dict[str, int] = defaultdict(int)
    for hop in hops(made, sizes):
        received[hop.target] += hop.num_bytes
        over_network[nodes[hop.target]] += hop.num_bytes * (nodes[hop.source] != nodes[hop.target])
    workers = range(len(made.sender_nodes), len(nodes))
    assert [received[worker] for worker in workers] == [sum(sizes)] * len(workers)
    assert not any(received[rank] for rank in range(len(made.sender_nodes))), "no rank receives anything"
    assert all(over_network[node] <= sum(sizes) for node in made.receiver_nodes)


@settings(max_examples=200, deadline=None)
@given(topologies())
def test_what_links_carry_is_the_sum_of_all_hops(case: tuple[Topology, list[int]]) -> None:
    made, sizes = case
    nodes = (*made.sender_nodes, *made.receiver_nodes)
    network: dict[tuple[str, int, str], int] = defaultdict(int)
    local: dict[tuple[str, int, str], int] = defaultdict(int)
    node_network: dict[tuple[str, str, str], int] = defaultdict(int)
    for stage, source, target, num_bytes in hops(made, sizes):
        for end, way in ((source, "out"), (target, "in")):
            if nodes[source] == nodes[target]:
                local[stage, end, way] += num_bytes
            else:
                network[stage, end, way] += num_bytes
                node_network[stage, nodes[end], way] += num_bytes
    for stage, found in made.link_bytes(sizes).items():
        assert found == StageBytes(
            **{
                kind: max((size for key, size in counts.items() if key[0] == stage), default=0)
                for kind, counts in {"network": network, "node_network": node_network, "local": local}.items()
            }
        )


@settings(max_examples=100, deadline=None)
@given(topologies())
def test_every_participant_is_in_one_group_of_a_stage_at_most(case: tuple[Topology, list[int]]) -> None:
    made, _ = case
    for groups in made.groups.values():
        members = [member for group in groups for member in group.members]
        assert len(members) == len(set(members))
    assert sorted(made.order) == list(made.sending)


@pytest.mark.parametrize("num_nodes", [1, 8, 64])
def test_512_ranks_and_as_many_workers_are_planned_in_lanes_of_a_node_each(num_nodes: int) -> None:
    count = 8 * num_nodes
    made = Topology(
        sender_nodes=tuple(f"r{index // 8}" for index in range(count)),
        receiver_nodes=tuple(f"e{index // 8}" for index in range(count)),
        sending=tuple(range(count)),
    )
    links = made.link_bytes([1000] * count)
    assert links["enter"].network == 1000, "every rank enters at a worker of its own"
    assert links["across"].network == 1000 * (num_nodes - 1), "an eighth of what other nodes have"
    assert links["across"].node_network + links["enter"].node_network == 1000 * count
    assert links["within"].local == 7 * 1000 * num_nodes
    assert made.most_calls() == 1 + (num_nodes if num_nodes > 1 else 0) + 8


def test_planning_needs_no_torch() -> None:
    program = (
        "import sys; from skyrl_train.weight_sync import topology; topology.Topology; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
