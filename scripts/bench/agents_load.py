"""What hostile requests to the endpoint of agents cost its other sessions: how long these wait, and the server's memory.

    python scripts/bench/agents_load.py [--sessions 50] [--context 32768] [--seconds 10]

A prompt of 50 MB comes after a third of the time, and 24 bodies of 60 MB without a key 1 s later. The others ask a short
question each second, of an engine that answers at once. Hostile and other programs have a process each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
from agents import SteadyEngine, episode

from skyrl_train.config.models import ModelConfig
from skyrl_train.model import load_tokenizer
from skyrl_train.rollout import ChatTokens
from skyrl_train.rollout.agents import Session, opened

MB = 1 << 20
Told = tuple[int, float]
"""Status, 0 where the other side only hung up, and seconds."""


async def request(port: int, key: str, body: bytes) -> Told:
    """A request on a connection of its own."""
    begin = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = ["POST /v1/chat/completions HTTP/1.1", f"x-api-key: {key}", f"Content-Length: {len(body)}", "", ""]

    async def send() -> None:
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(body), MB // 4):
                writer.write(body[start : start + MB // 4])
                await writer.drain()

    writer.write("\r\n".join(lines).encode())
    sending = asyncio.ensure_future(send())
    (said,) = await asyncio.gather(reader.readline(), return_exceptions=True)
    seconds = time.monotonic() - begin
    sending.cancel()
    writer.transport.abort()
    return int(said.split()[1]) if isinstance(said, bytes) and said else 0, seconds


def asking(text: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


async def hostile(port: int, keys: list[str], seconds: float) -> list[list[Told]]:
    large, keyless = asking("a log file, " * (50 * MB // 12)), bytes(60 * MB)
    await asyncio.sleep(seconds / 3)
    first = await request(port, keys[0], large)
    await asyncio.sleep(1.0)
    return [[first], await asyncio.gather(*(request(port, "none", keyless) for _ in range(24)))]


async def others(port: int, keys: list[str], seconds: float) -> list[list[Told]]:
    attacked = time.monotonic() + seconds / 3
    ends = attacked + seconds * 2 / 3

    alone: list[Told] = []
    told: list[Told] = []

    async def ask(key: str) -> None:
        await asyncio.sleep(random.random())
        while time.monotonic() < ends:
            is_alone = time.monotonic() < attacked - 0.5
            (alone if is_alone else told).append(await request(port, key, asking(f"question {time.monotonic()}")))
            await asyncio.sleep(1.0)

    await asyncio.gather(*map(ask, keys))
    return [alone, told]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def serve(num_sessions: int, context: int, seconds: float) -> None:
    tokenizer = load_tokenizer(ModelConfig())
    chat, engine = ChatTokens(tokenizer), SteadyEngine(tokenizer.encode("a")[0], 1, 1e9)
    grown = [0]

    async def watch(before: int) -> None:
        while True:
            grown.append(resident() - before)
            await asyncio.sleep(0.005)

    async def played(who: str, keys: list[str]) -> list[list[Told]]:
        words = json.dumps([int(port), keys, seconds])
        command = (sys.executable, __file__, f"--{who}", words)
        child = await asyncio.create_subprocess_exec(*command, stdout=-1, env=harness.side_environment())
        said, _ = await child.communicate()
        return json.loads(said)  # type: ignore[no-any-return]

    async with contextlib.AsyncExitStack() as stack:
        keys = []
        for index in range(num_sessions + 1):
            made = episode(engine, chat, index, 1 << 30)
            session = Session(replace(made, limits=replace(made.limits, max_context_length=context)))
            address = await stack.enter_async_context(opened(session))
            keys.append(address.api_key)
            port = address.base_url.rpartition(":")[2].removesuffix("/v1")
        watching = asyncio.ensure_future(watch(resident()))
        waited, (large, keyless) = await asyncio.gather(played("others", keys[1:]), played("hostile", keys[:1]))
        watching.cancel()
    for when, told in zip(("before", "from then on"), waited, strict=True):
        assert all(status == 200 for status, _ in told)
        took = sorted(each for _, each in told)
        shares = ", ".join(f"{name} {took[int(part * (len(took) - 1))]:.3f} s" for name, part in PARTS.items())
        print(f"{len(took)} requests of {num_sessions} other sessions {when}: {shares}")
    print(f"memory of the server: {max(grown) / MB:+.0f} MB at most")
    for what, told in (("a prompt of 50 MB", large), ("24 bodies of 60 MB without a key", keyless)):
        statuses = sorted({status for status, _ in told})
        print(f"{what}: {statuses} within {max(each for _, each in told):.3f} s")


PARTS = {"median": 0.5, "p99": 0.99, "most": 1.0}


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--seconds", type=float, default=10.0)
    programs: dict[str, Any] = {"hostile": hostile, "others": others}
    for who in programs:
        parser.add_argument(f"--{who}", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    for who, program in programs.items():
        if (told := getattr(arguments, who)) is not None:
            print(json.dumps(asyncio.run(program(*told))))
            return
    asyncio.run(serve(arguments.sessions, arguments.context, arguments.seconds))


if __name__ == "__main__":
    harness.run(main)
