"""What a session keeps is what was sampled: forks, rewritten histories, requests that come again or are left."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from skyrl_train.errors import EngineError
from skyrl_train.rollout.agents import session as sessions
from skyrl_train.rollout.agents.http_server import RequestError
from skyrl_train.rollout.agents.session import Session
from skyrl_train.types import GenerationOutput, GenerationRequest, Outcome, Trajectory
from tests.support.agent_cases import (
    ADD,
    CALL,
    Programs,
    asked,
    chat,
    drawn,
    episode,
    letter_by_letter,
    origin,
    scripted,
    tokenizer,
    trajectory_of,
    user,
)
from tests.support.fakes import FakeEngine, make_output


def in_session(
    play: Callable[[Session], Awaitable[Any]], engine: FakeEngine, **limits: Any
) -> tuple[Any, Trajectory, dict[str, float]]:
    """What `play` returns, the trajectory, and what was counted."""

    async def run() -> tuple[Any, Trajectory, dict[str, float]]:
        session = Session(episode(engine, **limits))
        try:
            said = await play(session)
        finally:
            session.close()
        counted = {name.removeprefix("agent/"): value for name, value in session.kept().metrics.items() if value}
        return said, trajectory_of(session), counted

    return asyncio.run(asyncio.wait_for(run(), 600))


async def say(
    session: Session, *messages: dict[str, Any], attempt: int | None = 0, key: str = "", **request: Any
) -> Any:
    """The answer as a message, delivered."""
    question = asked(*messages, **request)
    answered = await session.ask(question, origin(question, key=key, attempt=attempt))
    session.deliver(answered)
    return dict(answered.message)


def texts(trajectory: Trajectory, index: int) -> str:
    return str(tokenizer().decode(trajectory.prompt_token_ids(index)))


def test_a_conversation_goes_on_with_the_tokens_that_were_sampled() -> None:
    async def play(session: Session) -> None:
        first = await say(session, user("1"))
        await say(session, user("1"), first, user("2"))

    engine = scripted("forty two", "b")
    _, trajectory, counted = in_session(play, engine)
    sampled = letter_by_letter("forty two")
    assert tokenizer().encode("forty two") != sampled[:-1]  # another tokenization of the text
    assert [turn.parent for turn in trajectory.turns] == [None, 0]
    assert trajectory.prompt_token_ids(1).tolist() == list(engine.requests[1].prompt_token_ids)
    length = len(engine.requests[0].prompt_token_ids)
    assert list(engine.requests[1].prompt_token_ids[length : length + len(sampled)]) == sampled
    assert trajectory.turns[0].observations == (user("2"),)
    assert counted == {"turns": 2, "roots": 1}


def test_forks_share_what_they_continue_and_the_turn_that_was_asked_last_is_last() -> None:
    async def play(session: Session) -> None:
        first = await say(session, user("1"))
        await say(session, user("1"), first, user("left"))
        await say(session, user("elsewhere"))
        await say(session, user("1"), first, user("right"))

    _, trajectory, counted = in_session(play, scripted("a", "b", "c", "d"))
    assert [turn.response_text for turn in trajectory.turns] == ["c", "a", "b", "d"]
    assert [turn.parent for turn in trajectory.turns] == [None, None, 1, 1]
    assert counted == {"turns": 4, "roots": 2}


def test_an_answer_that_was_rewritten_is_a_new_root_and_counted() -> None:
    async def play(session: Session) -> None:
        await say(session, user("1"))
        await say(session, user("1"), {"role": "assistant", "content": "bb"}, user("2"))

    _, trajectory, counted = in_session(play, scripted("a b", "c"))
    assert [turn.parent for turn in trajectory.turns] == [None, None]
    assert counted == {"turns": 2, "roots": 2, "unmatched": 1}


def test_history_that_was_rewritten_behind_an_answer_goes_on_from_there_and_is_counted() -> None:
    async def play(session: Session) -> None:
        first = await say(session, user("1"))
        second = await say(session, user("1"), first, user("2"))
        await say(session, user("1"), first, user("2"), {**second, "content": "short"}, user("3"))

    _, trajectory, counted = in_session(play, scripted("a", "b", "c"))
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 0]
    assert "short" in texts(trajectory, 2)
    assert counted == {"turns": 3, "roots": 1, "rewritten": 1}


def test_a_template_that_rewrites_earlier_answers_makes_roots_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    unstable = chat()
    monkeypatch.setattr(unstable, "prefix_stable", False)

    async def play(session: Session) -> None:
        first = await say(session, user("1"))
        await say(session, user("1"), first, user("2"))

    _, _, counted = in_session(play, scripted("forty two", "c"))
    assert counted == {"turns": 2, "roots": 2, "unmatched": 1}


def test_calls_are_told_apart_from_the_text_before_them_and_go_on_as_sampled() -> None:
    async def play(session: Session) -> Any:
        first = await say(session, user("1"), tools=[ADD])
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in first["tool_calls"]]
        # A program may leave names out and choose ids of its own.
        renamed = {**first, "tool_calls": [{**call, "id": "mine"} for call in first["tool_calls"]]}
        await say(session, user("1"), renamed, *results, tools=[ADD])
        return first

    engine = scripted(f"I add\n{CALL}{CALL}", "5")
    first, trajectory, counted = in_session(play, engine)
    assert first["content"] == "I add\n"
    assert [call["function"]["arguments"] for call in first["tool_calls"]] == [{"a": 2, "b": 3}] * 2
    assert [turn.parent for turn in trajectory.turns] == [None, 0]
    assert [turn.tool_calls for turn in trajectory.turns] == [tuple(first["tool_calls"]), ()]
    assert counted == {"turns": 2, "roots": 1}


def test_a_call_that_cannot_be_read_is_text() -> None:
    said, _, counted = in_session(lambda session: say(session, user("1"), tools=[ADD]), scripted("<tool_call>{no"))
    assert said == {"role": "assistant", "content": "<tool_call>{no"}
    assert counted["unreadable_calls"] == 1


def test_other_tools_are_another_conversation() -> None:
    async def play(session: Session) -> None:
        first = await say(session, user("1"), tools=[ADD])
        await say(session, user("1"), first, user("2"))

    _, _, counted = in_session(play, scripted("a b", "c"))
    assert counted["unmatched"] == 1


def test_stop_strings_and_limits_of_a_request_bound_its_answer() -> None:
    async def play(session: Session) -> Any:
        first = await say(session, user("1"), stop=("Obs:",), max_tokens=9)
        await say(session, user("1"), first, user("2"))
        return first

    engine = scripted("do it Obs:", "c")
    said, trajectory, _ = in_session(play, engine)
    assert said["content"] == "do it "
    assert (engine.requests[0].sampling.stop, engine.requests[0].sampling.max_generate_length) == (("Obs:",), 9)
    assert trajectory.turns[1].parent == 0  # with the stop string, which was sampled
    assert "Obs:" in texts(trajectory, 1)


@pytest.mark.parametrize(("first", "second"), [({"attempt": 0}, {"attempt": 1}), ({"key": "k"}, {"key": "k"})])
def test_a_request_that_comes_again_is_answered_and_trained_once(first: Any, second: Any) -> None:
    async def play(session: Session) -> None:
        assert await say(session, user("1"), **first) == await say(session, user("1"), **second)

    engine = scripted("a")
    _, trajectory, counted = in_session(play, engine)
    assert len(trajectory.turns) == len(engine.requests) == 1
    assert counted["repeated"] == 1


def test_the_same_body_in_flight_is_one_request_unless_the_sdk_says_that_it_is_new() -> None:
    async def play(session: Session) -> None:
        await asyncio.gather(*(say(session, user("1"), attempt=None) for _ in range(3)))
        await asyncio.gather(*(say(session, user("2"), attempt=0) for _ in range(3)))

    engine = FakeEngine(drawn, delay_s=0.01)
    _, trajectory, counted = in_session(play, engine)
    assert len(trajectory.turns) == len(engine.requests) == 4
    assert len({request.seed for request in engine.requests}) == 4
    assert counted["repeated"] == 2


def test_a_key_that_comes_with_another_body_is_refused() -> None:
    async def play(session: Session) -> None:
        await say(session, user("1"), key="k")
        with pytest.raises(RequestError, match="another body") as caught:
            await say(session, user("2"), key="k")
        assert caught.value.status == 409

    in_session(play, scripted("a"))


def test_what_nobody_waits_for_is_cancelled_and_drawn_again_with_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_REJOIN_WITHIN_S", 0.01)

    async def play(session: Session) -> None:
        left = asyncio.ensure_future(say(session, user("1")))
        while not engine.requests:
            await asyncio.sleep(0.001)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        while not session.kept().metrics["agent/cancelled"]:
            await asyncio.sleep(0.01)
        engine._delay_s = 0.0
        await say(session, user("1"), attempt=1)

    engine = FakeEngine(drawn, delay_s=30.0)
    _, trajectory, counted = in_session(play, engine)
    assert len(trajectory.turns) == 1
    assert len(engine.requests) == 2
    assert engine.requests[0].seed == engine.requests[1].seed
    assert counted == {"turns": 1, "roots": 1, "cancelled": 1}


def test_who_asks_again_soon_gets_what_is_on_its_way() -> None:
    async def play(session: Session) -> None:
        left = asyncio.ensure_future(say(session, user("1")))
        await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        await say(session, user("1"), attempt=1)

    engine = FakeEngine(drawn, delay_s=0.1)
    _, trajectory, counted = in_session(play, engine)
    assert len(trajectory.turns) == len(engine.requests) == 1
    assert counted == {"turns": 1, "roots": 1, "repeated": 1}


def test_an_answer_that_reached_nobody_is_no_turn() -> None:
    async def play(session: Session) -> None:
        question = asked(user("1"))
        await session.ask(question, origin(question))

    _, trajectory, counted = in_session(play, scripted("a"))
    assert (trajectory.turns, counted) == ((), {"undelivered": 1})


def test_seeds_do_not_depend_on_the_order_in_which_requests_come() -> None:
    def seeds(*questions: str) -> dict[tuple[int, ...], int]:
        async def play(session: Session) -> None:
            for question in questions:
                await say(session, user(question))

        engine = FakeEngine(drawn)
        in_session(play, engine)
        return {request.prompt_token_ids: request.seed for request in engine.requests}

    assert seeds("1", "2", "3") == seeds("3", "1", "2")
    assert len(set(seeds("1", "2", "3").values())) == 3


def test_an_answer_that_outlives_a_weight_update_keeps_its_versions() -> None:
    engine = FakeEngine(lambda _: make_output([5, 6, 7], weight_version=None, weight_versions=((0, 6), (2, 7))))
    _, trajectory, _ = in_session(lambda session: say(session, user("1")), engine)
    assert trajectory.turns[0].weight_versions == ((0, 6), (2, 7))


def test_limits_refuse_and_say_so() -> None:
    async def turns(session: Session) -> None:
        await say(session, user("1"))
        with pytest.raises(RequestError, match="max_turns=1"):
            await say(session, user("2"))
        assert session.refused is Outcome.MAX_TURNS

    async def room(session: Session) -> None:
        with pytest.raises(RequestError, match="maximum context length") as caught:
            await say(session, user("a long question " * 20))
        assert caught.value.body["code"] == "context_length_exceeded"
        assert session.refused is Outcome.CONTEXT_FULL
        await say(session, user("1"))
        assert session.refused is None

    in_session(turns, scripted("a"), max_turns=1)
    in_session(room, scripted("a"), room=64)


def test_what_the_engine_breaks_over_ends_the_session() -> None:
    async def play(session: Session) -> str:
        with pytest.raises(RequestError, match="the engine failed") as caught:
            await say(session, user("1"))
        assert caught.value.status == 500
        return str(await session.broken)

    assert in_session(play, FakeEngine(lambda _: EngineError("no luck")))[0] == "EngineError: no luck"
    said = in_session(play, FakeEngine(drawn, delay_s=5.0), request_timeout_s=0.01)[0]
    assert said == "the engine did not answer within generator.request_timeout_s=0.01"


def test_a_session_that_is_over_answers_nothing() -> None:
    async def play(session: Session) -> None:
        waiting = asyncio.ensure_future(say(session, user("1")))
        await asyncio.sleep(0.01)
        session.close()
        with pytest.raises(RequestError, match="is over"):
            await waiting
        with pytest.raises(RequestError, match="is over"):
            await say(session, user("2"))

    in_session(play, FakeEngine(drawn, delay_s=5.0))


def run_programs(num_turns: int, seed: int) -> int:
    """Compares what is trained on with what was sampled, token by token; the number of turns."""
    returned: dict[int, tuple[list[int], list[int]]] = {}

    class Engine(FakeEngine):
        async def generate(self, request: GenerationRequest) -> GenerationOutput:
            output = await super().generate(request)
            number = int(request.request_id.rpartition("-")[2])
            returned[number] = (list(request.prompt_token_ids), list(output.token_ids))
            return output

    async def play(session: Session) -> Programs:
        programs = Programs(session, seed, lambda: None)
        while len(programs.lineage) < num_turns:
            await programs.act()
        return programs

    programs, trajectory, counted = in_session(play, Engine(drawn))
    trained = Counter(
        (tuple(trajectory.prompt_token_ids(index)), tuple(turn.response_token_ids))
        for index, turn in enumerate(trajectory.turns)
    )
    # Each answer that a program has is trained on once, with the context that it was sampled in.
    delivered = {number: returned[number] for number in programs.lineage}
    assert trained == Counter((tuple(prompt), tuple(response)) for prompt, response in delivered.values())
    assert all(len(turn.response_logprobs) == len(turn.response_token_ids) for turn in trajectory.turns)
    for number, continues in programs.lineage.items():
        prompt, start = delivered[number][0], 0
        for before in continues:  # what a conversation goes on from is in its prompt as it was sampled
            expected = [*delivered[before][0][start:], *delivered[before][1]]
            assert prompt[start : start + len(expected)] == expected
            start += len(expected)
    assert counted["roots"] == sum(turn.parent is None for turn in trajectory.turns)
    assert counted["unmatched"] > 0
    assert counted["repeated"] > 0
    return len(trajectory.turns)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_trained_tokens_are_the_sampled_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_REJOIN_WITHIN_S", 0.0)
    assert run_programs(100, seed) >= 100


@pytest.mark.nightly
@pytest.mark.slow
def test_trained_tokens_are_the_sampled_ones_over_ten_thousand_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_REJOIN_WITHIN_S", 0.0)
    assert sum(run_programs(400, seed) for seed in range(25)) >= 10_000
