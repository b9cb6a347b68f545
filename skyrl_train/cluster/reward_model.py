"""A reward model in an actor on Ray, which is started again once where it dies."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from skyrl_train.cluster.calls import Answer, reason_of
from skyrl_train.cluster.endpoints import answer_of
from skyrl_train.cluster.session import RaySession, forwarded_environment
from skyrl_train.errors import ActorLostError
from skyrl_train.model.files import SequenceScorer
from skyrl_train.telemetry.logs import stacks
from skyrl_train.types import ChatMessage

logger = logging.getLogger(__name__)


class RewardModelActor:
    """The process of the model."""

    def __init__(self, load: Callable[[], SequenceScorer], *, secrets: Mapping[str, str]) -> None:
        """`secrets` are environment variables that Ray must not see. The model is loaded by the first call."""
        os.environ.update(secrets)
        stacks.answer("reward model")
        self._load = load
        self._scorer: SequenceScorer | None = None

    def score(self, conversations: Sequence[Sequence[ChatMessage]]) -> Answer:
        """Answer with the score of each."""
        return answer_of(lambda: self._loaded().score_now(conversations))

    def _loaded(self) -> SequenceScorer:
        self._scorer = self._scorer or self._load()
        return self._scorer


class RayScorer:
    """Implements `Scorer` with such an actor. `close` ends it."""

    def __init__(
        self,
        load: Callable[[], SequenceScorer],
        session: RaySession,
        *,
        path: str,
        device: str,
        timeout_s: float,
    ) -> None:
        """Wait until `load` has loaded the model of `path` on `device` in the actor, `timeout_s` at most. Raises ModelError,
        ActorLostError."""
        self._load, self._session, self._device = load, session, device
        self._name = f"the reward model {path!r}"
        self._restarts_left = 1
        self._restarting = asyncio.Lock()
        self._actor = self._start()
        try:
            ray.get(self._actor.score.remote([]), timeout=timeout_s).unwrap()
        except ray.exceptions.RayError as error:
            self.close()
            raise ActorLostError(f"{self._name} did not start: {reason_of(error)}") from None

    async def score(self, conversations: Sequence[Sequence[ChatMessage]]) -> Sequence[float]:
        """Return the score of each. Raises ModelError, and ActorLostError where the second actor is gone, too."""
        actor = self._actor
        try:
            return await self._ask(actor, conversations)
        except ray.exceptions.RayActorError as error:
            async with self._restarting:
                if actor is self._actor:
                    if not self._restarts_left:
                        lost = f"{self._name} died again: {reason_of(error)}"
                        raise ActorLostError(lost) from None
                    self._restarts_left -= 1
                    logger.warning("the reward model died and is started again: %s", reason_of(error))
                    self._actor = self._start()
            return await self.score(conversations)

    def close(self) -> None:
        """End the actor at once; calls that wait for it raise."""
        ray.kill(self._actor, no_restart=True)

    async def _ask(self, actor: Any, conversations: Sequence[Sequence[ChatMessage]]) -> Sequence[float]:
        answer: Answer = await asyncio.wrap_future(actor.score.remote(conversations).future())
        scores: Sequence[float] = answer.unwrap()
        return scores

    def _start(self) -> Any:
        gpus = 0 if self._device == "cpu" else 1
        options = {
            "num_cpus": 0,  # beside whatever is reserved
            "num_gpus": gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": self._session.runtime_env(1),
        }
        return (
            ray.remote(RewardModelActor)
            .options(**options)
            .remote(self._load, secrets=forwarded_environment(secret=True))
        )
