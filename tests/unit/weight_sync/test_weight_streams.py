"""Weights that are streamed: every worker has what the ranks sent, bit for bit, wherever they are, or says why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from skyrl_train.errors import EngineError
from skyrl_train.weight_sync import Arrivals, SentWeights, StreamEnd
from skyrl_train.weight_sync.topology import Topology
from skyrl_train.weights import StreamPlan, Update, plan_of
from tests.support.weight_streams import CPU, Weights, bits, hops, make_plan, model, place_of, receive, send, sizes_of


class Streams:
    """Ranks and workers on threads, met."""

    def __init__(self, plan: StreamPlan, folder: Path, *, timeout_s: float = 60.0) -> None:
        self.plan, self.num_senders = plan, len(plan.sender_nodes)
        count = self.num_senders + len(plan.receiver_nodes)
        self._threads = ThreadPoolExecutor(count)
        meeting = str(folder / uuid4().hex)
        places = [place_of(meeting, participant, plan, timeout_s) for participant in range(count)]
        self.ends = list(self._threads.map(lambda place: StreamEnd(plan, place, CPU), places, timeout=60))
        self.sent = [SentWeights() for _ in plan.sender_nodes]
        self.arrivals = [Arrivals() for _ in plan.receiver_nodes]

    def sync(self, weights: Weights, version: int, update: Update = "") -> tuple[list[Weights], int]:
        """What each worker has afterwards, and the bytes that all ranks sent."""
        sending = [
            self._threads.submit(send, self.ends[rank], rank, weights, version, update, self.sent[rank])
            for rank in range(self.num_senders)
        ]
        receiving = [
            self._threads.submit(receive, end, arrivals, version, update)
            for end, arrivals in zip(self.ends[self.num_senders :], self.arrivals)
        ]
        return [each.result(60) for each in receiving], sum(each.result(60) for each in sending)

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self._threads.shutdown(wait=False)


PLACES = {
    "one rank, one worker": ("a", "b"),
    "two ranks, one worker": ("aa", "b"),
    "one rank, three workers of a node": ("a", "bbb"),
    "workers alone on their nodes": ("aa", "bcd"),
    "two nodes of each": ("aabb", "ccdd"),
    "nodes of unequal size": ("aab", "cccdde"),
    "all on one node": ("aaaa", "aa"),
    "nodes that ranks and workers share": ("aabb", "bbcc"),
    "more workers than ranks": ("a", "bbccdd"),
    "sixteen ranks and eight workers": ("aaaaaaaabbbbbbbb", "ccccdddd"),
}


@pytest.mark.parametrize("name", PLACES)
def test_every_worker_has_what_the_ranks_sent_bit_for_bit(tmp_path: Path, name: str) -> None:
    senders, receivers = PLACES[name]
    streams = Streams(make_plan(model(0), senders, receivers), tmp_path)
    for version in (0, 1):
        found, _ = streams.sync(model(version), version)
        assert all(bits(each) == bits(model(version)) for each in found)
    streams.close()


def test_replicas_of_other_ranks_send_nothing(tmp_path: Path) -> None:
    streams = Streams(make_plan(model(0), "aabb", "ccdd", num_sending=2), tmp_path)
    assert [end.groups for end in streams.ends[2:4]] == [{}, {}]
    found, _ = streams.sync(model(0), 3)
    assert all(bits(each) == bits(model(0)) for each in found)
    streams.close()


def test_changes_alone_make_the_new_weights_and_headers_say_how_many_they_are(tmp_path: Path) -> None:
    weights = model(0)
    streams = Streams(make_plan(weights, "aab", "ccd"), tmp_path)
    _, num_whole = streams.sync(weights, 0, "keep")
    for version in (1, 2, 3):
        weights["layers.1.matrix"][version::20, ::7] *= 2
        weights["experts"][version % 4, 0, 0] += 1
        found, num_bytes = streams.sync(weights, version, "changes")
        assert all(bits(each) == bits(weights) for each in found)
        assert num_bytes < num_whole
    found, num_bytes = streams.sync(model(5), 4, "changes")
    assert all(bits(each) == bits(model(5)) for each in found), "where most has changed all is sent"
    streams.close()


def test_the_bytes_that_workers_receive_are_those_that_the_plan_counts(tmp_path: Path) -> None:
    weights = model(0)
    plan = make_plan(weights, "aaabbb", "ccdd")
    streams = Streams(plan, tmp_path)
    streams.sync(weights, 0)
    counted: dict[tuple[str, int], int] = {}
    for stage, _, target, num_bytes in hops(Topology.of(plan), sizes_of(plan, headers=True)):
        counted[stage, target] = counted.get((stage, target), 0) + num_bytes
    measured = {
        (stage, participant): group.received_bytes
        for participant, end in enumerate(streams.ends)
        for stage, (_, group) in end.groups.items()
        if group.received_bytes
    }
    assert measured == counted
    streams.close()


def tampered(change: Callable[[StreamEnd], None], tmp_path: Path, *, version: int = 1) -> list[str]:
    """What each of two workers says of a sync to version 1 of which rank 1 sends something else."""
    weights = model(0)
    streams = Streams(make_plan(weights, "aa", "bc"), tmp_path, timeout_s=2.0)
    change(streams.ends[1])
    sending = [
        streams._threads.submit(send, streams.ends[rank], rank, weights, (1, version)[rank], "", streams.sent[rank])
        for rank in range(2)
    ]
    errors = []
    receiving = [
        streams._threads.submit(receive, end, arrivals, 1, "")
        for end, arrivals in zip(streams.ends[2:], streams.arrivals)
    ]
    for each in receiving:
        with pytest.raises(EngineError) as caught:
            each.result(60)
        errors.append(str(caught.value))
    for end in streams.ends[2:]:
        end.close()
    for one in sending:
        one.exception(60)
    streams.close()
    return errors


def test_bytes_that_were_damaged_on_their_way_are_refused_by_every_worker(tmp_path: Path) -> None:
    def damage(end: StreamEnd) -> None:
        original: Any = end.post

        def post(index: int, version: int, part: Any, flat: torch.Tensor) -> None:
            flat[7] ^= 4
            original(index, version, part, flat)

        end.post = post  # type: ignore[method-assign]

    assert all("arrived damaged: their checksum differs" in error for error in tampered(damage, tmp_path))


def test_a_header_that_was_damaged_is_refused_before_it_is_believed(tmp_path: Path) -> None:
    def damage(end: StreamEnd) -> None:
        original = end._header

        def header(*arguments: Any) -> torch.Tensor:
            made = original(*arguments)
            made[-9] ^= 1
            return made

        end._header = header  # type: ignore[method-assign]

    errors = tampered(damage, tmp_path)
    assert all("what describes bucket 0 of rank 1 arrived damaged" in error for error in errors)


def test_weights_of_another_version_are_refused(tmp_path: Path) -> None:
    errors = tampered(lambda _: None, tmp_path, version=7)
    assert errors == ["rank 1 sent bucket 0 of version 7, where bucket 0 of version 1 was to come"] * 2


def test_a_rank_whose_shards_are_not_those_that_were_planned_is_refused(tmp_path: Path) -> None:
    weights = model(0)
    streams = Streams(make_plan(weights, "a", "b"), tmp_path)
    part = streams.plan.part(0, 0)
    other = replace(part, shapes=((64, 34), *part.shapes[1:]))
    with pytest.raises(EngineError, match="rank 0 has other shards of bucket 0 than when it met the engines"):
        streams.ends[0].post(0, 0, other, torch.zeros(0, dtype=torch.uint8))
    streams.close()


def test_nobody_waits_for_ever_for_a_rank_that_does_not_send(tmp_path: Path) -> None:
    streams = Streams(make_plan(model(0), "aa", "bb"), tmp_path, timeout_s=1.0)
    sending = streams._threads.submit(send, streams.ends[0], 0, model(0), 0, "", streams.sent[0])
    receiving = [streams._threads.submit(receive, end, Arrivals(), 0, "") for end in streams.ends[2:]]
    for each in receiving:
        with pytest.raises(RuntimeError):
            each.result(30)
    for end in streams.ends[2:]:
        end.close()
    sending.exception(30)
    streams.close()


def test_a_plan_passes_to_another_process_in_plain_types() -> None:
    plan = make_plan(model(0), "aab", "cd")
    assert plan_of(json.loads(json.dumps(plan.fields()))) == plan
