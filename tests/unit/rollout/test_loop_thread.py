"""A loop on a thread of its own: what still runs when it is closed."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from skyrl_train.rollout.loop_thread import LoopThread


def test_what_runs_is_cancelled_and_awaited_before_the_loop_closes(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    async def connection(name: str, begun: asyncio.Event) -> None:
        begun.set()
        try:
            await asyncio.sleep(60.0)
        finally:
            await asyncio.sleep(0.0)  # it writes its last words
            ended.append(name)
            if name == "breaks":
                raise ValueError(name)

    async def endpoint(name: str) -> None:
        begun = asyncio.Event()
        asyncio.ensure_future(connection(name, begun))  # noqa: RUF006 - nobody keeps it, or asks for its exception
        await begun.wait()

    thread = LoopThread("test")
    thread.run(endpoint("breaks"))
    thread.run(endpoint("is cancelled"))
    with caplog.at_level(logging.DEBUG, logger="asyncio"):
        thread.close()
        gc.collect()
    assert sorted(ended) == ["breaks", "is cancelled"]
    assert [record.getMessage() for record in caplog.records] == []
    assert thread.is_closed
