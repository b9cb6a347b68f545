"""`agent`: the agent loop in which a program asks for the turns, in place of an environment.

Session, at an address  <-  the program asks, uses tools, keeps or rewrites its history, ends, and reports a reward
the environment         <-  the program's last answer, where it reports none
Trajectory              <-  the tree of turns, and the reward on the turn that was asked last

A program is given a task and an address:

    run      function(task, address)               returns the reward; a coroutine function runs on a loop of its own
    command  NAME {base_url} {task_file} ...       writes the reward to {report_file}, as JSON
    url      POST {task, base_url, api_key, ...}   answers {"reward": ...}

A reward is a number, a mapping of names to numbers, whose sum it is, or nothing: then others score the trajectory. Whatever
else comes, or nothing within the time limit, is a failure with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import stat
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from skyrl_train.config.environment import RUN_SETTING, launcher_of
from skyrl_train.errors import EngineError, SandboxError
from skyrl_train.registry import PartSpec, import_attr, split_spec
from skyrl_train.rollout.agent_loop import Episode
from skyrl_train.rollout.agents.endpoint import LOOPBACK, Address, opened
from skyrl_train.rollout.agents.launchers import VARIABLES
from skyrl_train.rollout.agents.sandbox import Sandbox, filled, pool_of
from skyrl_train.rollout.agents.session import Session, SessionRecord
from skyrl_train.rollout.boundary import (
    EnvironmentFailed,
    check_components,
    check_reward,
    describe,
    environment_error,
    invalid_reward,
)
from skyrl_train.rollout.http import UnreadableReply, client_arguments, send
from skyrl_train.system import WorkerThread, find_programs
from skyrl_train.system.files import json_line, parse_json
from skyrl_train.types import FailureKind, Outcome, Trajectory

_MAX_REPORT_BYTES = 1 << 20
_HARMLESS = ("PATH", "LANG", "LANGUAGE", "TZ", "TERM")
"""What a command that does not inherit the trainer's environment has of it."""
_SOURCE = "the agent"
Report = tuple[float | None, Mapping[str, float]]
"""The reward of a trajectory, None where a program says nothing, and what it is the sum of, by name."""


def _failed(reason: str) -> EnvironmentFailed:
    return environment_error(f"{_SOURCE}: {reason}")


async def _call(spec: PartSpec, task: Mapping[str, Any], address: Address) -> object:
    """Call a function on a thread of its own, which a call that hangs keeps until the process ends."""
    target, arguments = split_spec(spec)
    function: Any = functools.partial(_imported(target), **arguments)
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
    is_given_up = threading.Event()

    async def awaited(result: Awaitable[object]) -> object:
        current = asyncio.current_task()
        assert current is not None
        running.append((asyncio.get_running_loop(), current))
        if is_given_up.is_set():  # before it began
            raise asyncio.CancelledError
        return await result

    def call() -> tuple[object, str]:
        try:
            result = function(dict(task), address)
            return (asyncio.run(awaited(result)) if inspect.isawaitable(result) else result), ""
        except BaseException as error:  # whatever it is, it ends this trajectory and nothing else
            return None, describe(error)

    thread = WorkerThread("agent")
    called = thread.submit(call)
    try:
        value, reason = await asyncio.wrap_future(called)
    except asyncio.CancelledError:
        is_given_up.set()
        for loop, current in running:
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(current.cancel)
        raise
    finally:
        thread.close(0.0)
    if reason:
        raise _failed(reason)
    return value


@functools.cache
def _imported(target: str) -> Callable[..., object]:
    """Return the function of a target, imported once in a process. Raises ConfigError."""
    function: Any = import_attr(target, field=RUN_SETTING)
    return function  # type: ignore[no-any-return]


