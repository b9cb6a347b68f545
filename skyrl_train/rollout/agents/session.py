"""`Session`: one trajectory of a program that asks for each answer with the whole conversation, as messages.

The longest beginning of the messages that this session has had is found again by what they say. Its tokens stay as they were
sampled: the prompt is these, and what the chat template makes of the messages that were added. What was rewritten, compacted
or split among sub-agents is told from it by the same rule, so that the turns form a tree:

    asked                           prompt                                            turn  parent
    u1                              [u1]                          -> a1               0     None
    u1 a1 u2                        [u1 a1 u2], a1 as sampled     -> a2               1     0
    u1 a1 u3                        [u1 a1 u3]                    -> a3               2     0       a fork
    u1 A1 u2                        [u1 A1 u2], all rendered      -> a4               3     None    a1 was rewritten: a root

A prompt with answers of the model whose tokens are not those that were sampled is a root, and counted. Every answer that a
program was given is one turn, however often it asked for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skyrl_train.errors import counted
from skyrl_train.interfaces import InferenceEngine
from skyrl_train.rollout.agent_loop import Episode, ask_engine, calls_in, turn_of
from skyrl_train.rollout.agents.http_server import RequestError
from skyrl_train.rollout.agents.wires import ChatReply, ChatRequest, refused, tell_once, unsupported
from skyrl_train.rollout.boundary import EnvironmentFailed, plain
from skyrl_train.rollout.checked_engine import listening
from skyrl_train.rollout.tools.formats import call_messages, recorded_calls, text_before_calls
from skyrl_train.system import WorkerThread, derive_seed
from skyrl_train.types import (
    ChatMessage,
    GenerationOutput,
    GenerationRequest,
    Outcome,
    StopReason,
    TokenIds,
    Turn,
    find_parent,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """One answer and what it answers."""

    messages: tuple[ChatMessage, ...]
    prompt: TokenIds
    output: GenerationOutput
    text: str
    """Of the whole response, without special tokens."""
    calls: tuple[Mapping[str, Any], ...] = ()
    """That were read in it, as its message has them."""


@dataclass(frozen=True, kw_only=True)
class SessionRecord:
    """What became of a session."""

    turns: tuple[Turn, ...]
    first_messages: tuple[ChatMessage, ...]
    """Of the first turn's prompt."""
    metrics: Mapping[str, float]


def tree_of(sampled: Sequence[Sampled]) -> SessionRecord:
    """Return the turns, each below the one whose prompt and response its prompt begins with, token by token.

    Of two branches the one that was asked last comes last, so that the last turn is the one that was asked last. Counted are
    `turns`; `roots`; `unmatched`, roots with answers of the model, beside the first; and `rewritten`, others that add some:
    answers that were not given here, or are not as they were.
    """
    turns: list[Turn] = []
    children: list[list[int]] = []
    num_new_answers: list[int] = []
    for each in sampled:
        parent, added = find_parent(turns, each.prompt)
        # without a reward, until there is one
        turns.append(turn_of(each.output, each.text, parent, added, reward=0.0, tool_calls=each.calls))
        children.append([])
        known = 0 if parent is None else _num_answers(sampled[parent]) + 1
        num_new_answers.append(_num_answers(each) - known)
        if parent is not None:
            children[parent].append(len(turns) - 1)
    order = _depth_first([turn.parent for turn in turns], children)
    places: dict[int | None, int | None] = {None: None, **{index: place for place, index in enumerate(order)}}
    is_root = [turn.parent is None for turn in turns]
    ordered = []
    for index in order:
        # what the first turn below one adds to it
        below = [sampled[child].messages[len(sampled[index].messages) + 1 :] for child in children[index][:1]]
        observations = below[0] if below else ()
        ordered.append(replace(turns[index], parent=places[turns[index].parent], observations=observations))
    return SessionRecord(
        turns=tuple(ordered),
        first_messages=sampled[order[0]].messages if order else (),
        metrics={
            "turns": len(turns),
            "roots": sum(is_root),
            "unmatched": sum(root and new > 0 for root, new in zip(is_root[1:], num_new_answers[1:])),
            "rewritten": sum(not root and new > 0 for root, new in zip(is_root, num_new_answers)),
        },
    )


