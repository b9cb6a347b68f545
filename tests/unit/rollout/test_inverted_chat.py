"""Programs that ask a model by themselves, played by a trajectory: one that only knows httpx stands for verifiers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig, ModelConfig
from skyrl_train.model import load_tokenizer
from skyrl_train.rollout.adapters.inverted_chat import Ended, Inversion, ProgramError, kept_open
from skyrl_train.rollout.agents.wires import ChatRequest
from skyrl_train.rollout.envs.environments import playing_itself_violations
from skyrl_train.rollout.generator import RolloutGenerator
from skyrl_train.rollout.tools.formats import make_parser
from skyrl_train.types import Outcome, Prompt, SamplingParams, Trajectory
from tests.support.fakes import FakeEngine
from tests.support.tool_cases import TEMPLATE

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
QUESTION = {"role": "user", "content": "2 + 3?"}
CALL = [{"id": "000000000", "name": "add", "arguments": {"a": 2, "b": 3}}]
Program = Callable[[str, str], Coroutine[Any, Any, Any]]


class Line:
    """A program's end of the conversation."""

    def __init__(self, base_url: str, model: str) -> None:
        self._url, self._model = f"{base_url}/chat/completions", model

    async def post(self, **body: Any) -> httpx.Response:
        async with httpx.AsyncClient(timeout=20.0) as client:
            return await client.post(self._url, json={"model": self._model, **body})

    async def ask(self, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
        """The answer, which is in the messages as well afterwards."""
        response = await self.post(messages=messages, **body)
        response.raise_for_status()
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        messages.append(message)
        return message


async def tutor(base_url: str, model: str) -> float:
    """Runs what is called until there is an answer, asks once more where it is wrong, and scores."""
    line, messages, score = Line(base_url, model), [dict(QUESTION)], 1.0
    while True:
        message = await line.ask(messages, tools=[ADD])
        for called in message.get("tool_calls", ()):
            arguments = json.loads(called["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": called["id"], "content": str(sum(arguments.values()))})
        if message.get("tool_calls"):
            continue
        if message["content"] == "5" or score < 1:
            return score if message["content"] == "5" else 0.0
        score = 0.5
        messages.append({"role": "user", "content": "Try again"})


class Tutored:
    """The environment of a program: as the adapter of verifiers, without verifiers."""

    def __init__(self, env_config: Any, extras: Any) -> None:
        self.inversion: Inversion[float] | None = None
        self.schemas: list[Any] = []

    async def init(self, prompt: Any) -> Any:
        self.inversion = Inversion(tutor)
        first = await self.inversion.begin()
        assert isinstance(first, ChatRequest)
        self.schemas = list(first.tools)
        return first.messages, {}

    async def step(self, action: str) -> Any:
        assert self.inversion is not None
        return self.said(await self.inversion.answer(action))

    async def step_calls(self, action: str, calls: Any) -> Any:
        assert self.inversion is not None
        return self.said(await self.inversion.answer(action, calls))

    async def cut(self) -> Any:
        return {"observations": [], "reward": 0.25, "done": True}

    async def close(self) -> None:
        assert self.inversion is not None
        await self.inversion.close()

    @staticmethod
    def said(now: ChatRequest | Ended[float]) -> Any:
        if isinstance(now, Ended):
            return {"observations": [], "reward": now.value, "done": True}
        return {"observations": now.messages, "reward": 0.0, "done": False}


def played(program: Program, *answers: tuple[Any, ...]) -> list[ChatRequest | Ended[Any]]:
    """What the program asks, and its end, with these answers; `("full",)` refuses."""

    async def play() -> list[ChatRequest | Ended[Any]]:
        inversion = Inversion(program)
        try:
            said = [await inversion.begin()]
            for each in answers:
                said.append(await (inversion.refuse() if each == ("full",) else inversion.answer(*each)))
            return said
        finally:
            await inversion.close()

    return asyncio.run(asyncio.wait_for(play(), 60))


def test_a_program_is_played_turn_by_turn() -> None:
    first, result, again, end = played(tutor, ("I add", CALL), ("six",), ("5",))
    assert first == ChatRequest(messages=(QUESTION,), tools=(ADD,))
    assert result == ChatRequest(
        messages=({"role": "tool", "tool_call_id": "000000000", "content": "5"},), tools=(ADD,)
    )
    assert again == ChatRequest(messages=({"role": "user", "content": "Try again"},), tools=(ADD,))
    assert end == Ended(value=0.5)


def test_a_call_that_cannot_be_read_is_sent_as_it_is() -> None:
    async def program(base_url: str, model: str) -> object:
        message = await Line(base_url, model).ask([dict(QUESTION)], tools=[ADD])
        return message["tool_calls"][0]["function"]["arguments"]

    assert played(program, ("", [{**CALL[0], "arguments": "no JSON"}]))[-1] == Ended(value="no JSON")


def test_an_answer_is_streamed_to_who_asks_for_that() -> None:
    async def program(base_url: str, model: str) -> object:
        text = (await Line(base_url, model).post(messages=[QUESTION], tools=[ADD], stream=True)).text
        *pieces, end = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert end == "[DONE]"
        _, said, called, last = [json.loads(piece)["choices"][0] for piece in pieces]
        return said["delta"]["content"], called["delta"]["tool_calls"][0]["index"], last["finish_reason"]

    assert played(program, ("I add", CALL))[-1] == Ended(value=("I add", 0, "tool_calls"))


def test_a_full_context_is_told_to_the_program_as_servers_tell_it() -> None:
    async def program(base_url: str, model: str) -> object:
        line, messages = Line(base_url, model), [dict(QUESTION)]
        await line.ask(messages)
        messages.append(dict(QUESTION))
        replies = [await line.post(messages=messages) for _ in range(2)]
        return [(reply.status_code, reply.json()["error"]["code"]) for reply in replies]

    assert played(program, ("6",), ("full",))[-1] == Ended(value=[(400, "context_length_exceeded")] * 2)


def follow_up(change: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> Program:
    """A program whose second request is what `change` makes of the conversation."""

    async def program(base_url: str, model: str) -> None:
        line, messages = Line(base_url, model), [{"role": "system", "content": "Add."}, dict(QUESTION)]
        await line.ask(messages, tools=[ADD])
        messages.append(dict(QUESTION))
        await line.post(**{"messages": messages, "tools": [ADD], **change(messages)})

    return program


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda said: {"messages": [dict(QUESTION), *said[1:]]}, "was rewritten.*message 0 was.*Add"),
        (lambda said: {"messages": [*said[:2], {**said[2], "content": "5"}, said[3]]}, "message 2 was .*'6'.*'5'"),
        (lambda said: {"messages": said[:2]}, "message 2 is gone"),
        (lambda said: {"messages": said[:3]}, "adds no message"),
        (lambda said: {"messages": [*said, said[2]]}, "an answer that the model did not give"),
        (lambda said: {"tools": []}, "the tools that the model may call changed"),
        (lambda said: {"n": 2}, "n: must be 1"),
        (
            lambda said: {"messages": [*said, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "a part that is no text",
        ),
    ],
)
def test_what_does_not_continue_the_conversation_is_refused_with_its_reason(change: Any, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        played(follow_up(change), ("6",))


def test_a_program_may_leave_out_names_of_tools_and_write_texts_as_parts() -> None:
    def change(said: list[dict[str, Any]]) -> dict[str, Any]:
        return {"messages": [*said[:3], {"role": "user", "content": [{"type": "text", "text": "Well?"}]}]}

    assert played(follow_up(change), ("6",))[-1] == ChatRequest(
        messages=({"role": "user", "content": "Well?"},), tools=(ADD,)
    )


def test_two_requests_at_a_time_are_no_trajectory() -> None:
    async def program(base_url: str, model: str) -> None:
        line, messages = Line(base_url, model), [dict(QUESTION)]
        await line.ask(messages)
        await asyncio.gather(*(line.post(messages=[*messages, QUESTION]) for _ in "ab"))

    async def play() -> None:
        inversion = Inversion(program)
        try:
            await inversion.begin()
            for _ in range(2):  # the second request may arrive before the first one is taken, or after
                await inversion.answer("6")
                await asyncio.sleep(0.2)
        finally:
            await inversion.close()

    with pytest.raises(ProgramError, match="two answers at a time"):
        asyncio.run(asyncio.wait_for(play(), 60))


def test_a_stranger_gets_no_answer() -> None:
    async def program(base_url: str, model: str) -> int:
        return (await Line(base_url, "policy").post(messages=[QUESTION])).status_code

    assert played(program) == [Ended(value=404)]


def test_what_a_program_raises_is_raised_and_closing_ends_it() -> None:
    ended = []

    async def broken(base_url: str, model: str) -> None:
        await Line(base_url, model).ask([dict(QUESTION)])
        raise ValueError("unknown city 'Oz'")

    async def waiting(base_url: str, model: str) -> None:
        try:
            await Line(base_url, model).ask([dict(QUESTION)])
        finally:
            ended.append(model)

    with pytest.raises(ValueError, match="Oz"):
        played(broken, ("6",))
    assert played(waiting) == [ChatRequest(messages=(QUESTION,), tools=())]
    assert len(ended) == 1


def test_what_cannot_be_opened_is_tried_again() -> None:
    tried: list[int] = []

    class Door:
        async def __aenter__(self) -> str:
            tried.append(1)
            if len(tried) == 1:
                raise OSError("shut")
            return "open"

        async def __aexit__(self, *_: object) -> None:
            tried.append(-1)

    async def twice() -> list[str]:
        with pytest.raises(OSError, match="shut"):
            await kept_open("door", Door)  # type: ignore[arg-type]
        return [await kept_open("door", Door) for _ in range(2)]  # type: ignore[arg-type]

    assert asyncio.run(twice()) == ["open", "open"]
    assert tried == [1, 1, -1]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    loaded = load_tokenizer(ModelConfig())
    loaded.chat_template = TEMPLATE
    return loaded


@pytest.fixture
def run(tokenizer: Any) -> Iterator[Callable[..., Trajectory]]:
    """Rolls out one trajectory whose turns say `texts`."""
    made: list[RolloutGenerator] = []

    def run(*texts: str, max_turns: int = 5, room: int = 4096, readable: bool = True) -> Trajectory:
        said = iter(texts)
        spec = "tests.unit.rollout.test_inverted_chat:Tutored"
        generator = RolloutGenerator(
            FakeEngine(lambda _: [*tokenizer.encode(next(said)), tokenizer.eos_token_id]),
            tokenizer,
            GeneratorConfig(max_turns=max_turns, max_context_length=room),
            EnvironmentConfig(env_class=spec, isolation="thread", step_timeout_s=30.0, max_failed_fraction=1.0),
            0,
            parse_calls=make_parser("auto", tokenizer) if readable else None,
        )
        made.append(generator)
        prompt = Prompt(uid="p", messages=({"role": "user", "content": "task"},), extras={})
        sampling = SamplingParams(max_generate_length=1024)
        batch = generator.generate([prompt], n_samples_per_prompt=1, sampling=sampling, global_step=1, purpose="train")
        return batch.trajectories[0]

    yield run
    for generator in made:
        generator.close()


CALLED = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def test_a_trajectory_trains_on_what_was_sampled_and_earns_what_the_program_says(run: Any, tokenizer: Any) -> None:
    texts = [CALLED, "6", "5"]
    trajectory = run(*texts)
    assert trajectory.outcome is Outcome.DONE
    assert trajectory.first_messages == (QUESTION,)
    assert [turn.response_token_ids.tolist() for turn in trajectory.turns] == [
        [*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts
    ]
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 0.5]
    observed = [[message["content"] for message in turn.observations] for turn in trajectory.turns]
    assert observed == [["5"], ["Try again"], []]
    assert '"name": "add"' in tokenizer.decode(trajectory.turns[0].added_token_ids)
    assert (trajectory.metrics["tools/calls"], trajectory.metrics["tools/malformed"]) == (1.0, 0.0)


def test_a_call_in_the_last_turn_is_an_answer(run: Any) -> None:
    trajectory = run("6", CALLED, max_turns=2)
    assert trajectory.outcome is Outcome.DONE
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0]
    assert "tools/calls" in trajectory.metrics
    assert trajectory.metrics["tools/calls"] == 0.0


def test_turns_that_are_used_up_are_scored_by_the_environment(run: Any) -> None:
    trajectory = run("6", max_turns=1)
    assert trajectory.outcome is Outcome.MAX_TURNS
    assert [turn.reward for turn in trajectory.turns] == [0.25]


def test_a_context_that_is_full_is_scored_by_the_environment(run: Any, tokenizer: Any) -> None:
    first = run("5")
    room = len(first.turns[0].added_token_ids) + len(tokenizer.encode("6")) + 2
    trajectory = run("6", room=room)
    assert trajectory.outcome is Outcome.CONTEXT_FULL
    assert [turn.reward for turn in trajectory.turns] == [0.25]


def test_tools_whose_calls_nobody_can_read_fail_the_trajectory(run: Any) -> None:
    assert "set environment.tool_format" in run("5", readable=False).failure.message


def test_tools_beside_those_that_an_environment_runs_are_refused() -> None:
    spec = "tests.unit.rollout.test_inverted_chat:Tutored"
    (violation,) = playing_itself_violations(spec)
    assert str(violation) == (
        f"environment.env_class: runs its tools by itself and no others; got '{spec}'. Leave environment.tools empty"
    )
    assert list(playing_itself_violations("gsm8k")) == []
