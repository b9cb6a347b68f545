"""Engines of a simulated run: requests that join and leave a running batch, or go in waves, and a clock without waiting.

    continuous    requests join and leave the running batch, at most `slots` of them (vLLM)
    waves         takes what waits, and answers when the last of it has ended (hf)

Between two events an engine makes steps of decoding, whose length follows from how many sequences run and how many tokens
they have, so that an answer costs two events however long it is. What it computes for prompts comes before its next step,
or, where `batched_tokens` says so, in parts of so many tokens, each with a step of what runs. A step is no shorter than the
front end takes for its tokens.
"""

from __future__ import annotations

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyrl_train.plan.forms import EngineRates


@dataclass(frozen=True, kw_only=True)
class SimulatedTurn:
    """One request of a sample, and what its environment takes after the answer."""

    prompt_tokens: int
    """New ones: those that the engine has not computed for the turn before."""
    context_tokens: int
    """All that the request begins with."""
    response_tokens: int
    environment_s: float = 0.0


class Clock:
    """What happens next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Have `event` happen then; those of one moment happen in the order in which they were asked for."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Let time pass. Raises RuntimeError where nothing will happen any more, and it is not done."""
        while not is_done():
            if not self._events:
                raise RuntimeError("the simulated run waits for something that will never happen")
            self.now, _, event = heapq.heappop(self._events)
            event()

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass."""
        reached: list[bool] = []
        self.after(seconds, lambda: reached.append(True))
        self.run_until(lambda: bool(reached))


@dataclass(eq=False)
class Request:
    """One turn that an engine is asked for."""

    turn: SimulatedTurn
    done: Callable[[], None]
    ends_at: float = math.inf
    """In steps of its engine."""


class Engine(ABC):
    """Answers requests. Weights may change while it is `held` and idle."""

    def __init__(self, clock: Clock, rates: EngineRates) -> None:
        self.clock, self.rates = clock, rates
        self.waiting: deque[Request] = deque()
        self.num_running = 0
        self.busy_s = 0.0
        self.is_held = False

    @property
    def load(self) -> int:
        return len(self.waiting) + self.num_running

    def submit(self, request: Request) -> None:
        """A request comes."""
        self.waiting.append(request)
        self.go_on()

    def hold(self, is_held: bool) -> None:
        """Whether what waits is kept from beginning."""
        self.is_held = is_held
        self.go_on()

    @abstractmethod
    def go_on(self) -> None:
        """Begin what may begin."""


class WaveEngine(Engine):
    """Begins with what waits as soon as `leases` allow it, `slots` at a time; answers a batch when all of it has ended."""

    def __init__(self, clock: Clock, rates: EngineRates) -> None:
        super().__init__(clock, rates)
        self.leases = 0
        """Samples that are running: a wave begins when each of them waits. 0 with a stream, which announces none."""
        self._wave: deque[Request] = deque()
        self._is_due = False

    @property
    def load(self) -> int:
        return super().load + len(self._wave)

    def go_on(self) -> None:
        if not self._is_due and not self.num_running and not self.is_held:
            self._is_due = True
            self.clock.after(0.0, self._begin)  # who asks in the same moment joins

    def _begin(self) -> None:
        self._is_due = False
        if self.num_running or self.is_held:
            return
        if not self._wave:
            if not self.waiting or len(self.waiting) < self.leases:
                return
            self._wave.extend(sorted(self.waiting, key=lambda request: request.turn.context_tokens))
            self.waiting.clear()
        batch = [self._wave.popleft() for _ in range(min(self.rates.slots, len(self._wave)))]
        self.num_running = len(batch)
        seconds = batch_seconds(self.rates, [request.turn for request in batch])
        self.busy_s += seconds
        self.clock.after(seconds, lambda: self._end(batch))

    def _end(self, batch: Sequence[Request]) -> None:
        self.num_running = 0
        for request in batch:
            request.done()
        self.go_on()


def batch_seconds(rates: EngineRates, turns: Sequence[SimulatedTurn]) -> float:
    """Return how long sequences take that begin together and leave as they end."""
    responses = [turn.response_tokens for turn in turns]
    read = sum(n * turn.context_tokens + n * (n - 1) / 2 for n, turn in zip(responses, turns))
    return (
        rates.prompt_token_s * sum(turn.prompt_tokens for turn in turns)
        + rates.step_s * max(responses)
        + rates.sequence_s * sum(responses)
        + rates.context_token_s * read
    )


class ContinuousEngine(Engine):
    """Requests join and leave the running batch between two steps of decoding."""

    def __init__(self, clock: Clock, rates: EngineRates) -> None:
        super().__init__(clock, rates)
        self._running: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()
        self._steps = self._context = self._owed_s = self._as_of = 0.0
        self._schedule_number = 0
        self.is_paused = False

    def pause(self, is_paused: bool, *, recomputes: bool = False) -> None:
        """Stop between two tokens, or go on; with `recomputes` all that runs is computed again from its first token."""
        self._advance()
        self.is_paused = is_paused
        self._owed_s += recomputes * self._context * self.rates.prompt_token_s
        self._schedule()

    def go_on(self) -> None:
        self._advance()
        while self.waiting and not self.is_held and self.num_running < self.rates.slots:
            request = self.waiting.popleft()
            self._owed_s += self.rates.prompt_token_s * request.turn.prompt_tokens
            request.ends_at = self._steps + self._paying_steps() + request.turn.response_tokens
            self._context += request.turn.context_tokens
            self.num_running += 1
            heapq.heappush(self._running, (request.ends_at, next(self._numbers), request))
        self._schedule()

    def _advance(self) -> None:
        """Make the steps that fit into the time since the last event."""
        passed, self._as_of = self.clock.now - self._as_of, self.clock.now
        if self.is_paused or not self.num_running or passed <= 0:
            return
        self.busy_s += passed
        first, more = self._pace()
        steps, owed_s = self._paying_steps(), self._owed_s
        paying_s = owed_s + steps * first
        if passed < paying_s:
            steps, self._owed_s = steps * passed / paying_s, owed_s * (1 - passed / paying_s)
        else:
            self._owed_s = 0.0
            steps += _steps_in(passed - paying_s, first, more)
        self._steps += steps
        self._context += steps * self.num_running

    def _paying_steps(self) -> float:
        """The steps of what runs while prompts are computed."""
        part_s = self.rates.batched_tokens * self.rates.prompt_token_s
        return self._owed_s / part_s if part_s else 0.0

    def _pace(self) -> tuple[float, float]:
        """The seconds of the next step, and by how much each is longer than the one before."""
        rates, running = self.rates, self.num_running
        first = rates.step_s + rates.sequence_s * running + rates.context_token_s * self._context
        front = rates.front_token_s * running
        return (first, rates.context_token_s * running) if first > front else (front, 0.0)

    def _schedule(self) -> None:
        self._schedule_number += 1
        if self.is_paused or not self._running:
            return
        number, steps = self._schedule_number, max(0.0, self._running[0][0] - self._steps)
        first, more = self._pace()
        paying = self._paying_steps()
        if steps <= paying:
            seconds = (self._owed_s / paying + first) * steps if paying else self._owed_s
        else:
            seconds = self._owed_s + first * steps + more * (steps - paying) ** 2 / 2
        self.clock.after(seconds, lambda: self._tick(number))

    def _tick(self, number: int) -> None:
        if number != self._schedule_number:
            return
        self._advance()
        ended = []
        self._steps = max(self._steps, self._running[0][0])  # the next to end has ended, but for rounding
        while self._running and self._running[0][0] <= self._steps + 1e-6:
            _, _, request = heapq.heappop(self._running)
            self._context -= request.turn.context_tokens + request.turn.response_tokens
            ended.append(request)
        self.num_running -= len(ended)
        for request in ended:
            request.done()
        self.go_on()


def _steps_in(seconds: float, first: float, more: float) -> float:
    """Steps that fit into a time where the first takes `first` and each `more` than the one before."""
    if more <= 0:
        return seconds / first
    return (math.sqrt(first * first + 2 * more * seconds) - first) / more
