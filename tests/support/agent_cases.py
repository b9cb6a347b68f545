"""Sessions of agents with an engine that draws known tokens, which no tokenizer would make of their text."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import httpx

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig, ModelConfig
from skyrl_train.model import load_tokenizer
from skyrl_train.rollout import ChatTokens, Episode, Job, Limits, RolloutGenerator
from skyrl_train.rollout.agents import Address, ChatReply, ChatRequest, Origin, Session, opened
from skyrl_train.rollout.tools import make_parser
from skyrl_train.types import GenerationRequest, Outcome, Prompt, RolloutBatch, SamplingParams, Trajectory, token_ids
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
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


@functools.cache
def tokenizer() -> Any:
    loaded = load_tokenizer(ModelConfig())
    loaded.chat_template = TEMPLATE
    return loaded


@functools.cache
def chat() -> ChatTokens:
    return ChatTokens(tokenizer())


def letter_by_letter(text: str) -> list[int]:
    """The tokens of a text that a model might sample and a tokenizer would not: one for each letter, and the end."""
    return [*(token for letter in text for token in tokenizer().encode(letter)), tokenizer().eos_token_id]


def drawn(request: GenerationRequest) -> list[int]:
    """What the seed says: some letters, or calls of a tool."""
    draw = random.Random(request.seed)
    if draw.random() < 0.25:
        return letter_by_letter(f"I add {draw.randrange(100)}" + CALL * draw.randint(1, 3))
    return letter_by_letter("".join(draw.choices("abc 123", k=draw.randint(1, 9))).strip() or "a")


def episode(engine: Any, *, max_turns: int = 100_000, room: int = 100_000, request_timeout_s: float = 20.0) -> Episode:
    prompt = Prompt(uid="p", messages=({"role": "user", "content": "2 + 3?"},))
    job = Job(
        prompt=prompt,
        prompt_token_ids=chat().data_prompt(prompt),
        prompt_index=0,
        prompt_number=7,
        sample_index=0,
        sampling=SamplingParams(max_generate_length=512),
        teacher_token_ids=token_ids(()),
        seed=1,
        global_step=1,
        purpose="train",
    )
    return Episode(
        job=job,
        engine=engine,
        session=cast("Any", None),
        chat=chat(),
        limits=Limits(max_turns=max_turns, max_context_length=room, request_timeout_s=request_timeout_s),
        parse_calls=make_parser("auto", tokenizer()),
    )


def scripted(*texts: str) -> FakeEngine:
    """Answers in this order, letter by letter."""
    said = iter(texts)
    return FakeEngine(lambda _: letter_by_letter(next(said)))


def asked(*messages: dict[str, Any], tools: Sequence[Any] = (), **changes: Any) -> ChatRequest:
    return ChatRequest(messages=messages, tools=tuple(tools), **changes)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def origin(request: ChatRequest, *, key: str = "", attempt: int | None = 0) -> Origin:
    return Origin(body=hashlib.blake2b(repr(request).encode(), digest_size=16).digest(), key=key, attempt=attempt)


class Programs:
    """Programs of one session, which continue, fork, rewrite, ask again, hang up and ask in parallel."""

    def __init__(self, session: Session, seed: int, wait: Callable[[], Any]) -> None:
        self.session, self.draw, self._wait = session, random.Random(seed), wait
        self.histories: list[list[dict[str, Any]]] = []
        """Conversations that end with an answer."""
        self.lineage: dict[int, list[int]] = {}
        """Of each answer by its number: the answers that its prompt continues, whose tokens must be in it."""
        self.numbers: dict[int, list[int]] = {}
        """Of each conversation by its id: the answers in it, as they were given."""

    async def act(self) -> None:
        """One request or several, of a kind that is drawn."""
        kind = self.draw.choice(["begin", "go_on", "go_on", "go_on", "fork", "rewrite", "again", "parallel", "hang_up"])
        if not self.histories:
            kind = "begin"
        if kind == "parallel":
            await asyncio.gather(*(self._go_on(self.draw.choice(self.histories)) for _ in range(3)))
        elif kind == "begin":
            await self._ask([user(f"question {self.draw.randrange(50)}")], [])
        elif kind == "rewrite":
            await self._rewrite(self.draw.choice(self.histories))
        else:
            # A conversation that was gone on with before becomes a fork.
            history = self.histories[-1] if kind == "go_on" else self.draw.choice(self.histories)
            await self._go_on(history, again=kind == "again", hangs_up=kind == "hang_up")

    async def _go_on(self, history: list[dict[str, Any]], **how: bool) -> None:
        calls = history[-1].get("tool_calls", ())
        added = [{"role": "tool", "tool_call_id": call["id"], "content": str(self.draw.randrange(9))} for call in calls]
        await self._ask(
            [*history, *(added or [user(f"and {self.draw.randrange(50)}")])], self.numbers[id(history)], **how
        )

    async def _rewrite(self, history: list[dict[str, Any]]) -> None:
        """Compaction: the first answer becomes a text that nobody sampled, or only the last question is left."""
        if self.draw.random() < 0.5:
            await self._ask([user("summary"), user(f"and {self.draw.randrange(50)}")], [])
            return
        place = next(index for index, each in enumerate(history) if each["role"] == "assistant")
        written = [*history[:place], {"role": "assistant", "content": "rewritten"}, user("so?")]
        await self._ask(written, [])

    async def _ask(
        self, messages: list[dict[str, Any]], continues: list[int], *, again: bool = False, hangs_up: bool = False
    ) -> None:
        request = asked(*messages, tools=[ADD])
        key = f"key-{self.draw.random()}" if self.draw.random() < 0.3 else ""
        if hangs_up:
            left = asyncio.ensure_future(self.session.ask(request, origin(request, key=key)))
            await asyncio.sleep(0)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            if self.draw.random() < 0.5:
                return
            again = True
        answered = None if hangs_up else await self.session.ask(request, origin(request, key=key))
        if again:
            before, answered = answered, await self.session.ask(request, origin(request, key=key, attempt=1))
            assert before is None or before == answered
        assert answered is not None
        self.session.deliver(answered)
        self._take(messages, continues, answered)

    def _take(self, messages: list[dict[str, Any]], continues: list[int], answered: ChatReply) -> None:
        self.lineage[answered.number] = continues
        history = [*messages, dict(answered.message)]
        self.histories.append(history)
        self.numbers[id(history)] = [*continues, answered.number]


def trajectory_of(session: Session) -> Trajectory:
    return Trajectory(prompt_uid="p", sample_index=0, turns=session.kept().turns, outcome=Outcome.DONE)


@contextlib.contextmanager
def rolling() -> Iterator[Callable[..., RolloutBatch]]:
    """Yields what has a program play samples of one prompt, with all that a run has around it."""
    made: list[RolloutGenerator] = []

    def roll(
        engine: FakeEngine, loop: Mapping[str, Any], *, n: int = 1, env: str = "reported", **generator: Any
    ) -> RolloutBatch:
        made.append(
            RolloutGenerator(
                engine,
                tokenizer(),
                GeneratorConfig(
                    agent_loop={"_target_": "agent", **loop},
                    **{"max_turns": 8, "max_context_length": 4096, **generator},
                ),
                EnvironmentConfig(env_class=env, isolation="thread", step_timeout_s=20.0, max_failed_fraction=1.0),
                0,
            )
        )
        prompt = Prompt(uid="p0", messages=({"role": "user", "content": "2 + 3?"},), extras={"answer": "5"})
        sampling = SamplingParams(max_generate_length=512)
        return made[-1].generate([prompt], n_samples_per_prompt=n, sampling=sampling, global_step=1, purpose="train")

    yield roll
    for generator in made:
        generator.close()


Play = Callable[[httpx.AsyncClient, Session], Awaitable[Any]]


def client_of(address: Address) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {address.api_key}"}
    return httpx.AsyncClient(base_url=address.base_url, headers=headers, timeout=20.0)


def over_http(play: Play, engine: FakeEngine, **limits: Any) -> Any:
    async def run() -> Any:
        session = Session(episode(engine, **limits))
        async with opened(session) as address, client_of(address) as client:
            return await play(client, session)

    return asyncio.run(asyncio.wait_for(run(), 600))
