"""A reward model in an actor on Ray, which is started again once where it dies."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from skyrl_train.cluster.calls import Answer, reason_of
from skyrl_train.cluster.endpoints import answer_of
from skyrl_train.cluster.session import RaySession, forwarded_environment
from skyrl_train.errors import ActorLostError
from skyrl_train.model.files import ScorerSettings, SequenceScorer
from skyrl_train.telemetry.logs import stacks
from skyrl_train.types import ChatMessage

logger = logging.getLogger(__name__)


class RewardModelActor:
    """The process of the model."""

    def __init__(self, settings: ScorerSettings, *, secrets: Mapping[str, str]) -> None:
        """`secrets` are environment variables that Ray must not see. The model is loaded by the first call."""
        os.environ.update(secrets)
        stacks.answer("reward model")
        self._settings = settings
        self._scorer: SequenceScorer | None = None

    def score(self, conversations: Sequence[Sequence[ChatMessage]]) -> Answer:
        """Answer with the score of each."""
        return answer_of(lambda: self._loaded().score_now(conversations))

    def _loaded(self) -> SequenceScorer:
        self._scorer = self._scorer or SequenceScorer(self._settings)
        return self._scorer


class RayScorer:
    """Implements `Scorer` with such an actor. `close` ends it."""

    def __init__(self, settings: ScorerSettings, session: RaySession, *, timeout_s: float) -> None:
        """Wait until the model is loaded, `timeout_s` at most. Raises ModelError, ActorLostError."""
        self._settings, self._session = settings, session
        self._restarts_left = 1
        self._restarting = asyncio.Lock()
        self._actor = self._start()
        try:
            ray.get(self._actor.score.remote([]), timeout=timeout_s).unwrap()
        except ray.exceptions.RayError as error:
            self.close()
            raise ActorLostError(f"the reward model {settings.path!r} did not start: {reason_of(error)}") from None

    async def score(self, conversations: Sequence[Sequence[ChatMessage]]) -> Sequence[float]:
        """Return the score of each. Raises ModelError, and ActorLostError where the second actor is gone, too."""
        actor = self._actor
        try:
            return await self._ask(actor, conversations)
        except ray.exceptions.RayActorError as error:
            async with self._restarting:
                if actor is self._actor:
                    if not self._restarts_left:
                        lost = f"the reward model {self._settings.path!r} died again: {reason_of(error)}"
                        raise ActorLostError(lost) from None
                    self._restarts_left -= 1
                    logger.warning("the reward model died and is started again: %s", reason_of(error))
                    self._actor = self._start()
            return await self.score(conversations)

    def close(self) -> None:
        """End the actor."""
        ray.kill(self._actor, no_restart=True)

    async def _ask(self, actor: Any, conversations: Sequence[Sequence[ChatMessage]]) -> Sequence[float]:
        answer: Answer = await asyncio.wrap_future(actor.score.remote(conversations).future())
        scores: Sequence[float] = answer.unwrap()
        return scores

    def _start(self) -> Any:
        gpus = 0 if self._settings.device == "cpu" else 1
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
            .remote(self._settings, secrets=forwarded_environment(secret=True))
        )
