"""One trajectory: ask the engine, ask the environment, append tokens, until either or the context has had enough."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from skyrl_train.errors import DeadlineError, EngineError
from skyrl_train.interfaces import InferenceEngine
from skyrl_train.rollout.chat_tokens import ChatTokens
from skyrl_train.rollout.env_boundary import Broken, EnvironmentSession, describe
from skyrl_train.seeding import derive_seed
from skyrl_train.types import (
    ChatMessage,
    FailureKind,
    GenerationOutput,
    GenerationRequest,
    Outcome,
    Prompt,
    SamplingParams,
    TokenIds,
    Trajectory,
    Turn,
    VersionRun,
    find_parent,
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where a trajectory ends if its environment does not end it."""

    max_turns: int
    max_context_length: int
    """Tokens of prompt, responses and observations together."""
    request_timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """One sample of one prompt, and what its randomness is derived from."""

    prompt: Prompt
    prompt_token_ids: TokenIds
    """The prompt's own messages as tokens, shared by its samples; used where the environment does not change them."""
    prompt_index: int
    """Index within the batch: orders requests."""
    prompt_number: int
    """Identifies the prompt in seeds, at whatever index of the batch it is."""
    sample_index: int
    sampling: SamplingParams
    teacher_token_ids: TokenIds
    """The prompt with its privileged context; empty without one."""
    seed: int
    global_step: int
    purpose: str

    def request_id(self, turn_index: int) -> str:
        return f"{self.purpose}-{self.global_step}-{self.prompt_index:06d}-{self.sample_index:04d}-{turn_index:03d}"

    def request_seed(self, turn_index: int) -> int:
        purpose = f"sample/{self.purpose}"
        return derive_seed(self.seed, purpose, self.global_step, self.prompt_number, self.sample_index, turn_index)


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What one trajectory is made with."""

    job: Job
    engine: InferenceEngine
    """Whose answers were checked."""
    session: EnvironmentSession
    """Its environment, of which each call has a deadline."""
    chat: ChatTokens
    limits: Limits


async def multi_turn(episode: Episode) -> Trajectory:
    """The agent loop `multi_turn`: generate, step, append, until environment, turns or context end it."""
    return await AgentLoop(episode).run()


class AgentLoop:
    """The state of one trajectory while it runs."""

    def __init__(self, episode: Episode) -> None:
        self._job = episode.job
        self._engine = episode.engine
        self._session = episode.session
        self._chat = episode.chat
        self._limits = episode.limits
        self._turns: list[Turn] = []

    async def run(self) -> Trajectory:
        """Return the trajectory; a failed one where the environment or the engine broke it. Other exceptions propagate."""
        try:
            outcome = await self._run_turns()
            return self._trajectory(outcome, metrics=await self._session.metrics())
        except Broken as broken:
            return self._trajectory(Outcome.FAILED, broken=broken)
        finally:
            await self._session.close()

    async def _run_turns(self) -> Outcome:
        history = await self._session.start([dict(message) for message in self._job.prompt.messages])
        prompt = self._first_prompt(history)
        while True:
            output = await self._ask_engine(prompt)
            text = self._chat.text(output.token_ids)
            result = await self._session.step(text)
            self._add_turn(prompt, output, text, result.reward)
            if result.done:
                return Outcome.DONE
            if len(self._turns) >= self._limits.max_turns:
                return Outcome.MAX_TURNS
            history = [*history, {"role": "assistant", "content": text}]
            prompt = self._chat.next_prompt(
                context=prompt,
                response=output.token_ids,
                history=history,
                observations=result.observations,
            )
            history = [*history, *result.observations]
            if self._room(prompt) < 1:
                return Outcome.CONTEXT_FULL

    def _first_prompt(self, messages: list[ChatMessage]) -> TokenIds:
        unchanged = messages == list(self._job.prompt.messages)
        prompt = self._job.prompt_token_ids if unchanged else self._chat.first_prompt(messages)
        if self._room(prompt) < 1:
            raise Broken(
                FailureKind.PROMPT_TOO_LONG,
                f"the prompt has {len(prompt)} tokens; generator.max_context_length="
                f"{self._limits.max_context_length} leaves no room for a response",
            )
        return prompt

    def _room(self, prompt: TokenIds) -> int:
        return self._limits.max_context_length - len(prompt)

    async def _ask_engine(self, prompt: TokenIds) -> GenerationOutput:
        turn_index = len(self._turns)
        sampling = self._job.sampling
        new_tokens = min(sampling.max_generate_length, self._room(prompt))
        request = GenerationRequest(
            request_id=self._job.request_id(turn_index),
            prompt_token_ids=tuple(prompt.tolist()),
            sampling=replace(sampling, max_generate_length=new_tokens),
            seed=self._job.request_seed(turn_index),
        )
        timeout_s = self._limits.request_timeout_s
        try:
            return await asyncio.wait_for(self._engine.generate(request), timeout_s)
        except EngineError as error:
            raise Broken(FailureKind.ENGINE_ERROR, describe(error)) from error
        except DeadlineError as error:
            raise Broken(FailureKind.ENGINE_TIMEOUT, describe(error)) from error
        except asyncio.TimeoutError:
            message = f"the engine did not answer within generator.request_timeout_s={timeout_s:g}"
            raise Broken(FailureKind.ENGINE_TIMEOUT, message) from None

    def _trajectory(
        self, outcome: Outcome, *, metrics: Mapping[str, float] | None = None, broken: Broken | None = None
    ) -> Trajectory:
        return Trajectory(
            prompt_uid=self._job.prompt.uid,
            sample_index=self._job.sample_index,
            turns=tuple(self._turns),
            outcome=outcome,
            failure=broken.to_failure(turn_index=len(self._turns)) if broken else None,
            metrics=metrics or {},
            teacher_prompt_token_ids=self._teacher_prompt(),
        )

    def _teacher_prompt(self) -> TokenIds:
        """Return no tokens where the environment changed the messages that the teacher's prompt was made of."""
        first = self._turns[0].added_token_ids if self._turns else ()
        unchanged = np.array_equal(first, self._job.prompt_token_ids)
        return self._job.teacher_token_ids if unchanged else self._job.teacher_token_ids[:0]

    def _add_turn(self, prompt: TokenIds, output: GenerationOutput, text: str, reward: float) -> None:
        parent, added = find_parent(self._turns, prompt)
        turn = Turn(
            parent=parent,
            added_token_ids=added,
            response_token_ids=np.array(output.token_ids, dtype=np.int32),
            response_logprobs=np.array(output.logprobs, dtype=np.float32),
            response_text=text,
            reward=reward,
            stop_reason=output.stop_reason,
            weight_versions=(VersionRun(start=0, version=output.weight_version),),
        )
        self._turns.append(turn)
