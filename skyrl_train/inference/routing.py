"""Which of several engines answers a request: the one that has computed the longest beginning of its prompt, unless it
has no room for it, or much more to do than another; and what engines have answered, and how fast."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

from skyrl_train.types import GenerationOutput, GenerationRequest

DECLARED_METRICS = """
engines/cache_hits | share | Prompt tokens with cached keys and values. | where the engine says so (vLLM)
engines/balance | share | Tokens of the least busy engine over those of the busiest. | with several engines
engines/serving | count | Engines that serve. | engines on Ray
engines/requests_moved | count | Requests of dead engines, asked elsewhere. | engines on Ray
"""

_BLOCK_TOKENS = 32
_MAX_KNOWN = 1 << 16
_SLOW_FACTOR = 4.0
"""So much longer than another engine would take for all its tokens a request may stay with an engine."""
_PATIENCE_S = 10.0
"""Below which no engine is slow."""
_MEMORY = 0.9
"""What the answers before it weigh in an engine's pace when the next one comes."""


class PrefixRouter:
    """Remembers, block by block, which engine saw which beginnings. Not thread-safe."""

    def __init__(self, *, max_lead: int, room: int | None = None) -> None:
        """
        Args:
            max_lead: An engine with so many requests more than the least busy one gets no further ones.
            room: Requests that an engine computes together: one with so many gets no further ones while another has fewer.
        """
        self._max_lead, self._room = max_lead, room
        self._known: OrderedDict[int, int] = OrderedDict()

    def choose(self, token_ids: Sequence[int], load: Sequence[int], alive: Collection[int]) -> int:
        """Index of an engine in `alive` (not empty), by the prompt and the requests that each engine has in flight."""
        if self._room is not None:
            alive = [index for index in alive if load[index] < self._room] or alive
        least = min(load[index] for index in alive)
        blocks = _block_hashes(token_ids)
        for block in reversed(blocks):
            engine = self._known.get(block)
            if engine in alive and engine is not None and load[engine] - least < self._max_lead:
                break
        else:
            engine = min(alive, key=lambda index: (load[index], index))
        for block in blocks:
            self._known[block] = engine
            self._known.move_to_end(block)
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return engine

    def forget(self) -> None:
        """Everything: with new weights nothing that was computed counts."""
        self._known.clear()


class Paces:
    """Seconds that engines take for a token, by which one is found that is far slower than others. Even the longest answer
    would be there at its deadline from another one, so that long answers are not taken for slow engines."""

    def __init__(self, num_engines: int) -> None:
        self._seconds, self._tokens = [0.0] * num_engines, [0.0] * num_engines
        self._running: dict[asyncio.Future[Any], tuple[int, float, int]] = {}
        """By answer: the engine, when it was asked, and for how many tokens at most."""
        self._slow: set[int] = set()

    def begin(self, engine: int, answer: asyncio.Future[Any], max_tokens: int) -> None:
        """An engine was asked for at most so many tokens."""
        self._running[answer] = engine, time.monotonic(), max_tokens

    def end(self, answer: asyncio.Future[Any], num_tokens: int) -> None:
        """Nobody waits for the answer any more, which has so many tokens; 0 where none came."""
        engine, began, _ = self._running.pop(answer)
        if num_tokens:
            self._seconds[engine] = _MEMORY * self._seconds[engine] + time.monotonic() - began
            self._tokens[engine] = _MEMORY * self._tokens[engine] + num_tokens

    def trust_all(self) -> None:
        """Whatever was slow may be asked again."""
        self._slow.clear()

    def fit_of(self, alive: Sequence[int]) -> Sequence[int]:
        """Return those of `alive` that are not slow; all of them where each is."""
        return [engine for engine in alive if engine not in self._slow] or alive

    def overdue(self, alive: Sequence[int]) -> list[tuple[int, asyncio.Future[Any]]]:
        """Return engines and answers for which they take far longer than the median of the others would; those engines are
        slow from here on."""
        found = []
        for answer, (slow, began, max_tokens) in self._running.items():
            fit = [engine for engine in alive if engine not in self._slow | {slow} and self._tokens[engine]]
            paces = sorted(self._seconds[engine] / self._tokens[engine] for engine in fit)
            if paces:
                limit_s = _SLOW_FACTOR * max_tokens * paces[(len(paces) - 1) // 2]
                if time.monotonic() - began > max(_PATIENCE_S, limit_s):
                    self._slow.add(slow)
                    found.append((slow, answer))
        return found


class ServedTokens:
    """What engines answered since it was asked last."""

    def __init__(self, num_engines: int) -> None:
        self._tokens = [0] * num_engines
        """Of prompts and answers, by engine."""
        self._prompt_tokens = self._cached_tokens = 0
        """Of prompts of which the engine said how much it had computed before, and how much that was."""

    def add(self, engine: int, request: GenerationRequest, output: GenerationOutput) -> None:
        """Count one answer of an engine: its tokens, and those of its prompt that were cached."""
        self._tokens[engine] += len(request.prompt_token_ids) + len(output.token_ids)
        if output.num_cached_tokens is not None:
            self._prompt_tokens += len(request.prompt_token_ids)
            self._cached_tokens += output.num_cached_tokens

    def take(self) -> dict[str, float]:
        """Return `engines/cache_hits`, the share of prompt tokens whose keys and values were there, where engines say so;
        of several engines also `engines/balance`, what the least busy one served of what the busiest did."""
        served, self._tokens = self._tokens, [0] * len(self._tokens)
        prompt_tokens, cached_tokens = self._prompt_tokens, self._cached_tokens
        self._prompt_tokens = self._cached_tokens = 0
        found = {"engines/cache_hits": cached_tokens / prompt_tokens} if prompt_tokens else {}
        if len(served) > 1 and any(served):
            found["engines/balance"] = min(served) / max(served)
        return found


def _block_hashes(token_ids: Sequence[int]) -> list[int]:
    """One for each beginning of a whole number of blocks, and one for the whole prompt."""
    hashes, running = [], 0
    for start in range(0, len(token_ids), _BLOCK_TOKENS):
        running = hash((running, tuple(token_ids[start : start + _BLOCK_TOKENS])))
        hashes.append(running)
    return hashes
