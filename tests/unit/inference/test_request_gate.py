"""Requests and weight updates of one engine, which never overlap, with an engine that answers when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from skyrl_train.errors import DeadlineError
from skyrl_train.inference import request_gate
from skyrl_train.inference.request_gate import GatedEngine, RequestGate
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams, StopReason

REQUEST = GenerationRequest(request_id="r", prompt_token_ids=(1, 2, 3, 4), sampling=SamplingParams(), seed=1)


class Engine:
    """Implements `InferenceEngine`: it answers once `may_answer` is set, with the version that it has then."""

    def __init__(self) -> None:
        self.weight_version = 0
        self.may_answer = asyncio.Event()
        self.num_running = 0
        self.closed = False

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        yield

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        self.num_running += 1
        try:
            await self.may_answer.wait()
        finally:
            self.num_running -= 1
        return GenerationOutput(
            token_ids=(3,),
            logprobs=(-0.5,),
            stop_reason=StopReason.LENGTH,
            weight_version=self.weight_version,
            num_cached_tokens=1,
        )

    def close(self) -> None:
        self.closed = True


def versions(outputs: list[GenerationOutput]) -> list[int]:
    return [output.weight_versions[0].version for output in outputs]


def test_a_sync_waits_for_requests_that_run_and_holds_new_ones_back() -> None:
    async def run() -> None:
        engine, gate = Engine(), RequestGate()
        gated = GatedEngine(engine, gate)
        updating, updated = threading.Event(), threading.Event()

        def sync() -> None:
            with gate.shut():
                assert engine.num_running == 0
                updating.set()
                assert updated.wait(5.0)
                engine.weight_version = 1

        first = asyncio.ensure_future(gated.generate(REQUEST))
        await asyncio.sleep(0)
        syncing = asyncio.ensure_future(asyncio.to_thread(sync))
        while not gate._is_shut:
            await asyncio.sleep(0.001)
        second = asyncio.ensure_future(gated.generate(REQUEST))
        await asyncio.sleep(0.02)
        assert engine.num_running == 1
        assert not updating.is_set()
        engine.may_answer.set()
        await asyncio.to_thread(updating.wait, 5.0)
        await asyncio.sleep(0.02)
        assert first.done()
        assert not second.done()
        updated.set()
        assert versions([await first, await second]) == [0, 1]
        await syncing
        metrics = gated.take_metrics()
        assert metrics["engines/cache_hits"] == 0.25
        assert 0.04 <= metrics["timing/wait/sync"] < 5.0
        assert gated.take_metrics() == {"timing/wait/sync": 0.0}
        gated.close()
        assert engine.closed

    asyncio.run(run())


def test_a_gate_that_stays_open_holds_nothing_back() -> None:
    async def run() -> None:
        engine, gate = Engine(), RequestGate(stays_open=True)
        gated = GatedEngine(engine, gate)
        first = asyncio.ensure_future(gated.generate(REQUEST))
        await asyncio.sleep(0)
        with gate.shut():
            assert engine.num_running == 1
            second = asyncio.ensure_future(gated.generate(REQUEST))
            engine.may_answer.set()
            assert versions([await first, await second]) == [0, 0]
        assert gated.take_metrics() == {"engines/cache_hits": 0.25}, "whoever brings weights knows how long that takes"

    asyncio.run(run())


def test_a_request_that_is_given_up_while_it_is_held_back_is_not_inside() -> None:
    async def run() -> None:
        engine, gate = Engine(), RequestGate()
        gated = GatedEngine(engine, gate)
        engine.may_answer.set()
        with gate.shut():
            held = asyncio.ensure_future(gated.generate(REQUEST))
            await asyncio.sleep(0.01)
            held.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await held
        with gate.shut():
            pass
        await gated.generate(REQUEST)

    asyncio.run(run())


def test_a_request_that_never_ends_ends_the_sync_at_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_gate, "_MARGIN_S", 0.0)

    async def run() -> None:
        gate = RequestGate(request_timeout_s=0.01)
        gated = GatedEngine(Engine(), gate)
        running = asyncio.ensure_future(gated.generate(REQUEST))
        await asyncio.sleep(0)

        def sync() -> None:
            with gate.shut():
                pytest.fail("a request runs")

        with pytest.raises(DeadlineError, match=r"1 requests that ran .* generator\.request_timeout_s"):
            await asyncio.to_thread(sync)
        running.cancel()

    asyncio.run(run())


def test_requests_of_many_threads_of_syncs_never_overlap_with_one() -> None:
    async def run() -> None:
        engine, gate = Engine(), RequestGate()
        gated = GatedEngine(engine, gate)
        engine.may_answer.set()
        ended = False

        async def ask() -> int:
            count = 0
            while not ended:
                await gated.generate(REQUEST)
                count += 1
                await asyncio.sleep(0)
            return count

        def sync() -> None:
            for version in range(1, 51):
                with gate.shut():
                    assert engine.num_running == 0
                    engine.weight_version = version

        asking = [asyncio.ensure_future(ask()) for _ in range(4)]
        await asyncio.to_thread(sync)
        ended = True
        assert min(await asyncio.gather(*asking)) > 0
        assert engine.weight_version == 50

    asyncio.run(run())


def test_a_gate_that_stays_open_says_nothing_of_weight_syncs() -> None:
    gate = RequestGate(stays_open=True)
    with gate.shut():
        pass
    assert gate.take_metrics() == {}
