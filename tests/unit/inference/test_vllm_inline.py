"""One engine of this machine, pretended: weights that are handed over, deaths and silences, turns on the models' device."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl_train.errors import DeadlineError, EngineDeadError, EngineError
from skyrl_train.inference.vllm_inline import BucketTransport, InlineEngine, WatchedEngine
from skyrl_train.learner.turns import DeviceTurns
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams, StopReason
from skyrl_train.weight_sync.buckets import Bucket, Receiver, copied, unpack
from skyrl_train.weight_sync.lending import borrow
from skyrl_train.weight_sync.transport import SyncRecords

REQUEST = GenerationRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(), seed=1)
OUTPUT = GenerationOutput(token_ids=(3,), logprobs=(-0.5,), stop_reason=StopReason.LENGTH, weight_version=4)
WEIGHTS = {"matrix": torch.randn(3, 4), "vector": torch.randn(4)}


@dataclass
class PretendedEngine:
    """Implements `LocalEngine`: keeps the weights that it is sent, and answers with what it is told to."""

    receiver: Receiver = field(default_factory=lambda: Receiver(device="cpu", dtype="float32"))
    outcome: GenerationOutput | EngineError | None = OUTPUT
    """None never answers."""
    suspended: bool = False
    serves_version: Callable[[int], int] = int
    weights: dict[str, Tensor] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    lent: list[bool] = field(default_factory=list)

    def generate(self, request: GenerationRequest) -> Future[GenerationOutput]:
        future: Future[GenerationOutput] = Future()
        self.told.append("generate")
        if isinstance(self.outcome, EngineError):
            future.set_exception(self.outcome)
        elif self.outcome is not None:
            future.set_result(self.outcome)
        return future

    def abort(self, request_id: str) -> None:
        self.told.append(f"abort {request_id}")

    def receivers(self) -> list[Receiver]:
        return [self.receiver]

    def can_borrow(self, bucket: Bucket) -> bool:
        return True

    def begin_update(self) -> None:
        self.told.append("begin_update")
        while self.suspended:
            time.sleep(0.01)

    def update(self, bucket: Bucket) -> None:
        self.lent.append(bool(bucket.handles))
        device = torch.device("cpu")
        flat = borrow(bucket.handles, device, bucket.num_bytes) if bucket.handles else copied(bucket)
        self.weights |= {name: tensor.clone() for name, tensor in unpack(bucket, flat)}

    def finish_update(self, version: int, num_tensors: int) -> int:
        assert num_tensors == len(self.weights)
        return self.serves_version(version)

    def sleep(self) -> None:
        self.told.append("sleep")

    def wake_up(self, tag: str) -> None:
        self.told.append(f"wake_up {tag}")

    def close(self) -> None:
        self.told.append("close")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is around an engine."""

    watched: WatchedEngine
    turns: DeviceTurns
    inline: InlineEngine
    folder: Path

    def transport(
        self,
        way: str = "auto",
        verify: Callable[[int], float | None] | None = None,
        adapter_of: Callable[[Iterator[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]] | None = None,
    ) -> BucketTransport:
        return BucketTransport(
            self.inline,
            self.watched,
            self.turns,
            SyncRecords(self.folder / "weight_sync.jsonl", verify, verify_each=False),
            way=way,
            device=torch.device("cpu"),
            adapter_of=adapter_of,
        )


def around(engine: PretendedEngine, folder: Path, *, shared: bool = False, silence_timeout_s: float = 0.2) -> Parts:
    watched = WatchedEngine(engine, call_timeout_s=5.0, silence_timeout_s=silence_timeout_s)
    turns = DeviceTurns(watched, shared=shared, record_file=folder / "device_turns.jsonl")
    return Parts(watched=watched, turns=turns, inline=InlineEngine(watched, turns), folder=folder)


@pytest.mark.parametrize(("way", "lends"), [("auto", False), ("shared_memory", False), ("cuda_ipc", True)])
def test_all_weights_arrive_and_serve_under_their_version(tmp_path: Path, way: str, lends: bool) -> None:
    engine = PretendedEngine()
    parts = around(engine, tmp_path)
    assert parts.inline.weight_version == -1
    transport = parts.transport(way)
    for version in (0, 1):
        sent = {name: tensor + version for name, tensor in WEIGHTS.items()}
        transport.sync(iter(sent.items()), version)
        assert parts.inline.weight_version == version
        assert all(torch.equal(engine.weights[name], tensor) for name, tensor in sent.items())
    assert engine.lent == [lends, lends]
    records = [json.loads(line) for line in (tmp_path / "weight_sync.jsonl").read_text().splitlines()]
    assert [(record["version"], record["num_bytes"], record["num_engines"]) for record in records] == [
        (0, 1024, 1),
        (1, 1024, 1),
    ]


def test_matrices_travel_in_the_type_that_the_engine_keeps_and_vectors_as_they_are(tmp_path: Path) -> None:
    engine = PretendedEngine(receiver=Receiver(device="cpu", dtype="bfloat16"))
    around(engine, tmp_path).transport().sync(iter(WEIGHTS.items()), 0)
    assert torch.equal(engine.weights["matrix"], WEIGHTS["matrix"].bfloat16())
    assert torch.equal(engine.weights["vector"], WEIGHTS["vector"])


def test_an_engine_that_applies_an_adapter_gets_it_unrounded_in_place_of_the_weights(tmp_path: Path) -> None:
    engine = PretendedEngine(receiver=Receiver(device="cpu", dtype="bfloat16"))
    adapter = {"matrix.lora_A": torch.randn(2, 4)}
    around(engine, tmp_path).transport(adapter_of=lambda _: iter(adapter.items())).sync(iter(WEIGHTS.items()), 0)
    assert list(engine.weights) == ["matrix.lora_A"]
    assert torch.equal(engine.weights["matrix.lora_A"], adapter["matrix.lora_A"])


def test_lenders_and_borrowers_must_be_on_one_device(tmp_path: Path) -> None:
    engine = PretendedEngine(receiver=Receiver(device="GPU-7", dtype="float32"))
    with pytest.raises(EngineError, match=r"GPU-7.*weight_transport=shared_memory"):
        around(engine, tmp_path).transport("cuda_ipc").sync(iter(WEIGHTS.items()), 0)


def test_another_version_than_was_sent_ends_the_run(tmp_path: Path) -> None:
    engine = PretendedEngine(serves_version=lambda version: version - 1)
    parts = around(engine, tmp_path)
    with pytest.raises(EngineError, match="serves weights of version 3 after a sync to version 4"):
        parts.transport().sync(iter(WEIGHTS.items()), 4)
    assert parts.inline.weight_version == -1


def test_the_first_sync_is_probed(tmp_path: Path) -> None:
    seen: list[int] = []
    transport = around(PretendedEngine(), tmp_path).transport(verify=lambda v: float(seen.append(v) or 0.5))
    for version in range(3):
        transport.sync(iter(WEIGHTS.items()), version)
    assert seen == [0]


def test_a_dead_engine_says_so_to_every_request(tmp_path: Path) -> None:
    dead = EngineDeadError("the engine died: vLLM's process EngineCore (pid 7) was killed by signal 9")
    with pytest.raises(EngineDeadError, match=r"EngineCore \(pid 7\) was killed by signal 9"):
        asyncio.run(around(PretendedEngine(outcome=dead), tmp_path).inline.generate(REQUEST))


def test_a_stopped_engine_is_given_up_while_it_owes_an_answer(tmp_path: Path) -> None:
    engine = PretendedEngine(outcome=None, suspended=True)
    parts = around(engine, tmp_path)
    with pytest.raises(DeadlineError, match=r"vLLM engine \(generate\): a process of it is stopped"):
        asyncio.run(parts.inline.generate(REQUEST))
    with pytest.raises(DeadlineError, match=r"vLLM engine \(begin_update\): a process of it is stopped"):
        parts.transport().sync(iter(WEIGHTS.items()), 0)
    engine.suspended = False


def test_one_that_was_stopped_for_a_moment_is_left_in_peace(tmp_path: Path) -> None:
    engine = PretendedEngine(outcome=None, suspended=True)
    parts = around(engine, tmp_path, silence_timeout_s=60.0)

    async def wait_a_while() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(parts.inline.generate(REQUEST), 1.2)

    asyncio.run(wait_a_while())
    assert engine.told == ["generate", "abort r"], "a request that nobody waits for any more is given up"


def test_an_engine_that_hangs_ends_with_its_deadline(tmp_path: Path) -> None:
    watched = WatchedEngine(PretendedEngine(), call_timeout_s=0.1, silence_timeout_s=60.0)
    with pytest.raises(DeadlineError, match=r"sleep.*0\.1 s.*placement\.call_timeout_s"):
        watched.call("sleep", lambda: time.sleep(1.5))


def test_a_request_wakes_an_engine_that_shares_its_device(tmp_path: Path) -> None:
    engine = PretendedEngine()
    parts = around(engine, tmp_path, shared=True)
    parts.turns.models()
    parts.transport().sync(iter(WEIGHTS.items()), 0)
    assert asyncio.run(parts.inline.generate(REQUEST)) == OUTPUT
    assert engine.told == ["sleep", "wake_up weights", "begin_update", "wake_up kv_cache", "generate"]
