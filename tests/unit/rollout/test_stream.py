"""Prompt groups that are kept in flight, with a scripted engine and environments that hang until they are let go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import TrainerConfig
from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.errors import EngineError
from skyrl_train.rollout.admission import ConsumedPrompts
from skyrl_train.rollout.generator import RolloutGenerator
from skyrl_train.rollout.journal import Journal
from skyrl_train.rollout.stream.stream import RolloutStream, Taken
from skyrl_train.types import GenerationRequest, Prompt, SamplingParams
from tests.support.fake_environments import FAKE_ENVIRONMENT, FakeEnvironment
from tests.support.fakes import FakeEngine, make_prompts, make_tokenizer

TOKENIZER = make_tokenizer()
ANSWER = [*TOKENIZER.encode("#### 4"), 3]
BATCH = 2


def answer(_: GenerationRequest) -> list[int]:
    return ANSWER


@pytest.fixture(autouse=True)
def fresh_environments() -> Iterator[None]:
    FakeEnvironment.reset()
    yield
    FakeEnvironment.release.set()


MakeStream = Callable[..., tuple[RolloutStream, RolloutGenerator]]


@pytest.fixture
def make_stream(tmp_path: Path) -> Iterator[MakeStream]:
    made: list[tuple[RolloutStream, RolloutGenerator]] = []

    def make(
        engine: FakeEngine, prompts: Sequence[Prompt], total_batches: int = 3, **changes: Any
    ) -> tuple[RolloutStream, RolloutGenerator]:
        environment = EnvironmentConfig(env_class=FAKE_ENVIRONMENT, step_timeout_s=5.0, isolation="thread")
        generator = RolloutGenerator(engine, TOKENIZER, GeneratorConfig(), environment, 0)

        def batch(position: int) -> Sequence[Prompt]:
            return prompts[position * BATCH : (position + 1) * BATCH]

        journal = Journal(tmp_path / f"journal_{len(made)}.jsonl", prompts="p")
        stream = RolloutStream(
            generator,
            batch,
            TrainerConfig(train_batch_size=BATCH, max_staleness=1, **changes),
            journal,
            total_batches=total_batches,
            n_samples_per_prompt=2,
            sampling=SamplingParams(),
            max_failed_fraction=0.0,
        )
        made.append((stream, generator))
        return made[-1]

    yield make
    for stream, generator in made:
        stream.close()
        generator.close()


def uids(taken: Taken) -> list[str]:
    return [prompt.uid for prompt in taken.rollouts.prompts]


def wait_until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < ends, "it never came to that"
        time.sleep(0.01)


def test_batches_hold_each_prompt_once_while_versions_are_published(make_stream: MakeStream) -> None:
    engine = FakeEngine(answer)
    stream, _ = make_stream(engine, make_prompts(6))
    stream.begin(version=0, settled=ConsumedPrompts())
    found = []
    for version in range(3):
        taken = stream.take()
        found += uids(taken)
        assert [one.sample_index for one in taken.rollouts.trajectories] == [0, 1, 0, 1]
        stream.publish(version + 1)
    assert sorted(found) == ["p0", "p1", "p2", "p3", "p4", "p5"]
    assert found[4:] == ["p4", "p5"]
    assert taken.settled == ConsumedPrompts(watermark=6)
    assert len({request.request_id for request in engine.requests}) == len(engine.requests) == 12
    assert engine.leases_at_first_request == 0


def test_groups_run_before_a_batch_is_asked_for_and_no_further_than_they_may(make_stream: MakeStream) -> None:
    engine = FakeEngine(answer)
    stream, _ = make_stream(engine, make_prompts(6))
    stream.begin(version=0, settled=ConsumedPrompts())
    wait_until(lambda: len(engine.requests) == 8)
    stream.take()
    time.sleep(0.05)
    assert len(engine.requests) == 8
    stream.publish(1)
    wait_until(lambda: len(engine.requests) == 12)


def test_seeds_derive_from_the_prompts_ordinal(make_stream: MakeStream) -> None:
    first, again = FakeEngine(answer), FakeEngine(answer)
    stream, _ = make_stream(first, make_prompts(6))
    stream.begin(version=0, settled=ConsumedPrompts())
    wait_until(lambda: len(first.requests) == 8)
    resumed, _ = make_stream(again, make_prompts(6))
    resumed.begin(version=1, settled=ConsumedPrompts(watermark=2))
    taken = resumed.take()
    assert {*uids(taken)} <= {"p2", "p3", "p4", "p5"}
    before = {request.request_id: request.seed for request in first.requests}
    after = {request.request_id: request.seed for request in again.requests}
    both = before.keys() & after.keys()
    assert len(both) == 4
    assert {name: before[name] for name in both} == {name: after[name] for name in both}


def test_a_group_that_a_resumed_run_takes_up_is_due_by_the_version_at_which_it_began(
    make_stream: MakeStream, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "journal_0.jsonl", prompts="p")
    for ordinal in (2, 3):
        journal.begin(ordinal, 0)
    journal.close()
    engine = FakeEngine(answer)
    prompts = [*make_prompts(2), *make_prompts(4, hang_in="step")[2:], *make_prompts(6)[4:]]
    stream, _ = make_stream(engine, prompts)
    stream.begin(version=1, settled=ConsumedPrompts(watermark=2))
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(stream.take)
        wait_until(lambda: len(engine.requests) == 8)
        time.sleep(0.2)
        assert not taken.done(), "groups 4 and 5 have ended, and those of version 0 are due first"
        FakeEnvironment.release.set()
        assert sorted(uids(taken.result(timeout=10.0))) == ["p2", "p3"]


def test_an_evaluation_is_answered_while_groups_are_in_flight(make_stream: MakeStream) -> None:
    stream, generator = make_stream(FakeEngine(answer), make_prompts(6, hang_in="step"))
    stream.begin(version=0, settled=ConsumedPrompts())
    evaluated = generator.generate(
        make_prompts(3), n_samples_per_prompt=1, sampling=SamplingParams(), global_step=0, purpose="eval"
    )
    assert [one.failed for one in evaluated.trajectories] == [False] * 3
    FakeEnvironment.release.set()
    assert len({*uids(stream.take())} & {"p0", "p1", "p2", "p3"}) == BATCH


def test_a_group_that_is_due_and_hangs_is_dropped_where_batches_do_not_wait(make_stream: MakeStream) -> None:
    prompts = [*make_prompts(1, hang_in="step"), *make_prompts(8)[1:]]
    stream, _ = make_stream(FakeEngine(answer), prompts, stale_groups="drop", total_batches=9)
    stream.begin(version=0, settled=ConsumedPrompts())
    wait_until(lambda: len(FakeEnvironment.closed) == 6)
    assert {*uids(stream.take())} <= {"p1", "p2", "p3"}
    stream.publish(1)
    wait_until(lambda: len(FakeEnvironment.closed) == 10)
    taken = stream.take()
    assert "p0" not in uids(taken)
    assert taken.metrics["stream/dropped_stale"] == 1.0
    assert 0 < taken.settled.watermark <= 5


def test_too_many_failures_of_a_batch_end_the_run(make_stream: MakeStream) -> None:
    stream, _ = make_stream(FakeEngine(lambda _: EngineError("no memory")), make_prompts(6))
    stream.begin(version=0, settled=ConsumedPrompts())
    with pytest.raises(EngineError, match="4 of 4 trajectories failed"):
        stream.take()


def test_what_ends_a_group_is_raised_where_its_batch_is_taken(make_stream: MakeStream) -> None:
    stream, generator = make_stream(FakeEngine(answer), make_prompts(1))
    stream.begin(version=0, settled=ConsumedPrompts())
    with pytest.raises(IndexError):
        stream.take()
    assert not generator.thread.is_closed


def test_closing_ends_groups_that_hang(make_stream: MakeStream) -> None:
    stream, _ = make_stream(FakeEngine(answer), make_prompts(6, hang_in="step"))
    stream.begin(version=0, settled=ConsumedPrompts())
    wait_until(lambda: threading.active_count() > 2)
    FakeEnvironment.release.set()
    stream.close()
    stream.close()


def test_a_wait_that_is_broken_off_leaves_groups_in_flight(
    make_stream: MakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, generator = make_stream(FakeEngine(answer), make_prompts(6, hang_in="step"))
    stream.begin(version=0, settled=ConsumedPrompts())
    waits = iter([KeyboardInterrupt])

    def interrupted(*_: Any, **__: Any) -> None:
        raise next(waits)

    with monkeypatch.context() as patch:
        patch.setattr("skyrl_train.rollout.loop_thread.concurrent.futures.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.take()
    FakeEnvironment.release.set()
    assert len({*uids(stream.take())} & {"p0", "p1", "p2", "p3"}) == BATCH
    assert not generator.thread.is_closed
