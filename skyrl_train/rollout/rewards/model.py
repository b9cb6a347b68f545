"""`model`: a reward that a sequence-classification model gives to the conversation.

The model is in this process or in an actor on Ray (`model/files/reward_model.py`), or behind the URL of vLLM's server. All
samples of a prompt are scored together, so that what is computed in one batch does not depend on when each one ended.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence

import httpx

from skyrl_train.errors import EngineError, SkyrlTrainError, Violation
from skyrl_train.rollout.http import (
    address_violations,
    ask_until_answered,
    client_arguments,
    send,
    server_problem,
)
from skyrl_train.rollout.rewards import HeldReward, batched
from skyrl_train.system.files import finite_number
from skyrl_train.telemetry.logs import learn_secrets, redact_text
from skyrl_train.types import ChatMessage

Scores = Callable[[Sequence[Sequence[ChatMessage]]], Awaitable[Sequence[float]]]
"""A reward model, wherever it is: one finite number for each conversation. Raises SkyrlTrainError."""


class RewardModel(HeldReward):
    """A reward function of several trajectories, `await model(completions=..., messages=...)`."""

    def __init__(
        self,
        *,
        path: str = "",
        revision: str | None = None,
        dtype: str = "float32",
        placement: str = "inline",
        device: str = "",
        max_batch_tokens: int = 16384,
        label: int = 0,
        weights: str = "",
        url: str = "",
        served_model: str = "",
        timeout_s: float = 300.0,
        max_retries: int = 4,
        api_key_env: str = "SKYRL_TRAIN_REWARD_MODEL_API_KEY",
        range: Sequence[float] = (-100.0, 100.0),
    ) -> None:
        """
        Args:
            path: Folder or hub name of the model, which is loaded; or give `url`.
            revision: Branch, tag or commit of a hub model.
            dtype: Type of weights and arithmetic.
            placement: `inline` is this process, `ray` an actor, which is started again once where it dies.
            device: Of the model, e.g. `cuda:0`; that of the run unless given. An actor takes a GPU where it is one.
            max_batch_tokens: Tokens, padding counted, that are computed together at most.
            label: Which of the model's labels is the score.
            weights: Digest of the weights. A run fills it in, so that it does not go on with others.
            url: Base address of a server of vLLM that serves such a model (`/classify`).
            served_model: Its name there.
            timeout_s: Deadline of scoring the samples of one prompt.
            max_retries: Attempts after the first, for what the server did not answer or answered with a passing error.
            api_key_env: Environment variable that holds the server's key, where it wants one.
            range: Lowest and highest score that the model gives; one outside fails its trajectory.
        """
        self._range = tuple(range)
        self.path, self.revision, self.dtype, self.placement, self.device = path, revision, dtype, placement, device
        self.max_batch_tokens, self.label, self.weights = max_batch_tokens, label, weights
        self.timeout_s, self._url, self._served_model = timeout_s, url.rstrip("/"), served_model
        self._max_retries, self._api_key_env = max_retries, api_key_env
        self._scores: Scores | None = None

    def use(self, scores: Scores) -> None:
        """Have the model of `path` score by this function."""
        self._scores = scores

    @batched
    async def __call__(
        self,
        completions: Sequence[str],  # noqa: ARG002
        messages: Sequence[Sequence[ChatMessage]],
    ) -> Sequence[float]:
        """Return the score of each conversation. Raises SkyrlTrainError."""
        if self._url:
            async with self._client() as client:
                return await asyncio.gather(*(self._ask(client, conversation) for conversation in messages))
        if self._scores is None:
            raise SkyrlTrainError(f"nothing holds the reward model {self.path!r}")
        return await asyncio.wait_for(self._scores(messages), self.timeout_s)

    @property
    def reward_range(self) -> tuple[float, float]:
        """The lowest and the highest score, as the setting `range` says."""
        low, high = self._range
        return float(low), float(high)

    def violations(self, setting: str) -> Iterator[Violation]:
        """What is wrong with the settings, found without the model; `setting` is where they are."""
        if len(self._range) != 2 or not -math.inf < self._range[0] < self._range[1] < math.inf:
            rule, remedy = "must be the lowest and the highest score", "write range: [-100, 100]"
            yield Violation.of(f"{setting}.range", list(self._range), rule, remedy)
        if bool(self.path) == bool(self._url) or bool(self._url) != bool(self._served_model):
            rule, remedy = "must name a model", "write path: FOLDER, or url: http://HOST:PORT and served_model: NAME"
            yield Violation.of(setting, self.path or self._url, rule, remedy)
        if self._url:
            yield from address_violations(self._url, f"{setting}.url")
        if self.placement not in ("inline", "ray"):
            yield Violation.of(
                f"{setting}.placement", self.placement, "must be inline or ray", "write placement: inline"
            )
        if self.dtype not in ("float32", "bfloat16"):
            yield Violation.of(f"{setting}.dtype", self.dtype, "must be float32 or bfloat16", "write dtype: float32")

    async def problem(self) -> str:
        """Return why the server cannot score, in one line; empty where it answers and has the model, or there is none."""
        if not self._url:
            return ""
        what = f"the reward model at {redact_text(self._url)}"
        async with self._client() as client:
            return await server_problem(client, what=what, model=self._served_model, api_key_env=self._api_key_env)

    async def _ask(self, client: httpx.AsyncClient, conversation: Sequence[ChatMessage]) -> float:
        body = {"model": self._served_model, "messages": list(conversation), "use_activation": False}
        where = f"the reward model at {redact_text(self._url)}"
        answer = await ask_until_answered(
            lambda: send(client, "POST", "/classify", body, timeout_s=self.timeout_s),
            where=where,
            max_retries=self._max_retries,
            timeout_s=self.timeout_s,
        )
        try:
            scores = answer["data"][0]["probs"]
            score = scores[self.label] if isinstance(scores, list) else None
            return finite_number({"score": score}, "score")
        except (KeyError, IndexError, TypeError, ValueError):
            raise EngineError(f"{where}: no score of label {self.label} in {repr(answer)[:200]}") from None

    def _client(self) -> httpx.AsyncClient:
        token = os.environ.get(self._api_key_env, "")
        learn_secrets({"token": token})
        return httpx.AsyncClient(**client_arguments(self._url.removesuffix("/v1"), token, self.timeout_s))
