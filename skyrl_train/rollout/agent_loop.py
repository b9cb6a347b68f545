"""One trajectory: ask the engine, ask the environment, append tokens, until either or the context has had enough."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skyrl_train.errors import DeadlineError, EngineError, counted
from skyrl_train.images import ImageSpans, between
from skyrl_train.interfaces import InferenceEngine
from skyrl_train.rollout.boundary import EnvironmentFailed, StepResult, ToolResult, describe, environment_error
from skyrl_train.rollout.boundary.session import EnvironmentSession
from skyrl_train.rollout.chat_tokens import ChatTokens
from skyrl_train.rollout.tools.formats import UNREADABLE, Calls, ToolCall, ToolParser, call_messages, recorded_calls
from skyrl_train.rollout.tools.toolbox import Schema
from skyrl_train.system import derive_seed
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
    find_parent,
    new_routing,
)

DECLARED_METRICS = """
tools/{calls,failed,malformed} | count | Tool calls of a trajectory, failed ones, unreadable ones: means. | with
    `environment.tools` | TRL `tools/call_frequency`, `tools/failure_frequency` (of the calls)
"""


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
    configured_tools: tuple[Schema, ...] = ()
    """`environment.tools`, as chat templates take them."""
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

    @property
    def tools(self) -> tuple[Schema, ...]:
        """What `prompt_token_ids` offers the model to call: what its row says, else all that is configured."""
        return self.prompt.tools or self.configured_tools

    @property
    def name(self) -> str:
        """What tells the trajectory from all others of the run."""
        return f"{self.purpose}-{self.global_step}-{self.prompt_index:06d}-{self.sample_index:04d}"

    def request_id(self, turn_index: int) -> str:
        return f"{self.name}-{turn_index:03d}"

    def request_seed(self, turn_index: int) -> int:
        purpose = f"sample/{self.purpose}"
        return derive_seed(self.seed, purpose, self.global_step, self.prompt_number, self.sample_index, turn_index)

    def trajectory(
        self,
        turns: Sequence[Turn],
        outcome: Outcome,
        first_messages: tuple[ChatMessage, ...],
        metrics: Mapping[str, float] | None = None,
        broken: EnvironmentFailed | None = None,
    ) -> Trajectory:
        """Return the sample: `first_messages` are those of its first prompt, `broken` what it failed over."""
        # The teacher's prompt was made of the row's messages: it has none where others came first.
        is_prompt = bool(turns) and np.array_equal(turns[0].added_token_ids, self.prompt_token_ids)
        return Trajectory(
            prompt_uid=self.prompt.uid,
            sample_index=self.sample_index,
            turns=tuple(turns),
            outcome=outcome,
            failure=broken.to_failure(turn_index=len(turns)) if broken else None,
            metrics=metrics or {},
            first_messages=() if first_messages == self.prompt.messages else first_messages,
            teacher_prompt_token_ids=self.teacher_token_ids if is_prompt else self.teacher_token_ids[:0],
        )


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What one trajectory is made with."""

    job: Job
    engine: InferenceEngine
    """It answers with what was checked (`checked_engine.py`)."""
    session: EnvironmentSession
    """Its environment, of which each call has a deadline."""
    chat: ChatTokens
    limits: Limits
    parse_calls: ToolParser | None = None
    """Reads the calls in a response; None where no format is known."""


async def ask_engine(engine: InferenceEngine, request: GenerationRequest, timeout_s: float) -> GenerationOutput:
    """Return the engine's answer. Raises EnvironmentFailed where it breaks, or does not answer in time."""
    try:
        return await asyncio.wait_for(engine.generate(request), timeout_s)
    except EngineError as error:
        raise EnvironmentFailed(FailureKind.ENGINE_ERROR, describe(error)) from error
    except DeadlineError as error:
        raise EnvironmentFailed(FailureKind.ENGINE_TIMEOUT, describe(error)) from error
    except asyncio.TimeoutError:
        message = f"the engine did not answer within generator.request_timeout_s={timeout_s:g}"
        raise EnvironmentFailed(FailureKind.ENGINE_TIMEOUT, message) from None