async def _execute(
    command: Sequence[str], task: Mapping[str, Any], address: Address, time_limit_s: float, sandbox: Sandbox
) -> object:
    """Run a command in a sandbox, which is removed with all that is left of it by whoever owns it."""
    launcher = sandbox.launcher
    task_file, report_file = sandbox.folder / "task.json", sandbox.folder / "report.json"
    task_file.write_bytes(json_line(task))
    values = {
        "name": sandbox.name,
        "base_url": _as_seen_inside(address.base_url, launcher.host_inside),
        "session_url": _as_seen_inside(address.session_url, launcher.host_inside),
        "api_key": address.api_key,
        "model": address.model,
        "task_file": str(task_file),
        "report_file": str(report_file),
        "folder": str(sandbox.folder),
        "time_limit_s": f"{time_limit_s:g}",
    }
    inherited: Mapping[str, str] = os.environ
    if not launcher.inherits:
        inherited = {name: value for name, value in os.environ.items() if name in _HARMLESS or name.startswith("LC_")}
        inherited = {**inherited, "HOME": values["folder"]}
    own = command if launcher.enter or launcher.start else find_programs(command)  # a sandbox has files of its own
    words = [filled(word, values) for word in (*launcher.enter, *own)]
    try:
        status = await sandbox.run(words, {**inherited, **_variables(values)})
    except SandboxError as error:
        raise _failed(str(error)) from error
    if status != 0:
        manner = f"ended with exit status {status}" if status > 0 else f"was ended by signal {-status}"
        raise _failed(f"the command {manner}: {sandbox.last_words()}")
    return _read_report(report_file)


def _as_seen_inside(url: str, host_inside: str) -> str:
    if not host_inside:
        return url
    parts = urlsplit(url)
    host = f"[{host_inside}]" if ":" in host_inside else host_inside
    return parts._replace(netloc=f"{host}:{parts.port}").geturl()


