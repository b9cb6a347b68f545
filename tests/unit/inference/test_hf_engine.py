"""The engine around the decoder: waves, weights, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from skyrl_train.errors import EngineError
from skyrl_train.inference.hf import HFEngine
from skyrl_train.runs.construction import sync_within_process
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams, StopReason
from skyrl_train.weights import stored_weights
from tests.support.fakes import make_tiny_model, make_tokenizer

T = TypeVar("T")


class RecordingEngine(HFEngine):
    """Remembers which requests were generated together."""

    def __init__(self, *, seed: int = 0, max_batch_size: int = 64, **changes: Any) -> None:
        super().__init__(make_tiny_model(seed=seed, **changes), make_tokenizer(), max_batch_size=max_batch_size)
        self.batches: list[list[str]] = []
        run = self._decoder.run

        def recorded(requests: list[GenerationRequest], **kwargs: Any) -> Any:
            self.batches.append([request.request_id for request in requests])
            return run(requests, **kwargs)

        self._decoder.run = recorded  # type: ignore[method-assign]


@pytest.fixture
def engine() -> Iterator[RecordingEngine]:
    with contextlib.closing(RecordingEngine()) as made:
        yield made


def make_request(name: str, *prompt: int, length: int = 3) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=prompt or (2, 6, 4, 9),
        sampling=SamplingParams(max_generate_length=length),
        seed=sum(map(ord, name)),
    )


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


async def trajectory(engine: HFEngine, names: list[str], *, delay_s: float = 0.0) -> list[GenerationOutput]:
    """Asks for one response after the other, thinking `delay_s` before each."""
    with engine.lease():
        outputs = []
        for name in names:
            await asyncio.sleep(delay_s)
            outputs.append(await engine.generate(make_request(name)))
        return outputs


def test_an_output_has_tokens_logprobs_a_stop_reason_and_the_weights_version(engine: RecordingEngine) -> None:
    output = run(engine.generate(make_request("a")))
    assert len(output.token_ids) == len(output.logprobs) == 3
    assert (output.stop_reason, output.weight_versions) == (StopReason.LENGTH, ((0, -1),))


def test_a_wave_waits_for_every_leased_trajectory(engine: RecordingEngine) -> None:
    async def all_at_once() -> None:
        slow = trajectory(engine, ["slow"], delay_s=0.1)
        await asyncio.gather(slow, trajectory(engine, ["b", "b2"]), trajectory(engine, ["a"]))

    run(all_at_once())
    assert engine.batches == [["a", "b", "slow"], ["b2"]]


def test_a_wave_is_sorted_by_length_and_name_and_cut_at_the_batch_size() -> None:
    engine = RecordingEngine(max_batch_size=2)

    async def all_at_once() -> None:
        requests = [make_request("c"), make_request("long", 1, 2, 3, 4, 5, 6), make_request("a"), make_request("b")]
        await asyncio.gather(*map(engine.generate, requests))

    run(all_at_once())
    engine.close()
    assert engine.batches == [["a", "b"], ["c", "long"]]


def test_the_same_requests_give_the_same_batches_and_numbers_however_they_arrive() -> None:
    def play(delays: list[float]) -> tuple[list[list[str]], list[list[GenerationOutput]]]:
        engine = RecordingEngine(max_batch_size=2)

        async def all_at_once() -> list[list[GenerationOutput]]:
            names = [["a", "a2"], ["b", "b2", "b3"], ["c"]]
            return await asyncio.gather(*(trajectory(engine, n, delay_s=d) for n, d in zip(names, delays)))

        outputs = run(all_at_once())
        engine.close()
        return engine.batches, outputs

    assert play([0.0, 0.03, 0.06]) == play([0.06, 0.0, 0.0])


def test_a_rollout_starts_from_nothing_whatever_was_generated_before(engine: RecordingEngine) -> None:
    output = run(engine.generate(make_request("a")))
    continued = replace(make_request("b"), prompt_token_ids=(2, 6, 4, 9, *output.token_ids, 4))
    assert engine._decoder._prefixes.longest(("", continued.prompt_token_ids)) is not None

    async def another_rollout() -> None:
        with engine.lease():
            await engine.generate(make_request("c", 7, 7))

    run(another_rollout())
    assert engine._decoder._prefixes.longest(("", continued.prompt_token_ids)) is None


def test_a_rollout_that_has_ended_holds_no_memory(engine: RecordingEngine) -> None:
    run(trajectory(engine, ["a", "b"]))
    assert engine._decoder._prefixes._num_bytes == 0


def test_a_trajectory_that_ends_lets_the_others_go_on(engine: RecordingEngine) -> None:
    async def one_leaves() -> list[GenerationOutput]:
        lease = engine.lease()
        lease.__enter__()
        waiting = asyncio.ensure_future(trajectory(engine, ["a"]))
        await asyncio.sleep(0.05)
        assert engine.batches == []
        lease.__exit__(None, None, None)
        return await waiting

    assert len(run(one_leaves())) == 1


def test_a_request_that_is_given_up_leaves_the_others_alone(engine: RecordingEngine) -> None:
    async def give_up() -> list[GenerationOutput]:
        with engine.lease():
            with pytest.raises(asyncio.TimeoutError), engine.lease():
                await asyncio.wait_for(engine.generate(make_request("given up")), 0.05)
            return [await engine.generate(make_request("a"))]

    assert len(run(give_up())) == 1
    assert engine.batches == [["a"]]


def test_every_end_of_sequence_token_of_model_and_tokenizer_counts() -> None:
    model = make_tiny_model()
    model.generation_config.eos_token_id = [9, 11]
    engine = HFEngine(model, make_tokenizer(), max_batch_size=4)
    assert engine._decoder._eos_token_ids == {3, 9, 11}
    engine.close()


# Weights


def weights_of(seed: int, **changes: Any) -> dict[str, torch.Tensor]:
    return dict(make_tiny_model(seed=seed, **changes).named_parameters())


def test_new_weights_answer_as_a_model_made_with_them(engine: RecordingEngine) -> None:
    before = run(engine.generate(make_request("a")))
    sync_within_process(engine, Path()).sync(stored_weights(weights_of(1)), 5)
    after = run(engine.generate(make_request("a")))
    other = RecordingEngine(seed=1)
    expected = run(other.generate(make_request("a")))
    other.close()
    assert after == replace(expected, weight_version=5)
    assert after.logprobs != before.logprobs
    assert engine.weight_version == 5


def test_every_tensor_is_copied(engine: RecordingEngine) -> None:
    """The last one too: the weights of all norms of a new model are alike, and these are not."""
    generator = torch.Generator().manual_seed(0)
    sent = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in weights_of(0).items()}
    sync_within_process(engine, Path()).sync(stored_weights(sent), 1)
    for name, tensor in engine._model.named_parameters():
        assert torch.equal(tensor, sent[name]), name


def test_a_conversation_that_goes_on_after_a_sync_is_computed_with_the_new_weights_alone(
    engine: RecordingEngine,
) -> None:
    """The second turn begins with all of the first, whose keys and values were kept, of the old weights."""

    async def conversation() -> tuple[tuple[int, ...], GenerationOutput]:
        with engine.lease():
            first = await engine.generate(make_request("a"))
            engine.load_weights(weights_of(1).items(), 1)
            prompt = (2, 6, 4, 9, *first.token_ids, 5, 7)
            return prompt, await engine.generate(make_request("b", *prompt))

    prompt, found = run(conversation())
    with contextlib.closing(RecordingEngine(seed=1)) as other:
        expected = run(other.generate(make_request("b", *prompt)))
    assert found.token_ids == expected.token_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_a_tied_head_follows_its_embedding(engine: RecordingEngine) -> None:
    assert "lm_head.weight" not in weights_of(1)
    engine.load_weights(weights_of(1).items(), 1)
    head = engine._model.get_output_embeddings().weight
    assert torch.equal(head, weights_of(1)["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "missing model.norm.weight"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "unknown extra"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.zeros(7)}),
            r"model.norm.weight has shape \(7,\) instead of \(32,\)",
        ),
    ],
)
def test_weights_of_another_model_change_nothing(engine: RecordingEngine, change: Any, message: str) -> None:
    before = run(engine.generate(make_request("a")))
    weights = weights_of(1)
    change(weights)
    with pytest.raises(EngineError, match=message):
        engine.load_weights(weights.items(), 5)
    assert run(engine.generate(make_request("a"))) == before


def test_an_iterator_that_breaks_half_way_changes_nothing(engine: RecordingEngine) -> None:
    before = run(engine.generate(make_request("a")))

    def half() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights_of(1).items())[:3]
        raise RuntimeError("the learner died")

    with pytest.raises(RuntimeError, match="the learner died"):
        engine.load_weights(half(), 5)
    assert run(engine.generate(make_request("a"))) == before


# Refusals


@pytest.mark.parametrize(
    ("request_", "message"),
    [(replace(make_request("a"), prompt_token_ids=()), "empty prompt"), (make_request("a", length=0), "no tokens")],
)
def test_a_request_without_prompt_or_tokens_is_refused(
    engine: RecordingEngine, request_: GenerationRequest, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        run(engine.generate(request_))


def test_a_model_that_breaks_is_an_engine_error_for_each_request_and_the_engine_lives_on(
    engine: RecordingEngine,
) -> None:
    async def both() -> list[Any]:
        outside_the_vocabulary = make_request("bad", 10_000)
        return await asyncio.gather(
            *map(engine.generate, [outside_the_vocabulary, make_request("a")]), return_exceptions=True
        )

    assert [type(result) for result in run(both())] == [EngineError, EngineError]
    assert run(engine.generate(make_request("a"))).stop_reason is StopReason.LENGTH


def test_a_closed_engine_answers_nothing_and_leaves_nobody_waiting(engine: RecordingEngine) -> None:
    async def close_while_waiting() -> None:
        with engine.lease(), engine.lease():
            waiting = asyncio.ensure_future(engine.generate(make_request("a")))
            await asyncio.sleep(0.01)
            engine.close()
            with pytest.raises(EngineError, match="the engine was closed"):
                await waiting

    run(close_while_waiting())
    engine.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        run(engine.generate(make_request("a")))
