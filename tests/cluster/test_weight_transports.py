"""Each way from two FSDP2 ranks to real vLLM engines: the weights arrive, are reported, and never serve half-applied."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from skyrl_train.cluster.engine_group import EngineGroup
from skyrl_train.cluster.learners import RayLearner, start_learner
from skyrl_train.cluster.session import RaySession
from skyrl_train.config import Config
from skyrl_train.config.models import GeneratorConfig, ModelConfig, VLLMConfig
from skyrl_train.config.placement import count_engines
from skyrl_train.errors import ActorError
from skyrl_train.runs.construction import engine_settings
from skyrl_train.types import GenerationRequest, SamplingParams
from skyrl_train.weight_sync import DeviceSharing, Receiver, Route, UpdatableEngine, WeightSync
from skyrl_train.weights import Bucket
from tests.support.learner_cases import settings_of
from tests.support.ray_learners import SLOT, make_config, mini_batch
from tests.support.weight_cases import sync_of

pytestmark = pytest.mark.cluster


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Two engines, two ranks."""

    config: Config
    session: RaySession
    group: EngineGroup
    learner: RayLearner
    sharing: DeviceSharing
    folder: Path

    def transport(self, name: str, *, verified: bool = True) -> WeightSync:
        """A new one; `cuda_ipc` exports host memory on a CPU."""
        return sync_of(self.config, self.group, self.sharing, name, self.folder / f"{name}.jsonl", verified=verified)

    def train(self, seed: int) -> None:
        self.learner.forward_backward(mini_batch(seed))
        self.learner.optim_step()


@contextmanager
def started(session: RaySession, folder: Path, vllm: VLLMConfig) -> Iterator[Cluster]:
    config = make_config(Path("unused"), strategy="fsdp2")
    config = replace(
        config,
        model=ModelConfig(),
        generator=GeneratorConfig(backend="vllm", max_context_length=400, verify_weight_sync=True, vllm=vllm),
    )
    slots = [SLOT] * count_engines(config.generator, config.placement)
    group = EngineGroup(
        "vllm", engine_settings(config), config.placement, session, slots, num_threads=1, max_restarts=1
    )
    sharing = DeviceSharing(group.living, wait_ready=group.wait_ready)
    learner = start_learner(settings_of(config, "policy"), config.placement, session, [SLOT] * 2, sharing=sharing)()
    group.wait_ready()
    yield Cluster(config=config, session=session, group=group, learner=learner, sharing=sharing, folder=folder)
    learner.close()
    group.close()


