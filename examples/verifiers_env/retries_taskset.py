"""Sums of two numbers with a second attempt: an environment of verifiers 0.4 that talks with the model."""

from __future__ import annotations

import verifiers.v1 as vf
from sums_taskset import SumTaskset


class RetriesConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()


class RetriesEnv(vf.Env[RetriesConfig]):
    """Says "wrong" after a wrong answer, once."""

    async def run(self, task, agents):
        async with agents.solver.interaction(task) as talk:
            answer = await talk.turn()
            if not answer.terminated and answer.last_reply.split()[-1:] != [task.data.answer]:
                await talk.turn("wrong")


class RetriesTaskset(SumTaskset):
    """The same tasks and rewards, of the last answer."""


__all__ = ["RetriesEnv", "RetriesTaskset"]