def calls_in(output: GenerationOutput, chat: ChatTokens, parse: ToolParser | None, tools: Sequence[Schema]) -> Calls:
    """Return the calls of tools in an answer; one that cannot be read where the parser breaks over it."""
    if not tools or parse is None:
        return ()
    try:
        return parse(chat.text_with_calls(output.token_ids), tools)
    except Exception as error:  # of any kind: parsers are code of others, or recurse as deep as the model nests
        return (ToolCall(name=UNREADABLE, error=describe(error)),)


def turn_of(output: GenerationOutput, text: str, parent: int | None, added: TokenIds, **facts: Any) -> Turn:
    """Return the turn in which `output`, whose response is `text`, was sampled after a prompt that adds `added` to `parent`;
    `facts` are further fields of it."""
    return Turn(
        parent=parent,
        added_token_ids=added,
        response_token_ids=np.array(output.token_ids, dtype=np.int32),
        response_logprobs=np.array(output.logprobs, dtype=np.float32),
        response_text=text,
        stop_reason=output.stop_reason,
        weight_versions=output.weight_versions,
        routed_experts=new_routing(output.routed_experts, parent, added, len(output.token_ids)),
        **facts,
    )


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
        self._parse_calls = episode.parse_calls
        self._tools: tuple[Schema, ...] = ()
        self._counts = dict.fromkeys(("tools/calls", "tools/failed", "tools/malformed"), 0.0)
        self._first_messages: tuple[ChatMessage, ...] = ()
        self._turns: list[Turn] = []
        self._images: ImageSpans = ()
        """Those of the prompt that is asked now."""

    async def run(self) -> Trajectory:
        """Return the trajectory; a failed one where the environment or the engine broke it. Other exceptions propagate."""
        try:
            outcome = await self._run_turns()
            metrics = await self._session.metrics()
            metrics = {**metrics, **self._counts} if self._tools else metrics
            return self._job.trajectory(self._turns, outcome, self._first_messages, metrics)
        except EnvironmentFailed as broken:
            return self._job.trajectory(self._turns, Outcome.FAILED, self._first_messages, broken=broken)
        finally:
            await self._session.close()

    async def _run_turns(self) -> Outcome:
        first = await self._session.start([dict(message) for message in self._job.prompt.messages])
        history = self._chat.with_references(first)
        prompt = self._first_prompt(history)
        self._images = self._chat.images_in(prompt, history)
        while True:
            output = await self._ask_engine(prompt)
            text = self._chat.text(output.token_ids)
            is_last = len(self._turns) + 1 >= self._limits.max_turns
            # A call that nobody would read the result of is an answer, which the environment scores.
            calls = () if is_last else calls_in(output, self._chat, self._parse_calls, self._tools)
            said_calls = call_messages(calls, turn_index=len(self._turns))
            result = await self._answer_to(text, calls, said_calls)
            result = replace(result, observations=self._chat.with_references(result.observations))
            told = [{**said, "error": call.error} if call.error else said for call, said in zip(calls, said_calls)]
            self._add_turn(prompt, output, text, result, told)
            if result.done:
                return Outcome.TRUNCATED if result.truncated else Outcome.DONE
            if is_last:
                if self._session.plays_itself:
                    await self._score_as_cut(text)
                return Outcome.MAX_TURNS
            said: ChatMessage = {"role": "assistant", "content": text}
            history = [*history, {**said, "tool_calls": said_calls} if calls else said]
            before = np.concatenate([prompt, np.array(output.token_ids, dtype=np.int32)])
            prompt = self._chat.next_prompt(
                context=prompt,
                response=output.token_ids,
                history=history,
                observations=result.observations,
                tools=self._tools,
            )
            history = [*history, *result.observations]
            if np.array_equal(prompt[: len(before)], before):
                said_now = self._chat.images_in(prompt, result.observations, start=len(before))
                self._images = (*self._images, *said_now)
            else:
                self._images = self._chat.images_in(prompt, history)
            if self._room(prompt) < 1:
                if calls or self._session.plays_itself:
                    await self._score_as_cut(text)
                return Outcome.CONTEXT_FULL

    async def _score_as_cut(self, text: str) -> None:
        """Add to the last turn, whose response is `text`, what the environment gives for a trajectory that ends there."""
        cut = await self._session.cut(text)
        self._turns[-1] = replace(self._turns[-1], reward=self._turns[-1].reward + cut.reward)

    async def _answer_to(self, text: str, calls: Calls, said: Sequence[ChatMessage]) -> StepResult:
        """Return what the environment answers to a response, or the tools that it calls."""
        if not calls:
            return await self._session.step(text)
        self._counts["tools/calls"] += len(calls)
        self._counts["tools/malformed"] += sum(bool(call.error) for call in calls)
        if not self._session.plays_itself:
            return await self._use_tools(calls, said)
        # What cannot be read as a mapping is told to the model by the environment, which runs the others.
        asked = [
            {"id": message["id"], "name": call.name, "arguments": call.error or dict(call.arguments)}
            for call, message in zip(calls, said)
        ]
        return await self._session.step(text, asked)

    async def _use_tools(self, calls: Calls, said: Sequence[ChatMessage]) -> StepResult:
        """Return what the tools answer, as an environment's answer without a reward; `said` are the calls as messages hold
        them."""
        offered = [tool["function"]["name"] for tool in self._tools]
        known = [call for call in calls if not call.error and call.name in offered]
        run = await self._session.use_tools([{"name": call.name, "arguments": dict(call.arguments)} for call in known])
        results = iter(run)
        observations: list[ChatMessage] = []
        for call, message in zip(calls, said):
            if call.error:
                result = ToolResult(content=f"Error: this is no call of a tool: {call.error}", failed=False)
            elif call.name not in offered:
                content = f"Error: there is no tool {call.name!r}; there are {', '.join(offered)}"
                result = ToolResult(content=content, failed=True)
            else:
                result = next(results)
            self._counts["tools/failed"] += result.failed
            answer = {"role": "tool", "tool_call_id": message["id"], "name": call.name, "content": result.content}
            observations.append(answer)
        return StepResult(observations=observations, reward=0.0, done=False)

    def _offered(self) -> tuple[Schema, ...]:
        """Return what the model may call: what its row says, else all that is configured and the environment's own."""
        own = self._session.own_tools
        if own and self._parse_calls is None:
            rule = "it has tools, and the chat template writes calls in no format that is known"
            raise environment_error(f"{rule}: set environment.tool_format")
        if not self._job.prompt.tools:
            return (*self._job.tools, *own)
        known = {tool["function"]["name"] for tool in (*self._job.configured_tools, *own)}
        missing = [name for tool in self._job.tools if (name := tool["function"]["name"]) not in known]
        if missing:
            raise environment_error(
                f"the row offers the tool {missing[0]!r}, which is neither one of environment.tools nor the environment's "
                f"own; there are {', '.join(sorted(known)) or 'none'}"
            )
        return self._job.tools

    def _first_prompt(self, messages: list[ChatMessage]) -> TokenIds:
        unchanged = messages == list(self._job.prompt.messages)
        self._first_messages = tuple(messages)
        self._tools = self._offered()
        if unchanged and self._tools == self._job.tools:
            prompt = self._job.prompt_token_ids
        else:
            prompt = self._chat.first_prompt(messages, self._tools)
        if self._room(prompt) < 1:
            raise EnvironmentFailed(
                FailureKind.PROMPT_TOO_LONG,
                f"the prompt has {counted(len(prompt), 'token')}; generator.max_context_length="
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
            images=self._images,
        )
        return await ask_engine(self._engine, request, self._limits.request_timeout_s)

    def _add_turn(
        self,
        prompt: TokenIds,
        output: GenerationOutput,
        text: str,
        result: StepResult,
        calls: Sequence[Mapping[str, object]],
    ) -> None:
        parent, added = find_parent(self._turns, prompt, self._images)
        facts = {
            "reward": result.reward,
            "observations": tuple(result.observations),
            "tool_calls": recorded_calls(calls),
            "images": between(self._images, len(prompt) - len(added), len(prompt)),
        }
        self._turns.append(turn_of(output, text, parent, added, **facts))
