"""Sums of two numbers, as verifiers 0.4 has them."""

from __future__ import annotations

import random

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def exact(self, trace) -> float:
        return float(trace.last_reply.split()[-1:] == [self.data.answer])

    @vf.reward(weight=0.25)
    async def brief(self, trace) -> float:
        return float(len(trace.last_reply.split()) == 1)

    @vf.metric
    async def words(self, trace) -> float:
        return float(len(trace.last_reply.split()))


class SumTaskset(vf.Taskset[SumTask]):
    def load(self):
        rng = random.Random(0)
        for _ in range(32):
            first, second = rng.randint(2, 9), rng.randint(2, 9)
            yield SumTask(SumData(prompt=f"{first} + {second} = ?", answer=str(first + second)), self.config.task)


__all__ = ["SumTaskset"]
