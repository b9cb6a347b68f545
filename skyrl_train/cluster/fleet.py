"""`EngineFleet`: the actors of all vLLM engines, started, called together, given up and started anew."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray

from skyrl_train.cluster.calls import HEALTH, RemoteActor, kill
from skyrl_train.cluster.engine_worker import EngineWorker
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.session import RaySession, forwarded_environment
from skyrl_train.cluster.workers import watch

if TYPE_CHECKING:
    from skyrl_train.config.schema import Config

logger = logging.getLogger(__name__)


class EngineFleet:
    """One actor per slot, known by its index. A dead one keeps its index, for whoever takes its place."""

    def __init__(self, config: Config, session: RaySession, slots: Sequence[Slot]) -> None:
        """Starts the actors and returns at once; `wait_ready` waits for them."""
        self._config, self._session, self._slots = config, session, slots
        self._restarts = [0] * len(slots)
        self.actors = [self._launch(index) for index in range(len(slots))]
        """By index; of a dead engine, what it was."""
        self.alive = [True] * len(slots)
        self._starting: list[tuple[Any, Any]] | None = [self._begin_start(actor) for actor in self.actors]

    @property
    def living(self) -> list[RemoteActor]:
        """In order."""
        return [actor for actor, alive in zip(self.actors, self.alive) if alive]

    @property
    def ready(self) -> bool:
        """Whether `wait_ready` would return at once."""
        return self._starting is None

    def wait_ready(self) -> None:
        """Waits until every engine has loaded the model. Raises DeadlineError, ActorError, EngineError."""
        if self._starting is None:
            return
        self._finish_start(self.actors, self._starting, "start")
        self._starting = None

    def call(self, method: str, phase: str, *args: Any, engines: Sequence[RemoteActor] | None = None) -> list[Any]:
        """`method` on the engines that live, or on `engines`; the answers in order."""
        chosen = self.living if engines is None else engines
        refs = [getattr(engine.handle, method).remote(*args) for engine in chosen]
        return watch(self._config.placement, phase, method).wait(chosen, refs)

    def sleep(self) -> None:
        """All engines free their devices."""
        self.call("sleep", "score")

    def wake_up(self, tag: str) -> None:
        """All engines take their devices again, for `weights` or for the `kv_cache`."""
        self.call("wake_up", "sync" if tag == "weights" else "generate", tag)

    def alone(self, engine: RemoteActor) -> OneEngine:
        """One engine of it, or one that is to become one."""
        return OneEngine(self, engine)

    def lose(self, index: int, reason: str) -> bool:
        """Gives an engine up; whether it may be started anew."""
        actor = self.actors[index]
        self.alive[index] = False
        logger.warning("%s %s\n%s", actor, reason, actor.log_tail())
        kill([actor])
        self._restarts[index] += 1
        return self._restarts[index] <= self._config.generator.vllm.max_restarts

    def start_anew(self, index: int) -> RemoteActor:
        """A new actor for a dead one's place, which it takes with `admit`. Raises as `wait_ready` does."""
        actor = self._launch(index)
        self._finish_start([actor], [self._begin_start(actor)], "restart")
        return actor

    def admit(self, index: int, actor: RemoteActor) -> None:
        """It has the current weights."""
        self.actors[index], self.alive[index] = actor, True

    def close(self) -> None:
        """Ends the engines."""
        kill(self.living)

    def _launch(self, index: int) -> RemoteActor:
        variables = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
        env = self._session.runtime_env(self._config.platform.num_threads, **variables)
        worker, slot = ray.remote(concurrency_groups={HEALTH: 1})(EngineWorker), self._slots[index]
        options = worker.options(max_restarts=0, runtime_env=env, **slot.options)
        secrets = forwarded_environment(secret=True)
        return RemoteActor(
            handle=options.remote(self._config, secrets=secrets, visible_devices=slot.visible_devices),
            role="vllm engine",
            rank=index,
            log_folder=self._session.log_folder,
        )

    def _begin_start(self, actor: RemoteActor) -> tuple[Any, Any]:
        return actor.handle.identify.remote(), actor.handle.start.remote()

    def _finish_start(self, actors: Sequence[RemoteActor], refs: Sequence[tuple[Any, Any]], phase: str) -> None:
        placement = self._config.placement
        identities = watch(placement, phase, "identify").wait(actors, [identify for identify, _ in refs])
        for actor, identity in zip(actors, identities):
            actor.identity = identity
        watch(placement, phase, "start").wait(actors, [start for _, start in refs])


class OneEngine:
    """An engine that was started anew, and moves by itself to where the others are. It has loaded the model."""

    def __init__(self, fleet: EngineFleet, engine: RemoteActor) -> None:
        self._fleet, self._engine = fleet, engine

    def wait_ready(self) -> None:
        """At once."""

    def sleep(self) -> None:
        """Frees its devices."""
        self._fleet.call("sleep", "restart", engines=[self._engine])

    def wake_up(self, tag: str) -> None:
        """Takes its devices again, for `weights` or for the `kv_cache`."""
        self._fleet.call("wake_up", "restart", tag, engines=[self._engine])
