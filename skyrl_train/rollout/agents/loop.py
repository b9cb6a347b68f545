"""`agent`: the agent loop in which a program asks for the turns, in place of an environment.

Session, at an address  <-  the program asks, uses tools, keeps or rewrites its history, ends, and reports a reward
the environment         <-  the program's last answer, where it reports none
Trajectory              <-  the tree of turns, and the reward on the turn that was asked last
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skyrl_train.registry import PartSpec
from skyrl_train.rollout.agent_loop import Episode
from skyrl_train.rollout.agents.endpoint import LOOPBACK, opened
from skyrl_train.rollout.agents.harness import Harness, Report
from skyrl_train.rollout.agents.session import Session
from skyrl_train.rollout.agents.turn_tree import Kept
from skyrl_train.rollout.boundary.session import Broken
from skyrl_train.types import FailureKind, Outcome, Prompt, Trajectory, Turn

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
    harness = Harness(run=run, command=command, url=url, time_limit_s=time_limit_s, launcher=launcher)
    try:
        # Its time begins when it has a place to run in, for which it may have to wait.
        async with harness.sandbox() as sandbox, opened(session, host) as address:
            played = asyncio.ensure_future(harness.play(_task_of(episode.job.prompt), address, sandbox))
            report = await _report(played, session, time_limit_s)
        return await _scored(episode, session.kept(), session.refused or Outcome.DONE, report)
    except Broken as broken:
        kept = session.kept()
        failure = broken.to_failure(turn_index=len(kept.turns))
        return replace(_trajectory(episode, kept, kept.turns, Outcome.DONE), outcome=Outcome.FAILED, failure=failure)
    finally:
        await episode.session.close()


async def _report(played: asyncio.Task[Report], session: Session, time_limit_s: float) -> Report:
    """Return what the program reports. A program that breaks over a limit of the trajectory, of which it was told last,
    reports nothing; one whose engine broke is ended. Raises Broken."""
    try:
        waited: set[asyncio.Future[Any]] = {played, session.broken}
        await asyncio.wait(waited, timeout=time_limit_s + _CLOSES_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        if session.broken.done():
            raise await session.broken
        if not played.done():
            raise Broken(FailureKind.ENVIRONMENT_TIMEOUT, "the agent did not end, nor could it be ended")
        return await played
    except Broken as broken:
        if session.refused is None or broken.kind is not FailureKind.ENVIRONMENT_ERROR:
            raise
        return Report(reward=None)
    finally:
        played.cancel()
        ended = asyncio.gather(played, return_exceptions=True)  # what it raises is nobody's concern any more
        await asyncio.wait({ended}, timeout=_CLOSES_WITHIN_S)


async def _scored(episode: Episode, kept: Kept, outcome: Outcome, report: Report) -> Trajectory:
    """Return the trajectory with the reward that was reported, or the one that the environment gives for the last answer.
    Raises Broken."""
    if not kept.turns:
        if outcome is Outcome.CONTEXT_FULL:
            limit = f"generator.max_context_length={episode.limits.max_context_length}"
            raise Broken(FailureKind.PROMPT_TOO_LONG, f"the agent's first prompt leaves no room in {limit}")
        raise Broken(FailureKind.ENVIRONMENT_ERROR, "the agent ended without an answer of the model")
    reward, metrics = report.reward, dict(report.components)
    if reward is None:
        await episode.session.start([dict(message) for message in episode.job.prompt.messages])
        reward = (await episode.session.step(kept.turns[-1].response_text)).reward
        metrics = await episode.session.metrics()
    turns = (*kept.turns[:-1], replace(kept.turns[-1], reward=reward))
    return _trajectory(episode, kept, turns, outcome, metrics)


def _trajectory(
    episode: Episode,
    kept: Kept,
    turns: tuple[Turn, ...],
    outcome: Outcome,
    metrics: Mapping[str, float] | None = None,
) -> Trajectory:
    job = episode.job
    is_prompt = bool(turns) and np.array_equal(turns[0].added_token_ids, job.prompt_token_ids)
    unchanged = kept.first_messages == job.prompt.messages
    return Trajectory(
        prompt_uid=job.prompt.uid,
        sample_index=job.sample_index,
        turns=turns,
        outcome=outcome,
        metrics={**(metrics or {}), **kept.metrics},
        first_messages=() if unchanged else kept.first_messages,
        teacher_prompt_token_ids=job.teacher_token_ids if is_prompt else job.teacher_token_ids[:0],
    )


def _task_of(prompt: Prompt) -> dict[str, Any]:
    """Return what a program is told of its task: the row, with its messages as `prompt`."""
    return {**prompt.extras, "uid": prompt.uid, "prompt": [dict(message) for message in prompt.messages]}