@pytest.fixture(scope="module")
def cluster(session: RaySession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(session, tmp_path_factory.mktemp("transports"), VLLMConfig(num_engines=2)) as opened:
        yield opened


@pytest.mark.nightly
def test_each_worker_of_a_tensor_parallel_engine_takes_its_part(session: RaySession, tmp_path: Path) -> None:
    """As on GPUs: workers are processes of their own, and whole parameters arrive at each, which keeps its slices."""
    with started(session, tmp_path, VLLMConfig(tensor_parallel_size=2)) as cluster:
        receivers = cluster.group.living().call(UpdatableEngine.receivers, "sync")[0]
        assert receivers == [Receiver(device="cpu", dtype="float32")] * 2
        for version, name in enumerate(["cuda_ipc", "broadcast", "shared_memory"]):
            cluster.train(version)
            transport = cluster.transport(name)
            transport.sync(cluster.learner.weights(), version)
            record = json.loads((tmp_path / f"{name}.jsonl").read_text())
            assert record["probe_difference"] < 1e-4
            print(f"\nTP 2, {name}: {record['seconds']:.3f} s, difference {record['probe_difference']:.1e}", end=" ")


@pytest.mark.parametrize("name", ["shared_memory", "broadcast", "cuda_ipc", "files"])
def test_two_engines_compute_with_the_weights_that_were_sent(cluster: Cluster, name: str) -> None:
    transport = cluster.transport(name)
    for version in (1, 2):
        cluster.train(version)
        transport.sync(cluster.learner.weights(), version)
    assert transport.version == 2
    records = [json.loads(line) for line in (cluster.folder / f"{name}.jsonl").read_text().splitlines()]
    assert [(record["version"], record["num_engines"]) for record in records] == [(1, 2), (2, 2)]
    assert all(record["probe_difference"] < 1e-4 for record in records)
    print(f"\n{name}: {[round(record['seconds'], 3) for record in records]} s, differences", end=" ")
    print([f"{record['probe_difference']:.1e}" for record in records])


@pytest.mark.parametrize("name", ["shared_memory", "broadcast"])
def test_what_changed_alone_is_sent_to_engines_that_have_the_rest(cluster: Cluster, name: str) -> None:
    """Between full syncs, and nothing of it to engines that were not there: the same engine after it caught up."""
    file = cluster.folder / f"changes-{name}.jsonl"
    transport = sync_of(cluster.config, cluster.group, cluster.sharing, name, file, full_sync_every=3)
    for version in (1, 2, 3, 4):
        if version == 3:
            cluster.train(version)
        transport.sync(cluster.learner.weights(), version)
    cluster.group.alive[1] = False
    catch_up(cluster, transport)
    transport.sync(cluster.learner.weights(), 5)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    whole, unchanged, trained, again, met = [record["num_bytes"] for record in records]
    assert unchanged < whole / 100, "no value changed"
    assert unchanged < trained <= 1.01 * whole
    assert again > 0.99 * whole, "the third after it sends all"
    assert met > 0.99 * whole, "the second engine was away"
    assert all(record["probe_difference"] < 1e-4 for record in records)
    print(f"\nbytes of syncs of changes: {[record['num_bytes'] for record in records]}", end=" ")


def test_a_broadcast_meets_the_engines_anew_when_they_are_others(cluster: Cluster) -> None:
    transport = cluster.transport("broadcast")
    transport.sync(cluster.learner.weights(), 3)
    cluster.group.alive[1] = False
    cluster.train(3)
    transport.sync(cluster.learner.weights(), 4)
    cluster.group.alive[1] = True
    cluster.train(4)
    transport.sync(cluster.learner.weights(), 5)
    records = [json.loads(line) for line in (cluster.folder / "broadcast.jsonl").read_text().splitlines()]
    assert [record["num_engines"] for record in records[-3:]] == [2, 1, 2]


def catch_up(cluster: Cluster, transport: WeightSync) -> None:
    """As of engine 1, which was started again."""
    actor = cluster.group.actors[1]
    transport.catch_up(cluster.group._endpoint([actor]), partial(cluster.group._join, 1, actor))


def test_an_engine_that_was_away_serves_after_it_caught_up_or_after_the_next_sync(cluster: Cluster) -> None:
    transport = cluster.transport("broadcast")
    transport.sync(cluster.learner.weights(), 6)
    cluster.group.alive[1] = False
    catch_up(cluster, transport)
    assert cluster.group.alive == [True, True]
    cluster.group.alive[1] = False
    cluster.train(5)
    catch_up(cluster, transport)
    assert cluster.group.alive == [True, False], "the policy has trained: there are no weights of version 6 any more"
    transport.sync(cluster.learner.weights(), 7)
    assert cluster.group.alive == [True, True]


def test_a_rank_that_dies_while_it_sends_leaves_engines_that_answer_nothing(cluster: Cluster) -> None:
    transport = cluster.transport("broadcast", verified=False)
    transport.sync(cluster.learner.weights(), 8)
    identity = cluster.learner.group.actors[0].identity
    assert identity is not None
    original = transport._transport

    def dies(route: Route, buckets: Sequence[Bucket]) -> None:
        os.kill(identity.pid, signal.SIGKILL)
        original(route, buckets)

    transport._transport = dies
    with pytest.raises(ActorError, match=r"policy worker rank 0 .* died in phase sync"):
        transport.sync(cluster.learner.weights(), 9)
    assert transport.version == 8
    request = GenerationRequest(
        request_id="refused", prompt_token_ids=(5, 6), sampling=SamplingParams(max_generate_length=2), seed=0
    )
    for actor in cluster.group.actors:
        engine = cluster.group._endpoint([actor])
        with pytest.raises(ActorError, match=r"parameters arrived|half-way"):
            engine.call(UpdatableEngine.finish_update, "sync", 9, 1)
        with pytest.raises(ActorError, match="half-way"):
            engine.ask(UpdatableEngine.generate, "generate", request)
