"""Environments in worker processes: a call that exceeds its deadline, or takes its process down, costs its trajectory alone.

Every environment lives in one of at most `num_workers` processes, which answers one call at a time, or many calls of
asynchronous environments, of which it hosts many. When a worker ends, the trajectories whose calls it was in fail with the
reason. The environments of the others that lived there are lost, and made again in another worker (`boundary/session.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import Protocol

from skyrl_train.registry import split_spec
from skyrl_train.rollout.boundary import (
    MAX_WORKERS,
    AroundCalls,
    EnvironmentLost,
    Request,
    environment_error,
    late,
    plain,
)

_GRACE_S = 5.0
"""An asynchronous call is given up by its worker, which goes on: how much later the worker is."""
SLOW_TO_START = 16
"""Workers at most, unless told how many, where each one imports the environments, or starts servers, by itself."""


class WorkerEnded(Exception):
    """A worker is gone; the message says why."""


class WorkerProcess(Protocol):
    """One process that environments live in."""

    ended: str | None
    """Why it is no more; None while it runs."""

    async def ask(self, request: Request, timeout_s: float) -> object:
        """Return the answer. Raises WorkerEnded, or asyncio.TimeoutError after `timeout_s`, when it is ended, too."""
        ...

    def end(self, reason: str) -> None:
        """Kill it with everything that stems from it. Idempotent."""
        ...


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What is known of environments once they are imported."""

    asynchronous: frozenset[str] = frozenset()
    """Names of those whose methods are coroutine functions."""
    forkable: bool = True
    """Whether workers share what was imported."""


class WorkerHost(Protocol):
    """What starts worker processes: on this machine, or on the nodes of a cluster."""

    async def ready(self) -> Imported:
        """Wait until environments are imported. Raises ConfigError where one is not what it should be, SkyrlTrainError
        where the import ends the process or does not end."""
        ...

    def start(self) -> WorkerProcess:
        """Start one. Call it after `ready`, without waiting for anything in between."""
        ...

    async def aclose(self) -> None:
        """End all workers, and what started them."""
        ...


class ProcessEnvironments:
    """Implements `Environments` with worker processes."""

    may_lose_environments = True
    given_up = "their worker processes were ended"

    def __init__(
        self,
        host: WorkerHost,
        *,
        num_workers: int | None,
        timeout_s: float,
        around: AroundCalls = contextlib.nullcontext,
    ) -> None:
        """`num_workers` None: as many as environments, of asynchronous ones as there are cores. `timeout_s` is the deadline
        of each call, counted from when its worker is free for it; `around` is entered for each call, and that wait."""
        self.around = around
        self._host, self._num_workers = host, num_workers
        self.timeout_s = timeout_s
        self._shared: list[_SharedWorker] = []
        self._num_hosted = 0
        self.num_given_up = 0
        self.num_close_failures = 0

    def host(self, name: str) -> _InWorker:
        self._num_hosted += 1
        return _InWorker(self, name, self._num_hosted)

    async def aclose(self) -> None:
        await self._host.aclose()

    async def place(self, env_class: str) -> tuple[_SharedWorker, bool]:
        """Return the worker with the fewest environments, a new one where all have some and there may be more, and whether
        such environments are asynchronous."""
        imported = await self._host.ready()
        most = self._num_workers or (MAX_WORKERS if imported.forkable else SLOW_TO_START)
        is_asynchronous = env_class in imported.asynchronous
        if is_asynchronous:
            most = min(most, os.cpu_count() or 1)
        self._shared = [each for each in self._shared if each.process.ended is None]
        least = min(self._shared, key=lambda each: each.num_environments, default=None)
        if least is None or (least.num_environments and len(self._shared) < most):
            least = _SharedWorker(self._host.start())
            self._shared.append(least)
        return least, is_asynchronous


class _SharedWorker:
    """A worker process and what lives there."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.num_environments = 0
        self.turn = asyncio.Lock()
        """One call at a time."""


class _InWorker:
    """Implements `EnvironmentHandle` with an environment in whichever worker process there is."""

    def __init__(self, environments: ProcessEnvironments, name: str, number: int) -> None:
        self._environments, self._name, self._number = environments, name, number
        self._worker: _SharedWorker | None = None
        self._env_class = ""
        self._is_asynchronous = False
        self._lives = False
        """Whether something was asked of the environment that would be lost with its worker."""

    async def ask(self, request: Request) -> object:
        try:
            request = {key: plain(value, key) for key, value in request.items()}
        except ValueError as error:
            raise environment_error(f"{self._name}.{request['call']} cannot be sent: {error}") from None
        if request["call"] == "construction":
            self._env_class = split_spec(request["spec"])[0]
        with self._environments.around():
            while True:
                worker = self._worker
                if worker is None or worker.process.ended is not None:
                    self.release()
                    if self._lives:
                        self._lives = False
                        raise EnvironmentLost
                    worker, self._is_asynchronous = await self._environments.place(self._env_class)
                    worker.num_environments += 1
                    self._worker = worker
                async with contextlib.nullcontext() if self._is_asynchronous and self._lives else worker.turn:
                    if worker.process.ended is None:
                        self._lives = True
                        return await self._call(worker, request)

    def release(self) -> None:
        if self._worker is not None:
            self._worker.num_environments -= 1
            self._worker = None

    async def _call(self, worker: _SharedWorker, request: Request) -> object:
        """One call within its deadline; a worker that memory has run out in is of no use to anybody else."""
        what, timeout_s = f"{self._name}.{request['call']}", self._environments.timeout_s
        request = {**request, "environment": self._number, "name": self._name}
        try:
            if self._is_asynchronous:
                answer = await worker.process.ask({**request, "timeout_s": timeout_s}, timeout_s + _GRACE_S)
            else:
                answer = await worker.process.ask(request, timeout_s)
        except asyncio.TimeoutError as error:
            self._environments.num_given_up += 1
            raise late(what, timeout_s, str(error)) from None
        except WorkerEnded as ended:
            raise environment_error(f"{what}: its worker process {ended}") from None
        if isinstance(answer, dict) and str(answer.get("message")).startswith("MemoryError"):
            worker.process.end("ran out of memory (environment.worker_memory_gb)")
        return answer
