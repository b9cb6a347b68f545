"""Runs environments beside the event loop: daemon threads, a deadline for each call, one boundary for what breaks.

A call that exceeds its deadline cannot be killed. Its thread is abandoned (it is a daemon, so it does not keep the
interpreter alive), a new one takes its place when there is work, and the environment is closed on the abandoned thread
should the call ever return: two threads never use one environment at once.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, SupportsFloat, TypeVar

from skyrl_train.interfaces import Environment
from skyrl_train.types import ChatMessage, Failure, FailureKind

T = TypeVar("T")


class Broken(Exception):
    """A guarded call (environment or engine) broke one trajectory. Raised at the boundary, caught by the agent loop.

    Whatever else is raised in the loop is a programming error and propagates.
    """

    def __init__(self, kind: FailureKind, message: str):
        super().__init__(message)
        self.kind = kind
        self.message = message

    def to_failure(self, turn_index: int) -> Failure:
        return Failure(kind=self.kind, message=self.message, turn_index=turn_index)


def describe(error: BaseException) -> str:
    """Describe an error as `ValueError: unknown city 'Oz'`, in one line of at most 500 characters."""
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= 500 else line[:497] + "..."


class _Call(Generic[T]):
    """One function to run on a worker and where its result goes."""

    def __init__(self, function: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self.function = function
        self.loop = loop
        self.future: asyncio.Future[T] = loop.create_future()

    def run(self) -> None:
        try:
            result = self.function()
        except BaseException as error:
            self._deliver(self._set_exception, error)
        else:
            self._deliver(self._set_result, result)

    def _deliver(self, setter: Callable[[Any], None], value: object) -> None:
        # The loop may be closed by the time an abandoned call returns: nobody waits for it then.
        if not self.loop.is_closed():
            try:
                self.loop.call_soon_threadsafe(setter, value)
            except RuntimeError:
                return

    def _set_result(self, result: T) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def _set_exception(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error if isinstance(error, Exception) else RuntimeError(describe(error)))


class _Worker:
    """A daemon thread with its own queue; None ends it."""

    def __init__(self, name: str) -> None:
        self.calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (run := self.calls.get()) is not None:
            run()


class EnvRunner:
    """At most `max_workers` environment calls at a time, each with `timeout_s` from when it starts to run.

    Use from one event loop. `num_abandoned` counts the threads given up, `num_close_failures` the environments whose
    `close` raised or hung (which loses nothing of the trajectory).
    """

    def __init__(self, *, max_workers: int, timeout_s: float) -> None:
        self._slots = asyncio.Semaphore(max_workers)
        self._idle: list[_Worker] = []
        self._timeout_s = timeout_s
        self._num_started = 0
        self.num_abandoned = 0
        self.num_close_failures = 0

    async def call(self, function: Callable[[], T], *, what: str, if_late: Callable[[], object] | None = None) -> T:
        """Runs `function` on a thread.

        `if_late` runs on that thread after a call that exceeded its deadline returned at last. Raises what `function`
        raises, or Broken (environment_timeout) naming `what`.
        """
        async with self._slots:
            worker = self._idle.pop() if self._idle else self._new_worker()
            call: _Call[T] = _Call(function, asyncio.get_running_loop())
            worker.calls.put(call.run)
            deadline = call.loop.call_later(self._timeout_s, self._expire, call, what)
            try:
                result = await call.future
            except (_DeadlineExceeded, asyncio.CancelledError) as error:
                self._abandon(worker, if_late)
                if isinstance(error, _DeadlineExceeded):
                    raise Broken(FailureKind.ENVIRONMENT_TIMEOUT, str(error)) from None
                raise
            except BaseException:
                self._idle.append(worker)
                raise
            finally:
                deadline.cancel()
            self._idle.append(worker)
            return result

    def close(self) -> None:
        """Ends the idle threads."""
        while self._idle:
            self._idle.pop().calls.put(None)

    def _new_worker(self) -> _Worker:
        self._num_started += 1
        return _Worker(name=f"environment-{self._num_started}")

    def _expire(self, call: _Call[Any], what: str) -> None:
        if not call.future.done():
            call.future.set_exception(_DeadlineExceeded(f"{what} did not answer within {self._timeout_s:g} s"))

    def _abandon(self, worker: _Worker, if_late: Callable[[], object] | None) -> None:
        self.num_abandoned += 1
        if if_late is not None:
            worker.calls.put(_Quietly(if_late))
        worker.calls.put(None)


class _DeadlineExceeded(Exception):
    """Internal: distinguished from a TimeoutError that the environment itself raised."""


class _Quietly:
    """Runs a clean-up whose result nobody waits for."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def __call__(self) -> None:
        try:
            self._function()
        except BaseException:
            return


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """An environment's answer to one response, checked."""

    observations: list[ChatMessage]
    reward: float
    """Finite."""
    done: bool


