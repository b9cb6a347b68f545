"""Which engine answers."""

from __future__ import annotations

import asyncio

import pytest

from skyrl_train.inference import routing
from skyrl_train.inference.routing import Paces, PrefixRouter, ServedTokens
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams, StopReason

PROMPT = tuple(range(100))
OTHER = tuple(range(500, 600))


def test_samples_of_one_prompt_and_later_turns_go_to_the_same_engine() -> None:
    router = PrefixRouter(max_lead=8)
    first = router.choose(PROMPT, [0, 0], {0, 1})
    assert router.choose(PROMPT, [1, 0], {0, 1}) == first
    assert router.choose((*PROMPT, 1, 2, 3), [2, 0], {0, 1}) == first


def test_a_block_behind_another_beginning_is_not_the_same_block() -> None:
    router = PrefixRouter(max_lead=8)
    assert router.choose(PROMPT, [0, 5], {0, 1}) == 0
    assert router.choose((*OTHER[:64], *PROMPT[64:]), [5, 0], {0, 1}) == 1


def test_an_unknown_prompt_goes_to_the_least_busy_engine() -> None:
    router = PrefixRouter(max_lead=8)
    assert router.choose(PROMPT, [3, 1, 2], {0, 1, 2}) == 1
    assert router.choose(OTHER, [3, 2, 0], {0, 1, 2}) == 2


def test_an_engine_that_is_far_ahead_gets_no_more() -> None:
    router = PrefixRouter(max_lead=4)
    assert router.choose(PROMPT, [0, 0], {0, 1}) == 0
    assert router.choose(PROMPT, [3, 0], {0, 1}) == 0
    assert router.choose(PROMPT, [4, 0], {0, 1}) == 1


def test_a_dead_engine_is_not_chosen_however_well_it_knew_the_prompt() -> None:
    router = PrefixRouter(max_lead=4)
    assert router.choose(PROMPT, [0, 0], {0, 1}) == 0
    assert router.choose(PROMPT, [0, 9], {1}) == 1


def test_after_new_weights_nothing_is_known() -> None:
    router = PrefixRouter(max_lead=8)
    router.choose(PROMPT, [0, 5], {0, 1})
    router.forget()
    assert router.choose(PROMPT, [5, 0], {0, 1}) == 1


def test_an_engine_without_room_is_asked_where_no_other_has_any() -> None:
    router = PrefixRouter(max_lead=100, room=4)
    assert router.choose(PROMPT, [0, 0], {0, 1}) == 0
    assert router.choose(PROMPT, [3, 0], {0, 1}) == 0
    assert router.choose(PROMPT, [4, 3], {0, 1}) == 1
    assert router.choose(PROMPT, [9, 5], {0, 1}) == 1
    assert router.choose(OTHER, [4, 5], {0, 1}) == 0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_a_request_is_overdue_where_another_engine_would_have_given_its_longest_answer_four_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing, "time", clock := Clock())
    loop = asyncio.new_event_loop()
    short, long, other = (loop.create_future() for _ in range(3))
    paces = Paces(2)
    paces.begin(1, short, 100)
    clock.now += 5.0
    paces.end(short, 50)  # 0.1 s a token
    paces.begin(0, long, 100)  # 10 s there, at most
    paces.begin(1, other, 100)
    clock.now += 40.0
    assert paces.overdue([0, 1]) == []
    clock.now += 1.0
    assert paces.overdue([0]) == [], "nobody is faster"
    assert paces.overdue([0, 1]) == [(0, long)], "and of an engine without an answer nothing is known"
    assert paces.fit_of([0, 1]) == [1]
    assert paces.fit_of([0]) == [0]
    paces.end(long, 0)
    assert paces.overdue([0, 1]) == []
    paces.trust_all()
    assert paces.fit_of([0, 1]) == [0, 1]
    loop.close()


def test_what_was_served_is_told_once() -> None:
    served = ServedTokens(2)
    request = GenerationRequest(request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams(), seed=1)

    def answer(num_tokens: int, cached: int | None) -> GenerationOutput:
        tokens = (1,) * num_tokens
        return GenerationOutput(
            token_ids=tokens,
            logprobs=(-1.0,) * num_tokens,
            stop_reason=StopReason.STOP,
            weight_version=0,
            num_cached_tokens=cached,
        )

    served.add(0, request, answer(100, 0))
    served.add(0, request, answer(100, 64))
    served.add(1, request, answer(20, 32))
    assert served.take() == {"engines/cache_hits": 0.32, "engines/balance": 0.3}
    assert served.take() == {}
    served.add(0, request, answer(1, None))
    assert served.take() == {"engines/balance": 0.0}
