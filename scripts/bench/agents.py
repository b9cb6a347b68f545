"""What the endpoint of agents costs: sessions that ask over HTTP, beside the same requests made of the engine directly.

    python scripts/bench/agents.py [--sessions 256] [--turns 4] [--tokens 256] [--tokens-per-second 50]

The engine draws tokens at a fixed rate for each request, however many there are, as a server with room for all of them.
The programs run in a process of their own and keep their whole conversation, which they send with each request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness

from skyrl_train.config.models import ModelConfig
from skyrl_train.model import load_tokenizer
from skyrl_train.rollout import ChatTokens, Episode, Job, Limits
from skyrl_train.rollout.agents import Address, Session, opened
from skyrl_train.types import GenerationOutput, GenerationRequest, Prompt, SamplingParams, StopReason, token_ids

QUESTION = "And what is the next one, after those that were said?"
DEADLINE_S = 900.0


class SteadyEngine:
    """Answers `tokens` letters at a fixed rate."""

    weight_version = 0

    def __init__(self, letter: int, tokens: int, tokens_per_second: float) -> None:
        self._answer, self._seconds = (letter,) * tokens, tokens / tokens_per_second

    def lease(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        del request
        await asyncio.sleep(self._seconds)
        return GenerationOutput(
            token_ids=self._answer,
            logprobs=(-1.0,) * len(self._answer),
            stop_reason=StopReason.STOP,
            weight_version=0,
        )

    def close(self) -> None: ...


def episode(engine: SteadyEngine, chat: ChatTokens, sample: int, turns: int) -> Episode:
    prompt = Prompt(uid=f"p{sample}", messages=({"role": "user", "content": QUESTION},))
    job = Job(
        prompt=prompt,
        prompt_token_ids=chat.data_prompt(prompt),
        prompt_index=sample,
        prompt_number=sample,
        sample_index=0,
        sampling=SamplingParams(max_generate_length=4096),
        teacher_token_ids=token_ids(()),
        seed=0,
        global_step=1,
        purpose="train",
    )
    limits = Limits(max_turns=turns, max_context_length=1 << 20, request_timeout_s=DEADLINE_S)
    session: Any = None  # sessions ask no environment
    return Episode(job=job, engine=engine, session=session, chat=chat, limits=limits)


async def directly(engine: SteadyEngine, job: Job, turns: int) -> None:
    """The same requests, made of the engine."""
    prompt = tuple(job.prompt_token_ids.tolist())
    for turn in range(turns):
        request = GenerationRequest(
            request_id=job.request_id(turn), prompt_token_ids=prompt, sampling=job.sampling, seed=job.request_seed(turn)
        )
        prompt = (*prompt, *(await engine.generate(request)).token_ids)


async def program(host: str, port: int, key: str, turns: int) -> None:
    """One agent's conversation, over a connection of its own: an HTTP client would cost more than what is measured."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(turns):
        body = json.dumps({"messages": messages}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        told = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert told.startswith("http/1.1 200"), told
        length = int(told.partition("content-length:")[2].split()[0])
        answer = json.loads(await reader.readexactly(length))
        messages += [answer["choices"][0]["message"], {"role": "user", "content": QUESTION}]
    writer.close()


async def programs(told: dict[str, Any]) -> None:
    """All agents, in the process that they have."""
    host, _, port = told["base_url"].removeprefix("http://").removesuffix("/v1").partition(":")
    gc.freeze()  # what was imported is not looked at again, now and then, for what it holds
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.gather(*(program(host, int(port), key, told["turns"]) for key in told["keys"]))
    print("done", flush=True)  # what comes after it is the end of an interpreter, which takes longer than some runs


async def over_http(episodes: list[Episode], turns: int) -> tuple[float, int]:
    """Seconds, and tokens that are kept as turns."""
    sessions = [Session(replace(each)) for each in episodes]
    async with contextlib.AsyncExitStack() as stack:
        addresses: list[Address] = [await stack.enter_async_context(opened(session)) for session in sessions]
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            keys = [address.api_key for address in addresses]
            json.dump({"base_url": addresses[0].base_url, "keys": keys, "turns": turns}, file)
            file.flush()
            pipe = asyncio.subprocess.PIPE
            command = (sys.executable, __file__, "--programs", file.name)
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, env=harness.side_environment()
            )
            assert process.stdin is not None
            assert process.stdout is not None
            await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
            begin = time.monotonic()
            process.stdin.write(b"go\n")
            await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
            seconds = time.monotonic() - begin
            status = await asyncio.wait_for(process.wait(), DEADLINE_S)
    assert status == 0, status
    kept = [session.kept() for session in sessions]
    assert all(each.metrics["agent/roots"] == 1 for each in kept), "a prompt was not matched"
    return seconds, sum(len(turn.response_token_ids) for each in kept for turn in each.turns)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--tokens-per-second", type=float, default=50.0)
    parser.add_argument("--programs", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.programs:
        asyncio.run(programs(json.loads(arguments.programs.read_text())))
        return
    tokenizer = load_tokenizer(ModelConfig())
    chat = ChatTokens(tokenizer)
    engine = SteadyEngine(tokenizer.encode("a")[0], arguments.tokens, arguments.tokens_per_second)
    episodes = [episode(engine, chat, sample, arguments.turns) for sample in range(arguments.sessions)]

    async def direct() -> float:
        begin = time.monotonic()
        await asyncio.gather(*(directly(engine, each.job, arguments.turns) for each in episodes))
        return time.monotonic() - begin

    expected = arguments.sessions * arguments.turns * arguments.tokens
    gc.freeze()
    alone_s = asyncio.run(direct())
    seconds, tokens = asyncio.run(over_http(episodes, arguments.turns))
    assert tokens == expected, (tokens, expected)
    print(
        f"{arguments.sessions} sessions of {arguments.turns} turns of {arguments.tokens} tokens: "
        f"{expected / alone_s:.0f} tokens/s of the engine, {tokens / seconds:.0f} over the endpoint "
        f"({alone_s / seconds:.1%}), all {tokens} kept"
    )


if __name__ == "__main__":
    harness.run(main)