class EnvironmentSession:
    """One environment for one trajectory. Each method raises Broken where the environment breaks, and only then."""

    def __init__(self, runner: EnvRunner, make: Callable[[], Environment], name: str) -> None:
        self._runner = runner
        self._make = make
        self._name = name
        self._environment: Environment | None = None
        self._abandoned = False

    async def start(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """Constructs and initialises. Returns the first messages for the model."""
        await self._guard(self._construct, "construction")
        result = await self._guard(lambda: self._environment_or_fail().init(messages), "init")
        if not isinstance(result, tuple) or len(result) != 2:
            raise Broken(
                FailureKind.ENVIRONMENT_ERROR,
                f"{self._name}.init returned {type(result).__name__}; must be (messages, information)",
            )
        first = check_messages(result[0], source=f"{self._name}.init")
        if not first:
            raise Broken(FailureKind.INVALID_OBSERVATION, f"{self._name}.init returned no message")
        return first

    async def step(self, action: str) -> StepResult:
        output = await self._guard(lambda: self._environment_or_fail().step(action), "step")
        return check_step(output, source=f"{self._name}.step")

    async def metrics(self) -> dict[str, float]:
        """Return the environment's own finite numbers; everything else in `get_metrics` is left out."""
        metrics = await self._guard(lambda: self._environment_or_fail().get_metrics(), "get_metrics")
        return numbers_only(metrics)

    async def close(self) -> None:
        """Close the environment: always attempted; never raises. After a call that hung, `close` waits on the abandoned
        thread instead.
        """
        if self._environment is None or self._abandoned:
            return
        environment, self._environment = self._environment, None
        try:
            await self._runner.call(environment.close, what=f"{self._name}.close")
        except Exception:
            # The rewards are in: a failing clean-up loses nothing of the trajectory, so it is counted, not raised.
            self._runner.num_close_failures += 1

    def _construct(self) -> None:
        # Kept from the thread itself, so that one whose construction came too late is closed all the same.
        self._environment = self._make()

    def _environment_or_fail(self) -> Environment:
        if self._environment is None:
            raise RuntimeError("the environment was used before it was started or after it was closed")
        return self._environment

    def _close_late(self) -> None:
        if self._environment is not None:
            self._environment.close()

    async def _guard(self, function: Callable[[], T], method: str) -> T:
        try:
            return await self._runner.call(function, what=f"{self._name}.{method}", if_late=self._close_late)
        except (Broken, asyncio.CancelledError):
            self._abandoned = True
            raise
        except Exception as error:
            raise Broken(FailureKind.ENVIRONMENT_ERROR, describe(error)) from error


def check_messages(value: object, *, source: str) -> list[ChatMessage]:
    """Return a list of chat messages, or raise Broken (invalid_observation) saying what is wrong with it."""
    if not isinstance(value, (list, tuple)):
        raise Broken(FailureKind.INVALID_OBSERVATION, f"{source} returned {type(value).__name__}; must be a list")
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise Broken(
                FailureKind.INVALID_OBSERVATION,
                f"{source}: message {index} is {_short(message)}; must have 'role' and 'content'",
            )
        if message["content"] is not None and not isinstance(message["content"], (str, list)):
            raise Broken(
                FailureKind.INVALID_OBSERVATION,
                f"{source}: the content of message {index} is {type(message['content']).__name__}; must be text",
            )
    return list(value)


def check_step(output: object, *, source: str) -> StepResult:
    """Return the fields of a step's answer, or raise Broken naming the one that is wrong."""
    if not isinstance(output, Mapping):
        kind = type(output).__name__
        raise Broken(FailureKind.ENVIRONMENT_ERROR, f"{source} returned {kind}; must be a mapping")
    if "done" not in output:
        raise Broken(FailureKind.ENVIRONMENT_ERROR, f"{source} returned no 'done'; it has {sorted(map(str, output))}")
    done = bool(output["done"])
    reward = check_reward(output.get("reward"), source=source)
    observations = output.get("observations")
    if done and observations is None:
        observations = []
    return StepResult(observations=check_messages(observations, source=source), reward=reward, done=done)


def check_reward(value: object, *, source: str) -> float:
    """Return `value` as a finite float (numpy scalars and booleans are fine), or raise Broken (invalid_reward)."""
    try:
        if isinstance(value, SupportsFloat) and math.isfinite(reward := float(value)):
            return reward
    except (TypeError, ValueError, OverflowError):
        pass
    raise Broken(FailureKind.INVALID_REWARD, f"{source} returned the reward {_short(value)}; must be a finite number")


def numbers_only(metrics: object) -> dict[str, float]:
    """Return the finite numbers among an environment's metrics."""
    if not isinstance(metrics, Mapping):
        return {}
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, SupportsFloat) and math.isfinite(number := float(value)):
                numbers[str(name)] = number
        except (TypeError, ValueError, OverflowError):
            continue
    return numbers


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
