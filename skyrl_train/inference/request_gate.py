"""`RequestGate`: weights of an engine change while none of its requests runs, though rollouts go on; unless the engine takes
them in flight, for which the gate stays open.

event loop of the requests                     thread of the weight sync
---------------------------------------------  -----------------------------------------------
`request()` waits while the gate is shut       `shut()` waits until no request is inside
the engine answers                             weights change
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager

from skyrl_train.errors import DeadlineError
from skyrl_train.inference.routing import ServedTokens
from skyrl_train.interfaces import InferenceEngine
from skyrl_train.types import GenerationOutput, GenerationRequest

_MARGIN_S = 60.0
"""How much longer than a request may take it may take until nothing of it is left."""
_SIGNAL_POLL_S = 0.5


class RequestGate:
    """Requests enter from one event loop, and one other thread shuts it."""

    def __init__(self, *, request_timeout_s: float = 600.0, stays_open: bool = False) -> None:
        """`request_timeout_s`: deadline of one request, at which whoever made it gives it up. `stays_open`: nothing is held
        back, as weights change under running requests."""
        self._timeout_s = request_timeout_s + _MARGIN_S
        self._stays_open = stays_open
        self._is_shut = False
        self._num_inside = 0
        self._left = threading.Event()
        self._opened = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shut_s = 0.0

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Wait until the gate is open, and be inside."""
        self._loop = asyncio.get_running_loop()
        while not self._enter():
            self._opened.clear()  # it is set on this loop, after it was found shut here
            await self._opened.wait()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Hold requests back, and wait until those inside have left. Raises DeadlineError."""
        if self._stays_open:
            yield
            return
        began = time.monotonic()
        self._is_shut = True
        try:
            self._await_empty(began + self._timeout_s)
            yield
        finally:
            self._is_shut = False
            self._shut_s += time.monotonic() - began
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._opened.set)

    def take_metrics(self) -> dict[str, float]:
        """Return for how long it was shut since the last time; nothing where it stays open, as whoever syncs weights then
        knows for how long an engine was kept from answering."""
        seconds, self._shut_s = self._shut_s, 0.0
        return {} if self._stays_open else {"timing/wait/sync": seconds}

    def _enter(self) -> bool:
        # Without a lock: this counts and then looks, `shut` says so and then counts, so that one of them sees the other.
        self._num_inside += 1
        if not self._is_shut:
            return True
        self._leave()
        return False

    def _leave(self) -> None:
        self._num_inside -= 1
        if not self._num_inside:
            self._left.set()

    def _await_empty(self, ends: float) -> None:
        while True:
            self._left.clear()
            if not self._num_inside:
                return
            if time.monotonic() > ends:
                raise DeadlineError(
                    f"{self._num_inside} requests that ran when weights were to be synced",
                    self._timeout_s,
                    "Whatever asks the engine must give up after generator.request_timeout_s, as generator.agent_loop does",
                )
            self._left.wait(_SIGNAL_POLL_S)


class GatedEngine:
    """Implements `InferenceEngine` by another one, of which no request runs while its weights change."""

    def __init__(self, engine: InferenceEngine, gate: RequestGate) -> None:
        self._engine, self._gate = engine, gate
        self._served = ServedTokens(1)

    @property
    def weight_version(self) -> int:
        """Version of the weights that answer now."""
        return self._engine.weight_version

    def lease(self) -> AbstractContextManager[None]:
        """Announce a trajectory to the engine for as long as the context is open."""
        return self._engine.lease()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Raises as the engine does."""
        async with self._gate.request():
            output = await self._engine.generate(request)
        self._served.add(0, request, output)
        return output

    def take_metrics(self) -> dict[str, float]:
        """Return what was served since the last time, and for how long requests were held back."""
        return {**self._served.take(), **self._gate.take_metrics()}

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()
