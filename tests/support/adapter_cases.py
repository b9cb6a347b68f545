"""Environments of other packages under an interpreter that has them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import pytest

from skyrl_train.rollout.boundary import EnvironmentSession, StepResult
from skyrl_train.rollout.hosts import LocalWorkers, ProcessEnvironments

PYTHON = os.environ.get("SKYRL_TRAIN_ADAPTERS_PYTHON", "")
"""An interpreter that has verifiers and openenv-core."""
PROMPT = [{"role": "user", "content": "Reach the goal."}]
needs_others = pytest.mark.skipif(
    not PYTHON, reason="set SKYRL_TRAIN_ADAPTERS_PYTHON to an interpreter that has verifiers and openenv-core"
)


def played(spec: Any, rows: Sequence[dict[str, Any]], answers: Sequence[Any]) -> list[tuple[str, list[StepResult]]]:
    """The last of the first messages, and the steps, of one trajectory for each row. An answer is a text, or one with calls
    of tools."""

    async def one(among: ProcessEnvironments, row: dict[str, Any]) -> tuple[str, list[StepResult]]:
        session = EnvironmentSession(among, spec, row, "Environment")
        first = await session.start(PROMPT)
        steps: list[StepResult] = []
        for answer in answers:
            if not (steps and steps[-1].done):
                steps.append(await session.step(*([answer] if isinstance(answer, str) else answer)))
        await session.close()
        return first[-1]["content"], steps

    async def all_rows() -> list[tuple[str, list[StepResult]]]:
        workers = LocalWorkers((spec,), worker_memory_gb=4.0, python=PYTHON)
        among = ProcessEnvironments(workers, num_workers=None, timeout_s=60.0)
        try:
            return list(await asyncio.gather(*(one(among, row) for row in rows)))
        finally:
            await among.aclose()

    return asyncio.run(all_rows())
