"""One engine of this machine, pretended: weights that are handed over, deaths and silences, turns on the models' device."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skyrl_train.config.models import LoraConfig, ModelConfig
from skyrl_train.distributed import SingleProcess
from skyrl_train.endpoints import LocalEndpoint
from skyrl_train.errors import DeadlineError, EngineDeadError, EngineError
from skyrl_train.inference.local_engine import LocalEngine, WatchedEndpoint
from skyrl_train.model import load_causal_lm
from skyrl_train.model.lora import adapter_tensors, add_adapter
from skyrl_train.parts import WEIGHT_TRANSPORTS
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams, StopReason
from skyrl_train.weight_sync import (
    DeviceSharing,
    Probed,
    RankSender,
    Receiver,
    RouteContext,
    SyncRecords,
    UpdatableEngine,
    WeightSync,
    import_copy,
)
from skyrl_train.weights import Bucket, ModelWeights, WeightSender, tensors_of, unpack
from tests.support.learner_cases import save_tiny_model

CPU = Receiver(device="cpu", dtype="float32")
REQUEST = GenerationRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(), seed=1)
OUTPUT = GenerationOutput(token_ids=(3,), logprobs=(-0.5,), stop_reason=StopReason.LENGTH, weight_version=4)
WEIGHTS = {"matrix": torch.randn(3, 4), "vector": torch.randn(4)}


class PretendedEngine(UpdatableEngine):
    """Keeps the weights that it is sent, and answers with what it is told to."""

    def __init__(
        self,
        *,
        receiver: Receiver = CPU,
        outcome: GenerationOutput | EngineError | None = OUTPUT,
        suspended: bool = False,
        serves_version: Callable[[int], int] = int,
    ) -> None:
        """`outcome`: None never answers."""
        self.receiver, self.outcome, self.is_suspended, self.serves_version = (
            receiver,
            outcome,
            suspended,
            serves_version,
        )
        self.weights: dict[str, Tensor] = {}
        self.told: list[str] = []
        self.exported: list[bool] = []
        self.weight_version = -1

    @property
    def suspended(self) -> bool:
        return self.is_suspended

    def lease(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        self.told.append("generate")
        try:
            while self.outcome is None:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.told.append(f"abort {request.request_id}")
            raise
        if isinstance(self.outcome, EngineError):
            raise self.outcome
        return self.outcome

    def receivers(self) -> list[Receiver]:
        return [self.receiver]

    def can_import(self, bucket: Bucket) -> bool:
        return True

    def begin_update(self) -> None:
        self.told.append("begin_update")
        while self.is_suspended:
            time.sleep(0.01)

    def update(self, bucket: Bucket) -> None:
        self.exported.append(bool(bucket.handles))
        if not bucket.handles:
            self.weights |= {name: tensor.clone() for name, tensor in tensors_of(bucket)}
            return
        flat = import_copy(bucket.handles, torch.device("cpu"), bucket.num_bytes)
        self.weights |= {name: tensor.clone() for name, tensor in unpack(bucket, flat)}

    def finish_update(self, version: int, num_tensors: int) -> int:
        assert num_tensors == len(self.weights)
        self.weight_version = self.serves_version(version)
        return self.weight_version

    def sleep(self) -> None:
        self.told.append("sleep")

    def sleep_without_weights(self) -> None:
        self.weights.clear()
        self.told.append("sleep without weights")

    def wake_up(self, tag: str) -> None:
        self.told.append(f"wake_up {tag}")

    def close(self) -> None:
        self.told.append("close")


class Model(nn.Module):
    """A matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in WEIGHTS.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))

    def weights(self) -> ModelWeights:
        sender = RankSender(self, SingleProcess(), torch.device("cpu"))
        return ModelWeights(LocalEndpoint[WeightSender](sender), scores=lambda batch: torch.zeros(0))


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is around an engine."""

    watched: WatchedEndpoint
    sharing: DeviceSharing
    engine: LocalEngine
    folder: Path

    def sync(
        self,
        way: str = "auto",
        verify: Callable[[int], Probed | None] = lambda version: None,
        **changes: Any,
    ) -> WeightSync:
        records = SyncRecords(self.folder / "weight_sync.jsonl", lambda _, version: verify(version), verify_each=False)
        files = self.folder / "weights"
        settings = RouteContext(files=files, node_folder=self.folder, timeout_s=5.0)
        transport = WEIGHT_TRANSPORTS.resolve(way)
        return WeightSync(lambda: self.watched, transport, settings, self.sharing, records, **changes)


def around(engine: PretendedEngine, folder: Path, *, shared: bool = False, silence_timeout_s: float = 0.2) -> Parts:
    watched = WatchedEndpoint(engine, call_timeout_s=5.0, silence_timeout_s=silence_timeout_s)
    sharing = DeviceSharing(lambda: watched, shared=shared, record_file=folder / "device_turns.jsonl")
    return Parts(watched=watched, sharing=sharing, engine=LocalEngine(engine, watched, sharing), folder=folder)


@pytest.mark.parametrize(
    ("way", "exports"), [("auto", False), ("shared_memory", False), ("cuda_ipc", True), ("files", False)]
)
def test_all_weights_arrive_and_serve_under_their_version(tmp_path: Path, way: str, exports: bool) -> None:
    engine, model = PretendedEngine(), Model()
    parts = around(engine, tmp_path)
    assert parts.engine.weight_version == -1
    sync = parts.sync(way)
    for version in (0, 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += version
        sync.sync(model.weights(), version)
        assert parts.engine.weight_version == version
        assert all(torch.equal(engine.weights[name], tensor) for name, tensor in model.named_parameters())
    assert engine.exported == [exports, exports]
    assert not (tmp_path / "weights").exists()
    records = [json.loads(line) for line in (tmp_path / "weight_sync.jsonl").read_text().splitlines()]
    assert [(record["version"], record["num_bytes"], record["num_engines"]) for record in records] == [
        (0, 1024, 1),
        (1, 1024, 1),
    ]


def test_matrices_travel_in_the_type_that_the_engine_keeps_and_vectors_as_they_are(tmp_path: Path) -> None:
    engine = PretendedEngine(receiver=Receiver(device="cpu", dtype="bfloat16"))
    around(engine, tmp_path).sync().sync(Model().weights(), 0)
    assert torch.equal(engine.weights["matrix"], WEIGHTS["matrix"].bfloat16())
    assert torch.equal(engine.weights["vector"], WEIGHTS["vector"])


def test_an_engine_that_applies_an_adapter_gets_it_unrounded_in_place_of_the_weights(tmp_path: Path) -> None:
    engine = PretendedEngine(receiver=Receiver(device="cpu", dtype="bfloat16"))
    model = load_causal_lm(ModelConfig(path=str(save_tiny_model(tmp_path / "model"))), "cpu")
    add_adapter(model, LoraConfig(rank=2, targets=("q_proj",)), seed=0)
    weights = ModelWeights(LocalEndpoint[WeightSender](RankSender(model, SingleProcess(), torch.device("cpu"))))
    around(engine, tmp_path).sync(adapter_only=True).sync(weights, 0)
    adapter = adapter_tensors(model)
    assert list(engine.weights) == list(adapter)
    assert all(torch.equal(engine.weights[name], tensor) for name, tensor in adapter.items())


def test_exporters_and_importers_must_be_on_one_device(tmp_path: Path) -> None:
    engine = PretendedEngine(receiver=Receiver(device="GPU-7", dtype="float32"))
    with pytest.raises(EngineError, match=r"GPU-7.*weight_transport=shared_memory"):
        around(engine, tmp_path).sync("cuda_ipc").sync(Model().weights(), 0)


def test_another_version_than_was_sent_ends_the_run(tmp_path: Path) -> None:
    engine = PretendedEngine(serves_version=lambda version: version - 1)
    parts = around(engine, tmp_path)
    with pytest.raises(EngineError, match="serves weights of version 3 after a sync to version 4"):
        parts.sync().sync(Model().weights(), 4)


def test_the_first_sync_is_probed(tmp_path: Path) -> None:
    seen: list[int] = []
    sync = around(PretendedEngine(), tmp_path).sync(verify=seen.append)
    for version in range(3):
        sync.sync(Model().weights(), version)
    assert seen == [0]


def test_a_dead_engine_says_so_to_every_request(tmp_path: Path) -> None:
    dead = EngineDeadError("the engine died: vLLM's process EngineCore (pid 7) was killed by signal 9")
    with pytest.raises(EngineDeadError, match=r"EngineCore \(pid 7\) was killed by signal 9"):
        asyncio.run(around(PretendedEngine(outcome=dead), tmp_path).engine.generate(REQUEST))


def test_a_stopped_engine_is_given_up_while_it_owes_an_answer(tmp_path: Path) -> None:
    engine = PretendedEngine(outcome=None, suspended=True)
    parts = around(engine, tmp_path)
    with pytest.raises(DeadlineError, match=r"inference engine \(generate\): a process of it is stopped"):
        asyncio.run(parts.engine.generate(REQUEST))
    with pytest.raises(
        DeadlineError, match=r"inference engine \(phase sync, begin_update\): a process of it is stopped"
    ):
        parts.sync().sync(Model().weights(), 0)
    engine.is_suspended = False


def test_one_that_was_stopped_for_a_moment_is_left_in_peace(tmp_path: Path) -> None:
    engine = PretendedEngine(outcome=None, suspended=True)
    parts = around(engine, tmp_path, silence_timeout_s=60.0)

    async def wait_a_while() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(parts.engine.generate(REQUEST), 1.2)

    asyncio.run(wait_a_while())
    assert engine.told == ["generate", "abort r"], "a request that nobody waits for any more is given up"


def test_an_engine_that_hangs_ends_with_its_deadline(tmp_path: Path) -> None:
    class Hanging(PretendedEngine):
        def sleep(self) -> None:
            time.sleep(1.5)

    watched = WatchedEndpoint(Hanging(), call_timeout_s=0.1, silence_timeout_s=60.0)
    with pytest.raises(DeadlineError, match=r"sleep.*0\.1 s.*placement\.call_timeout_s"):
        watched.call(UpdatableEngine.sleep, "score")


def test_a_request_wakes_an_engine_that_shares_its_device(tmp_path: Path) -> None:
    engine = PretendedEngine()
    parts = around(engine, tmp_path, shared=True)
    parts.sharing.models()
    parts.sync().sync(Model().weights(), 0)
    assert asyncio.run(parts.engine.generate(REQUEST)) == OUTPUT
    assert engine.told == ["sleep", "wake_up weights", "begin_update", "wake_up kv_cache", "generate"]


ASLEEP_TWICE = ["sleep", "wake_up weights", "begin_update", "wake_up kv_cache", "generate", "sleep without weights"]


def test_an_engine_that_has_answered_sleeps_without_weights_and_has_the_next_ones_before_it_answers(
    tmp_path: Path,
) -> None:
    engine, model = PretendedEngine(), Model()
    parts = around(engine, tmp_path, shared=True)
    sync = parts.sync()
    parts.sharing.models()
    parts.sharing.add("policy", lambda optimizer: None, lambda: None)
    sync.sync(model.weights(), 0)
    asyncio.run(parts.engine.generate(REQUEST))
    parts.sharing.models("policy", trains=True)
    assert engine.told == ASLEEP_TWICE
    assert not engine.weights
    sync.sync(model.weights(), 1)
    assert engine.told[len(ASLEEP_TWICE) :] == ["wake_up weights", "begin_update"]
    parts.sharing.models("policy", optimizer=True)
    assert engine.told[-1] == "sleep", "those of the sync are asked for next, as behind a checkpoint"
    asyncio.run(parts.engine.generate(REQUEST))
    assert engine.told.count("begin_update") == 2, "weights came back from the host"
    assert all(torch.equal(engine.weights[name], tensor) for name, tensor in model.named_parameters())


def test_an_engine_that_is_asked_again_without_a_sync_is_sent_the_weights_of_the_last_one(tmp_path: Path) -> None:
    engine, model = PretendedEngine(), Model()
    parts = around(engine, tmp_path, shared=True)
    parts.sharing.models()
    parts.sharing.add("policy", lambda optimizer: None, lambda: None)
    parts.sync().sync(model.weights(), 0)
    asyncio.run(parts.engine.generate(REQUEST))
    parts.sharing.models("policy")
    asyncio.run(parts.engine.generate(REQUEST))
    assert engine.told[len(ASLEEP_TWICE) :] == ["wake_up weights", "begin_update", "wake_up kv_cache", "generate"]
    assert engine.weight_version == 0
    assert all(torch.equal(engine.weights[name], tensor) for name, tensor in model.named_parameters())
    parts.sharing.models("policy", trains=True)
    with pytest.raises(EngineError, match="between an update and its weight sync"):
        asyncio.run(parts.engine.generate(REQUEST))


@pytest.mark.parametrize("how", [{"adapter_only": True}, {"full_sync_every": 4}])
def test_engines_keep_weights_that_a_sync_does_not_bring(tmp_path: Path, how: dict[str, Any]) -> None:
    engine = PretendedEngine()
    parts = around(engine, tmp_path, shared=True)
    parts.sharing.models()
    parts.sharing.add("policy", lambda optimizer: None, lambda: None)
    sync = parts.sync(**how)
    with parts.sharing.syncing():
        pass
    parts.sharing.engines()
    parts.sharing.models("policy", trains=True)
    assert engine.told == ["sleep", "wake_up weights", "wake_up kv_cache", "sleep"]
    assert sync.version == -1