def _depth_first(parents: Sequence[int | None], children: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices, each before those below it, and of two branches the one with the newest turn last."""
    newest = list(range(len(parents)))
    for index in reversed(range(len(parents))):
        parent = parents[index]
        if parent is not None:
            newest[parent] = max(newest[parent], newest[index])

    def newest_first(indices: Sequence[int]) -> list[int]:
        return sorted(indices, key=lambda index: -newest[index])

    order: list[int] = []
    stack = newest_first([index for index, parent in enumerate(parents) if parent is None])
    while stack:
        order.append(stack.pop())
        stack += newest_first(children[order[-1]])
    return order


def _num_answers(sampled: Sampled) -> int:
    return sum(message["role"] == "assistant" for message in sampled.messages)


DECLARED_METRICS = """
env/agent/<name> | count | Requests that an agent's program repeated, cancelled or never read; unreadable calls; means.
    | with agents (`docs/agents.md`)
env/agent/ignored/<name> | count | Requests with a sampling of their own, by what they asked for; means. | with agents
    that do
"""

_REJOIN_WITHIN_S = 5.0
"""After whoever asked has hung up: an SDK that gave up asks again by then, and gets the same answer."""
_TELLS_EVERY_S = 0.05
"""Of an answer that is streamed: how often its text is looked at."""
SAYS_SOMETHING_WITHIN_S = 10.0
"""Of a stream: after a request, or the last thing that was said. A request that is refused before has a status that says
so."""
_LONG_CHARACTERS = 1 << 16
_LANES = WorkerThread("agents-prompts"), WorkerThread("agents-long-prompts")
"""Prompts become tokens beside the event loop; short ones do not wait for the long ones of other sessions."""
_NOTHING: Mapping[str, Any] = {}
_COUNTS = ("repeated", "cancelled", "unreadable_calls")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Which request an HTTP request is: SDKs send one again where no answer came."""

    body: bytes
    """A digest of its path and its body."""
    key: str = ""
    """Its `Idempotency-Key`, where it has one."""
    attempt: int | None = None
    """How often it was sent before, where the SDK says so (`x-stainless-retry-count`)."""


class Progress:
    """What is known of an answer before it is there."""

    def __init__(self) -> None:
        self.number = 0
        """Of the answer within its session."""
        self.prompt_tokens = 0
        self.text = ""
        """Its beginning, as far as nothing that comes can change it."""
        self.changed = asyncio.Event()

    def tell(self, text: str) -> None:
        """Have more of the text. What was told before stays."""
        if text.startswith(self.text) and text != self.text:
            self.text = text
            self.changed.set()

    async def change(self) -> bool:
        """Wait until there is something new, or for long enough that something must be said; whether there is."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.changed.wait(), SAYS_SOMETHING_WITHIN_S)
        is_changed = self.changed.is_set()
        self.changed.clear()
        return is_changed


@dataclass(eq=False)
class _Completion:
    """One answer, on its way or given."""

    asked: ChatRequest
    origin: Origin
    number: int
    progress: Progress | None = None
    """What whoever asked first is told before the end."""
    heard: list[int] = field(default_factory=list)
    """Tokens of an answer that is on its way, where there is a `progress`."""
    task: asyncio.Task[ChatReply] | None = None
    num_waiting: int = 0
    is_delivered: bool = False
    draw: str = ""
    """The name of its sample of its prompt."""
    sampled: Sampled | None = None


class Session:
    """Answers a program's requests by the engine, and keeps what was sampled. Used from one event loop."""

    def __init__(self, episode: Episode, *, refuses_unsupported: bool = False) -> None:
        """`refuses_unsupported`: whether a request that asks for what is not done is refused, rather than counted."""
        self._job, self._chat, self._limits = episode.job, episode.chat, episode.limits
        self._engine: InferenceEngine = episode.engine
        self._parse_calls = episode.parse_calls
        self._in_order = asyncio.Lock()  # prompts become tokens in the order in which they are asked
        self._completions: list[_Completion] = []
        """Those that were answered, or are on their way, in the order in which they were asked for."""
        self._num_asked = 0
        self._known: dict[bytes, Sampled] = {}
        """By the digest of the conversation that ends with it."""
        self._seeds: set[str] = set()
        """Which sample of which prompt was drawn, or is being drawn."""
        self._counts: Counter[str] = Counter()
        self._ignored: Counter[str] = Counter()
        self._refuses_unsupported = refuses_unsupported
        self._is_closed = False
        self.refused: Outcome | None = None
        """Why the last request was refused, if it was for a limit of the trajectory."""
        self.broken: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """What the engine broke over, once it has: EnvironmentFailed, or what ends a run."""

    async def ask(
        self, asked: ChatRequest, origin: Origin, body: Mapping[str, Any] = _NOTHING, progress: Progress | None = None
    ) -> ChatReply:
        """Return the answer to a request, the one that was given before where it is the same request again. What its `body`
        asks for and does not get is counted, or refused. `progress` is told of the answer as it comes, where the engine says
        what it samples.

        Raises RequestError for what cannot be answered.
        """
        completion = self._find(origin)
        if completion is None:
            self._note(unsupported(body, self._job.sampling))
            completion = self._begin(asked, origin, progress)
        else:
            self._counts["repeated"] += 1
        assert completion.task is not None
        completion.num_waiting += 1
        if progress is not None:
            progress.number = completion.number
        try:
            # It goes on where one of those that wait for it gives up.
            return await asyncio.shield(completion.task)
        except asyncio.CancelledError:
            if completion.task.cancelled():
                raise RequestError("the trajectory is over", status=409, code="session_closed") from None
            raise
        except EnvironmentFailed as broken:
            raise RequestError("the engine failed, and with it the trajectory", status=500) from broken
        finally:
            completion.num_waiting -= 1
            if not completion.num_waiting and not completion.task.done():
                asyncio.get_running_loop().call_later(_REJOIN_WITHIN_S, self._give_up, completion)

    def deliver(self, answered: ChatReply) -> None:
        """The program has an answer: it is a turn of the trajectory from now on."""
        for completion in self._completions:
            if completion.number == answered.number:
                completion.is_delivered = True

    def check_size(self, characters: int) -> None:
        """Raise RequestError where a prompt has more characters than a context of the longest tokens that there are."""
        most = self._limits.max_context_length * self._chat.longest_token
        if characters > most:
            raise self._no_room(f"more than {most} characters", status=413)

    def close(self) -> None:
        """Cancel what is on its way, and refuse what comes."""
        self._is_closed = True
        for completion in self._completions:
            if completion.task is not None:
                completion.task.cancel()

    def kept(self) -> SessionRecord:
        """Return what was delivered as a tree of turns, and what was counted."""
        answered = [each for each in self._completions if each.sampled is not None]
        kept = tree_of([each.sampled for each in answered if each.is_delivered and each.sampled is not None])
        undelivered = sum(not each.is_delivered for each in answered)
        ignored = {f"ignored/{name}": count for name, count in self._ignored.items()}
        counts = {**dict.fromkeys(_COUNTS, 0), **self._counts, **ignored, **kept.metrics, "undelivered": undelivered}
        return replace(kept, metrics={f"agent/{name}": float(count) for name, count in counts.items()})

    def _find(self, origin: Origin) -> _Completion | None:
        """Return the completion that the same request began. Raises RequestError for a key that stands for another."""
        for completion in reversed(self._completions):
            is_same = completion.origin.body == origin.body
            if origin.key and completion.origin.key == origin.key:
                if not is_same:
                    raise RequestError("this Idempotency-Key came with another body before", status=409)
                return completion
            if is_same and not origin.key:
                in_flight = completion.task is not None and not completion.task.done()
                if origin.attempt or (origin.attempt is None and in_flight):
                    return completion
        return None

    def _note(self, found: Mapping[str, str]) -> None:
        """Count what a request does not get. Raises RequestError where that is refused."""
        for name, what in found.items():
            if self._refuses_unsupported:
                message = f"{what}. Leave it out, or train with generator.agent_loop.unsupported=ignore"
                raise RequestError(message, code="unsupported_parameter", param=name)
            self._ignored[name] += 1
        tell_once(found)

    def _begin(self, asked: ChatRequest, origin: Origin, progress: Progress | None) -> _Completion:
        if self._is_closed:
            raise RequestError("the trajectory is over", status=409, code="session_closed")
        try:
            plain([*asked.messages, *asked.tools], "messages and tools")
        except ValueError as error:
            raise RequestError(str(error)) from None
        self.check_size(_characters_in((asked.messages, asked.tools)))
        if len(self._completions) >= self._limits.max_turns:
            self.refused = Outcome.MAX_TURNS
            message = f"the trajectory has its generator.max_turns={self._limits.max_turns} answers"
            raise RequestError(message, code="max_turns_exceeded")
        completion = _Completion(asked=asked, origin=origin, number=self._num_asked, progress=progress)
        self._num_asked += 1
        self._completions.append(completion)
        completion.task = asyncio.ensure_future(self._complete(completion))
        completion.task.add_done_callback(lambda _: self._ended(completion))
        return completion

    def _give_up(self, completion: _Completion) -> None:
        if not completion.num_waiting and completion.task is not None and not completion.task.done():
            self._counts["cancelled"] += 1
            completion.task.cancel()
            self._forget(completion)  # at once: whoever asks again must not wait for what is on its way out

    def _ended(self, completion: _Completion) -> None:
        task = completion.task
        assert task is not None
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._forget(completion)
        if error is not None and not isinstance(error, RequestError) and not self.broken.done():
            self.broken.set_result(error)

    def _forget(self, completion: _Completion) -> None:
        """It was never answered: the same request is drawn with the same seed when it comes again."""
        if completion in self._completions:
            self._completions.remove(completion)
            self._seeds.discard(completion.draw)

    async def _complete(self, completion: _Completion) -> ChatReply:
        async with self._in_order:
            lane = _LANES[_characters_in(completion.asked.messages) > _LONG_CHARACTERS]
            prompt = await asyncio.wrap_future(lane.submit(self._prompt, completion.asked))
            seed = self._seed(prompt, completion)
        if completion.progress is not None:
            completion.progress.prompt_tokens = len(prompt)
        output = await self._generate(prompt, completion, seed)
        asked, text = completion.asked, self._chat.text(output.token_ids)
        message = self._message(completion, output, text)
        calls = recorded_calls(message.get("tool_calls", ()))
        completion.sampled = Sampled(messages=asked.messages, prompt=prompt, output=output, text=text, calls=calls)
        self._known[_digests(asked.tools, [*asked.messages, message])[-1]] = completion.sampled
        self.refused = None
        finish = "length" if output.stop_reason is StopReason.LENGTH else "stop"
        return ChatReply(
            number=completion.number,
            message=message,
            finish="tool_calls" if message.get("tool_calls") else finish,
            prompt_tokens=len(prompt),
            completion_tokens=len(output.token_ids),
        )

    def _prompt(self, asked: ChatRequest) -> TokenIds:
        """Return the tokens of what is asked. Raises RequestError where there is no room, or the template refuses."""
        digests = _digests(asked.tools, asked.messages)
        try:
            for count in range(len(asked.messages), 0, -1):
                known = self._known.get(digests[count])
                if known is not None:
                    prompt = self._chat.next_prompt(
                        context=known.prompt,
                        response=known.output.token_ids,
                        history=asked.messages[:count],
                        observations=asked.messages[count:],
                        tools=asked.tools,
                    )
                    break
            else:
                prompt = self._chat.first_prompt(asked.messages, asked.tools)
        except EnvironmentFailed as broken:
            raise refused("messages", broken.message) from broken
        if len(prompt) >= self._limits.max_context_length:
            raise self._no_room(counted(len(prompt), "token"))
        return prompt

    def _no_room(self, what: str, **how: int) -> RequestError:
        """Return the error of a prompt that leaves no room for an answer, which ends the trajectory if it is the last."""
        self.refused = Outcome.CONTEXT_FULL
        message = (
            f"the prompt has {what}; the maximum context length, generator.max_context_length="
            f"{self._limits.max_context_length}, leaves no room for an answer"
        )
        return RequestError(message, code="context_length_exceeded", param="messages", **how)

    def _seed(self, prompt: TokenIds, completion: _Completion) -> int:
        """Return the seed of the next sample of a prompt. Requests at the same time may come in any order: a seed is that of
        what is asked, and of how often it was."""
        digest = hashlib.blake2b(prompt.tobytes(), digest_size=16).hexdigest()
        ordinal = 0
        while (draw := f"{digest}/{ordinal}") in self._seeds:
            ordinal += 1
        self._seeds.add(draw)
        completion.draw = draw
        job = self._job
        return derive_seed(
            job.seed, f"agent/{job.purpose}/{draw}", job.global_step, job.prompt_number, job.sample_index
        )

    async def _generate(self, prompt: TokenIds, completion: _Completion, seed: int) -> GenerationOutput:
        sampling, asked = self._job.sampling, completion.asked
        most = min(sampling.max_generate_length, self._limits.max_context_length - len(prompt))
        request = GenerationRequest(
            request_id=self._job.request_id(completion.number),
            prompt_token_ids=tuple(prompt.tolist()),
            sampling=replace(
                sampling, max_generate_length=min(most, asked.max_tokens or most), stop=(*sampling.stop, *asked.stop)
            ),
            seed=seed,
        )
        loop = asyncio.get_running_loop()

        def hear(token_ids: Sequence[int]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, and nobody waits any more
                loop.call_soon_threadsafe(self._hear, completion, token_ids)

        with listening(hear if completion.progress is not None else None):
            return await ask_engine(self._engine, request, self._limits.request_timeout_s)

    def _hear(self, completion: _Completion, token_ids: Sequence[int]) -> None:
        """Tokens were sampled: their text is told soon, with that of those which come until then."""
        if not completion.heard:
            asyncio.get_running_loop().call_later(_TELLS_EVERY_S, self._tell, completion, 0)
        completion.heard += token_ids

    def _tell(self, completion: _Completion, num_told: int) -> None:
        if completion.progress is None or completion.task is None or completion.task.done():
            return
        if len(completion.heard) > num_told:
            completion.progress.tell(self._told_so_far(completion))
        asyncio.get_running_loop().call_later(_TELLS_EVERY_S, self._tell, completion, len(completion.heard))

    def _told_so_far(self, completion: _Completion) -> str:
        """Return the beginning of an answer's text that nothing can change which is sampled after it: no half of a
        character, nothing that a stop string may begin with, and nothing where it may turn out to be a call."""
        asked = completion.asked
        if asked.tools and self._parse_calls is not None:
            return ""
        text = self._chat.text(completion.heard).rstrip("\ufffd")
        for stop in asked.stop:
            text = text.partition(stop)[0]
        beginnings = (stop[:size] for stop in asked.stop for size in range(1, len(stop) + 1))
        held = max((len(each) for each in beginnings if text.endswith(each)), default=0)
        return text[: len(text) - held]

    def _message(self, completion: _Completion, output: GenerationOutput, text: str) -> ChatMessage:
        """Return the answer as a message: what it says before its calls, and these; or all of it, where one of them cannot
        be read. Stop strings that the request asked for, and what follows, are left out, as servers do."""
        asked = completion.asked
        calls = calls_in(output, self._chat, self._parse_calls, asked.tools)
        if any(call.error for call in calls):
            self._counts["unreadable_calls"] += 1
        elif calls:
            said = call_messages(calls, turn_index=completion.number)
            before = text_before_calls(self._chat.text_with_calls(output.token_ids))
            return {"role": "assistant", "content": before, "tool_calls": said}
        for stop in asked.stop:
            text = text.partition(stop)[0]
        return {"role": "assistant", "content": text}


def _digests(tools: Sequence[Mapping[str, Any]], messages: Sequence[ChatMessage]) -> list[bytes]:
    """Return a digest of the tools and the first 0, 1, 2 ... messages. Names and ids, which programs may change, and which
    say nothing to the model, are not in it."""
    digests = [hashlib.blake2b(_bytes_of(list(tools)), digest_size=16).digest()]
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        said = _bytes_of([message["role"], message["content"], calls])
        digests.append(hashlib.blake2b(digests[-1] + said, digest_size=16).digest())
    return digests


def _characters_in(value: object) -> int:
    """Return how many characters the texts in plain data have."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, Mapping) else value
    return sum(map(_characters_in, inner)) if isinstance(inner, Iterable) else 0


def _bytes_of(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
