"""Worker processes of environments on the nodes of a Ray cluster.

One actor on each node has the same supervisor and workers as a run without Ray has on its own machine
(`rollout/hosts/local.py`), so that it survives whatever an environment does. What environments answer passes through Ray as
text, and is read where the run is.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.cluster.calls import Answer, reason_of
from skyrl_train.cluster.session import RaySession
from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.rollout.boundary import MAX_WORKERS, Request
from skyrl_train.rollout.hosts import Imported, LocalWorker, LocalWorkers, WorkerEnded
from skyrl_train.system.processes import parse
from skyrl_train.telemetry.logs import stacks

_GRACE_S = 15.0
"""An actor answers within the deadline of a call: how much later its answer may arrive."""


class NodeWorkers:
    """The actor of one node."""

    def __init__(self, environment: EnvironmentConfig, *, secrets: Mapping[str, str]) -> None:
        """`secrets` are environment variables that Ray must not see."""
        os.environ.update(secrets)
        stacks.answer("environments of a node")
        self._workers = LocalWorkers.of(environment)
        self._started: dict[int, LocalWorker] = {}

    async def ready(self) -> Answer:
        """Start the worker processes, which import the environments; an error is in the answer."""
        try:
            return Answer(value=await self._workers.ready())
        except SkyrlTrainError as error:
            return Answer(error=error)

    async def ask(self, number: int, request: str, timeout_s: float) -> tuple[str, str]:
        """Return ("answer", its JSON), ("late", where it was) or ("ended", why). A new number is a new worker's."""
        try:
            if number not in self._started:
                await self._workers.ready()
                self._started[number] = self._workers.start()
            return "answer", json.dumps(await self._started[number].ask(json.loads(request), timeout_s))
        except asyncio.TimeoutError as error:
            return "late", str(error)
        except (WorkerEnded, SkyrlTrainError) as error:
            return "ended", str(error)

    async def end(self, number: int, reason: str) -> None:
        """Kill the worker of that number, if it runs; its callers are told the reason."""
        if number in self._started:
            self._started[number].end(reason)

    async def close(self) -> None:
        """End all workers of this node."""
        await self._workers.aclose()


class RayWorkers:
    """Implements `WorkerHost` with an actor on each node. Used from one event loop."""

    def __init__(self, environment: EnvironmentConfig, session: RaySession, *, timeout_s: float) -> None:
        """`timeout_s` is the deadline of starting the actors, imports included."""
        self._environment, self._session, self._timeout_s = environment, session, timeout_s
        self._nodes: list[_Node] = []
        self._starting = asyncio.Lock()
        self._num_started = 0
        self._imported = Imported()

    async def ready(self) -> Imported:
        async with self._starting:
            if any(node.lost is None for node in self._nodes):
                return self._imported
            started = await asyncio.to_thread(self._start_actors)
            answers = [asyncio.wrap_future(node.actor.ready.remote().future()) for node in started]
            try:
                for answer in await asyncio.wait_for(asyncio.gather(*answers), self._timeout_s):
                    self._imported = answer.unwrap()
            except (asyncio.TimeoutError, ray.exceptions.RayError) as error:
                reason = "did not start in time" if isinstance(error, asyncio.TimeoutError) else reason_of(error)
                raise SkyrlTrainError(f"the workers of environments on Ray: {reason}") from None
            self._nodes = started
            return self._imported

    def start(self) -> RayWorker:
        living = [node for node in self._nodes if node.lost is None]
        for each in living:
            each.workers = [worker for worker in each.workers if worker.ended is None]
        node = min(living, key=lambda each: len(each.workers))
        self._num_started += 1
        worker = RayWorker(node, self._num_started)
        node.workers.append(worker)
        return worker

    async def aclose(self) -> None:
        closing = [node.actor.close.remote() for node in self._nodes if node.lost is None]
        if closing:
            await asyncio.to_thread(ray.wait, closing, num_returns=len(closing), timeout=_GRACE_S)
        for node in self._nodes:
            ray.kill(node.actor, no_restart=True)
        self._nodes = []

    def _start_actors(self) -> list[_Node]:
        """One on each living node, beside whatever is reserved there."""
        env, nodes = self._session.runtime_env(1), [node for node in ray.nodes() if node["Alive"]]
        named = LocalWorkers.of(self._environment).named
        secrets = {name: os.environ[name] for name in named if name in os.environ}
        actor_class = ray.remote(NodeWorkers)
        return [
            _Node(
                actor_class.options(
                    num_cpus=0,
                    max_restarts=0,
                    max_concurrency=2 * MAX_WORKERS,
                    runtime_env=env,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                ).remote(self._environment, secrets=secrets)
            )
            for node in nodes
        ]


class _Node:
    """The actor of a node, and the workers that were started there."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.workers: list[RayWorker] = []
        self.lost: str | None = None

    def lose(self, reason: str) -> None:
        """Take note that the actor answers no more, and with it none of its workers."""
        self.lost = reason
        for worker in self.workers:
            worker.ended = worker.ended or f"was lost with its node: {reason}"


class RayWorker:
    """Implements `WorkerProcess` through the actor of its node."""

    def __init__(self, node: _Node, number: int) -> None:
        self.ended: str | None = None
        self._node, self._number = node, number

    async def ask(self, request: Request, timeout_s: float) -> object:
        if self.ended is not None:
            raise WorkerEnded(self.ended)
        pending = self._node.actor.ask.remote(self._number, json.dumps(request), timeout_s)
        try:
            said, text = await asyncio.wait_for(asyncio.wrap_future(pending.future()), timeout_s + _GRACE_S)
        except asyncio.CancelledError:
            self.end("was ended in a call that nobody waits for any more")
            raise
        except asyncio.TimeoutError:
            self._node.lose("its actor fell silent")
            raise WorkerEnded(str(self.ended)) from None
        except ray.exceptions.RayError as error:
            self._node.lose(reason_of(error))
            raise WorkerEnded(str(self.ended)) from None
        if said == "answer":
            return parse(text.encode())
        if said == "late":
            self.ended = "was ended: it exceeded the deadline of a call"
            raise asyncio.TimeoutError(text)
        self.ended = text
        raise WorkerEnded(text)

    def end(self, reason: str) -> None:
        if self.ended is None:
            self.ended = reason
            self._node.actor.end.remote(self._number, reason)
