"""Each way from two FSDP2 ranks to real vLLM engines: the weights arrive, are reported, and never serve half-applied."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from skyrl_train.cluster.carriers import ByLending, Carrier, make_carrier
from skyrl_train.cluster.engines import EnginePool
from skyrl_train.cluster.fleet import EngineFleet
from skyrl_train.cluster.learners import RayLearner, start_learner
from skyrl_train.cluster.session import RaySession
from skyrl_train.cluster.transport import RayTransport
from skyrl_train.config.bundles import count_engines
from skyrl_train.config.generation import GeneratorConfig, VLLMConfig
from skyrl_train.config.schema import Config, ModelConfig
from skyrl_train.errors import ActorError
from skyrl_train.learner.turns import DeviceTurns
from skyrl_train.model.causal_lm import load_tokenizer
from skyrl_train.types import GenerationRequest, SamplingParams
from skyrl_train.weight_sync.buckets import Receiver
from skyrl_train.weight_sync.probe import WeightSyncProbe
from skyrl_train.weight_sync.transport import SyncRecords
from tests.cluster.test_learners import SLOT, make_config, mini_batch
from tests.learner_cases import settings_of

pytestmark = pytest.mark.cluster


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Two engines, two ranks."""

    config: Config
    session: RaySession
    fleet: EngineFleet
    learner: RayLearner
    turns: DeviceTurns
    folder: Path

    def transport(self, name: str, *, verified: bool = True) -> RayTransport:
        """A new one; `cuda_ipc` lends host memory on a CPU."""
        vllm = replace(self.config.generator.vllm, weight_transport=name)
        config = replace(self.config, generator=replace(self.config.generator, vllm=vllm), output_dir=str(self.folder))
        carrier: Carrier = make_carrier(config, folder=self.session.folder)
        assert isinstance(carrier, ByLending) == (name == "cuda_ipc")
        pool = EnginePool(self.fleet, self.turns, silence_timeout_s=60.0)
        probe = probe_of(self.fleet, self.learner, config) if verified else None
        return RayTransport(pool, carrier, self.turns, SyncRecords(self.folder / f"{name}.jsonl", probe))

    def train(self, seed: int) -> None:
        self.learner.forward_backward(mini_batch(seed))
        self.learner.optim_step()


def probe_of(fleet: EngineFleet, learner: RayLearner, config: Config) -> WeightSyncProbe:
    """As of a run whose engines share no devices with the models."""
    return WeightSyncProbe(
        ask=lambda request: list(zip(map(str, fleet.living), fleet.call("generate", "sync", request))),
        policy=lambda: learner,
        config=config,
        vocabulary=len(load_tokenizer(config.model)),
    )


@contextmanager
def started(session: RaySession, folder: Path, vllm: VLLMConfig) -> Iterator[Cluster]:
    config = make_config(Path("unused"), strategy="fsdp2")
    config = replace(
        config,
        model=ModelConfig(),
        generator=GeneratorConfig(backend="vllm", max_context_length=400, verify_weight_sync=True, vllm=vllm),
    )
    fleet = EngineFleet(config, session, [SLOT] * count_engines(config.generator, config.placement))
    turns = DeviceTurns(fleet, shared=False, record_file=folder / "turns.jsonl")
    learner = start_learner(settings_of(config, "policy"), config.placement, session, [SLOT] * 2, turns=turns)()
    fleet.wait_ready()
    yield Cluster(config=config, session=session, fleet=fleet, learner=learner, turns=turns, folder=folder)
    learner.close()
    fleet.close()


@pytest.fixture(scope="module")
def cluster(session: RaySession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(session, tmp_path_factory.mktemp("transports"), VLLMConfig(num_engines=2)) as opened:
        yield opened


def test_each_worker_of_a_tensor_parallel_engine_takes_its_part(session: RaySession, tmp_path: Path) -> None:
    """As on GPUs: workers are processes of their own, and whole parameters arrive at each, which keeps its slices."""
    with started(session, tmp_path, VLLMConfig(tensor_parallel_size=2)) as cluster:
        receivers = cluster.fleet.call("receivers", "sync")[0]
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
    assert transport.pool.weight_version == 2
    records = [json.loads(line) for line in (cluster.folder / f"{name}.jsonl").read_text().splitlines()]
    assert [(record["version"], record["num_engines"]) for record in records] == [(1, 2), (2, 2)]
    assert all(record["probe_difference"] < 1e-4 for record in records)
    print(f"\n{name}: {[round(record['seconds'], 3) for record in records]} s, differences", end=" ")
    print([f"{record['probe_difference']:.1e}" for record in records])


def test_a_broadcast_meets_the_engines_anew_when_they_are_others(cluster: Cluster) -> None:
    transport = cluster.transport("broadcast")
    transport.sync(cluster.learner.weights(), 3)
    cluster.fleet.alive[1] = False
    cluster.train(3)
    transport.sync(cluster.learner.weights(), 4)
    cluster.fleet.alive[1] = True
    cluster.train(4)
    transport.sync(cluster.learner.weights(), 5)
    records = [json.loads(line) for line in (cluster.folder / "broadcast.jsonl").read_text().splitlines()]
    assert [record["num_engines"] for record in records[-3:]] == [2, 1, 2]


def test_an_engine_that_was_away_serves_after_it_caught_up_or_after_the_next_sync(cluster: Cluster) -> None:
    transport = cluster.transport("broadcast")
    transport.sync(cluster.learner.weights(), 6)
    cluster.fleet.alive[1] = False
    transport.bring_up_to_date(1, cluster.fleet.actors[1])
    assert cluster.fleet.alive == [True, True]
    cluster.fleet.alive[1] = False
    cluster.train(5)
    transport.bring_up_to_date(1, cluster.fleet.actors[1])
    assert cluster.fleet.alive == [True, False], "the policy has trained: there are no weights of version 6 any more"
    transport.sync(cluster.learner.weights(), 7)
    assert cluster.fleet.alive == [True, True]


def test_a_rank_that_dies_while_it_sends_leaves_engines_that_answer_nothing(cluster: Cluster) -> None:
    transport = cluster.transport("broadcast", verified=False)
    transport.sync(cluster.learner.weights(), 8)
    identity = cluster.learner.group.actors[0].identity
    assert identity is not None
    original = transport._carried

    def dies(*arguments: object) -> object:
        os.kill(identity.pid, signal.SIGKILL)
        return original(*arguments)  # type: ignore[arg-type]

    transport._carried = dies  # type: ignore[assignment, method-assign]
    with pytest.raises(ActorError, match=r"policy worker rank 0 .* died in phase sync"):
        transport.sync(cluster.learner.weights(), 9)
    assert transport.pool.weight_version == 8
    request = GenerationRequest(
        request_id="refused", prompt_token_ids=(5, 6), sampling=SamplingParams(max_generate_length=2), seed=0
    )
    for engine in cluster.fleet.living:
        with pytest.raises(ActorError, match="parameters arrived"):
            cluster.fleet.call("finish_update", "sync", 9, 1, engines=[engine])
        with pytest.raises(ActorError, match="half-way"):
            cluster.fleet.call("generate", "generate", request, engines=[engine])