def _variables(values: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that SDKs read by themselves, so that an unmodified program finds its model."""
    base_url, api_key = values["base_url"], values["api_key"]
    told = [base_url, api_key, base_url.removesuffix("/v1"), api_key]
    told += [values[name] for name in ("session_url", "task_file", "report_file")]
    return dict(zip(VARIABLES, told))


def _read_report(path: Path) -> object:
    """Return the reward that a file holds; None where there is no file. What is no file, but leads to one of this machine
    or waits for a writer, is not followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError("it is something else")
            with open(descriptor, "rb", closefd=False) as file:
                text = file.read(_MAX_REPORT_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise invalid_reward(f"{_SOURCE}: its report is no file ({describe(error)})") from error
    try:
        if len(text) > _MAX_REPORT_BYTES:
            raise ValueError(f"more than {_MAX_REPORT_BYTES} bytes")
        return _reward_in(parse_json(text))
    except ValueError as error:
        raise invalid_reward(f"{_SOURCE}: its report is {error}") from error


def _reward_in(value: object) -> object:
    return value["reward"] if isinstance(value, dict) and "reward" in value else value


async def _ask_service(url: str, task: Mapping[str, Any], address: Address, time_limit_s: float) -> object:
    """Return the reward that a service answers."""
    told = {
        "task": parse_json(json_line(task)),
        "base_url": address.base_url,
        "session_url": address.session_url,
        "api_key": address.api_key,
        "model": address.model,
        "time_limit_s": time_limit_s,
    }
    try:
        async with httpx.AsyncClient(**client_arguments(url, "", time_limit_s)) as client:
            reply = await send(client, "POST", url, told, timeout_s=time_limit_s, most=_MAX_REPORT_BYTES)
        if reply.status != 200:
            raise _failed(f"the service answered with status {reply.status}: {reply.beginning}")
        answer = reply.json()
    except httpx.ReadTimeout as error:  # one that cannot be reached has not begun, and failed
        raise asyncio.TimeoutError from error
    except (httpx.HTTPError, EngineError, UnreadableReply) as error:
        raise _failed(f"the service failed ({describe(error)})") from error
    if not isinstance(answer, dict) or "reward" not in answer:
        raise _failed(f"the service answered {reply.beginning!r:.100}, which has no 'reward'; null is none")
    return _reward_in(answer)


_CLOSES_WITHIN_S = 30.0
"""Behind its time limit, until what a program left is ended."""


async def agent(
    episode: Episode,
    *,
    run: PartSpec | None = None,
    command: Sequence[str] = (),
    url: str = "",
    time_limit_s: float = 600.0,
    host: str = LOOPBACK,
    unsupported: str = "ignore",
    launcher: PartSpec | None = None,
) -> Trajectory:
    """Return the trajectory of a program; a failed one where the program, the engine or what scores it broke.

    Args:
        run: A function, `package.module:function`, called with the task and the address of the model.
        command: Words of a command; {base_url}, {session_url}, {api_key}, {model}, {task_file}, {report_file}, {folder}
            and {time_limit_s} are filled in.
        url: Of a service that is asked to play the task.
        time_limit_s: Of one program.
        host: Where the endpoint listens. Other machines need an address of this one.
        unsupported: Whether a request that asks for another temperature, and the like, is answered all the same (`ignore`,
            and counted), or gets an error (`refuse`).
        launcher: What a command runs in: docker, podman, bubblewrap, a template or another one, with its arguments.
    """
    session = Session(episode, refuses_unsupported=unsupported == "refuse")
    try:
        # Its time begins when it has a place to run in, for which it may have to wait.
        async with _sandbox(command, launcher) as sandbox, opened(session, host) as address:
            prompt = episode.job.prompt
            task = {**prompt.extras, "uid": prompt.uid, "prompt": [dict(message) for message in prompt.messages]}
            if run is not None:
                playing = _call(run, task, address)
            elif sandbox is not None:
                playing = _execute(command, task, address, time_limit_s, sandbox)
            else:
                playing = _ask_service(url, task, address, time_limit_s)
            report = await _report(playing, session, time_limit_s)
        return await _scored(episode, session.kept(), session.refused or Outcome.DONE, report)
    except EnvironmentFailed as broken:
        kept = session.kept()
        turns, first = kept.turns, kept.first_messages
        return episode.job.trajectory(turns, Outcome.FAILED, first, kept.metrics, broken=broken)
    finally:
        await episode.session.close()


@contextlib.asynccontextmanager
async def _sandbox(command: Sequence[str], launcher: PartSpec | None) -> AsyncIterator[Sandbox | None]:
    """Yield the sandbox that a command is to run in, once there is one; None for other programs. Raises
    EnvironmentFailed."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            pool = pool_of(launcher_of(launcher)) if command else None
            sandbox = None if pool is None else await stack.enter_async_context(pool.sandbox())
        except SandboxError as error:
            raise _failed(str(error)) from error
        yield sandbox


async def _report(playing: Coroutine[Any, Any, object], session: Session, time_limit_s: float) -> Report:
    """Return what a program reports. One that breaks over a limit of the trajectory, of which it was told last, reports
    nothing; one whose engine broke is ended. Raises EnvironmentFailed: environment_error where it failed,
    environment_timeout where it did not end in time, invalid_reward."""
    played = asyncio.ensure_future(asyncio.wait_for(playing, time_limit_s))
    try:
        waited: set[asyncio.Future[Any]] = {played, session.broken}
        await asyncio.wait(waited, timeout=time_limit_s + _CLOSES_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        if session.broken.done():
            raise await session.broken
        if not played.done():
            raise EnvironmentFailed(FailureKind.ENVIRONMENT_TIMEOUT, "the agent did not end, nor could it be ended")
        value = await played
        components = check_components(value, source=_SOURCE)
        total = sum(components.values()) if components else value
        return (None if value is None else check_reward(total, source=_SOURCE)), components
    except asyncio.TimeoutError:
        message = f"{_SOURCE} did not end within its time_limit_s={time_limit_s:g}"
        raise EnvironmentFailed(FailureKind.ENVIRONMENT_TIMEOUT, message) from None
    except EnvironmentFailed as broken:
        if session.refused is None or broken.kind is not FailureKind.ENVIRONMENT_ERROR:
            raise
        return None, {}
    finally:
        played.cancel()
        ended = asyncio.gather(played, return_exceptions=True)  # what it raises is nobody's concern any more
        await asyncio.wait({ended}, timeout=_CLOSES_WITHIN_S)


async def _scored(episode: Episode, kept: SessionRecord, outcome: Outcome, report: Report) -> Trajectory:
    """Return the trajectory with the reward that was reported, or the one that the environment gives for the last answer.
    Raises EnvironmentFailed."""
    if not kept.turns:
        if outcome is Outcome.CONTEXT_FULL:
            limit = f"generator.max_context_length={episode.limits.max_context_length}"
            raise EnvironmentFailed(FailureKind.PROMPT_TOO_LONG, f"the agent's first prompt leaves no room in {limit}")
        raise environment_error("the agent ended without an answer of the model")
    reward, metrics = report
    if reward is None:
        await episode.session.start([dict(message) for message in episode.job.prompt.messages])
        reward = (await episode.session.step(kept.turns[-1].response_text)).reward
        metrics = await episode.session.metrics()
    turns = (*kept.turns[:-1], replace(kept.turns[-1], reward=reward))
    return episode.job.trajectory(turns, outcome, kept.first_messages, {**metrics, **kept.metrics})
