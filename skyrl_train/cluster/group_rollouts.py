"""The driver's side of rollouts that engines' actors make (`rollouts.py`): a batch in parts, and what comes back of them."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from skyrl_train.batch.plane import trajectories_of
from skyrl_train.cluster.engine_group import GroupEngine
from skyrl_train.cluster.rollouts import Part
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.rollout import LoopThread, check_failures, places_of
from skyrl_train.types import Prompt, RolloutBatch, SamplingParams, Trajectory

_PARTS_AN_ENGINE = 4
"""Into so many the share of an engine is cut: fewer cost the driver fewer calls, more let fast engines help slow ones."""


class GroupRollouts:
    """Implements `Generator` with the engines of a group, each of which makes its part of a batch whole.

    Set `on_progress` to hear how far a batch is.
    """

    is_recorded = False

    def __init__(self, engine: GroupEngine, folder: Path, *, max_failed_fraction: float) -> None:
        """`folder`: of segments, on a disk that all nodes share; what a run before left in it is removed."""
        self._engine, self._folder, self._max_failed_fraction = engine, folder, max_failed_fraction
        self._thread = LoopThread(name="rollout")
        self.on_progress: Callable[[int, int], None] | None = None
        self._none_succeeded = True
        self._release(None)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        n_samples_per_prompt: int,
        sampling: SamplingParams,
        global_step: int,
        purpose: str,
    ) -> RolloutBatch:
        """Return all trajectories in the order of their prompts and samples, by reference. Raises what
        `RolloutGenerator.generate` raises; SaveError; ActorLostError where no engine is left."""
        self._release(global_step)
        places, num_engines = places_of(prompts), len(self._engine.group.actors)
        size = max(1, math.ceil(len(prompts) / (_PARTS_AN_ENGINE * num_engines)))
        parts = [
            Part(
                prompts=tuple(prompts[start : start + size]),
                places=tuple(places[start : start + size]),
                n_samples_per_prompt=n_samples_per_prompt,
                sampling=sampling,
                global_step=global_step,
                purpose=purpose,
                weight_version=self._engine.weight_version,
                folder=self._folder / f"step_{global_step:06d}",
            )
            for start in range(0, len(prompts), size)
        ]
        made = self._thread.run(self._run_all(parts, len(prompts) * n_samples_per_prompt))
        return RolloutBatch(
            prompts=tuple(prompts),
            trajectories=tuple(one for part in made for one in part),
            n_samples_per_prompt=n_samples_per_prompt,
        )

    def close(self) -> None:
        """End the thread, and remove what was made; the engines belong to whoever made them. Idempotent."""
        self._thread.close()
        self._release(None)

    async def _run_all(self, parts: Sequence[Part], total: int) -> list[list[Trajectory]]:
        # Two parts of an engine run at a time, so that what is left goes to those that are fast.
        room = asyncio.Semaphore(2 * len(self._engine.group.actors))
        tasks = [asyncio.ensure_future(self._run(part, room)) for part in parts]
        done: list[Trajectory] = []
        try:
            for each in asyncio.as_completed(tasks):
                found = await each
                done += found
                self._none_succeeded = self._none_succeeded and all(one.failed for one in found)
                none = self._none_succeeded and tasks[0].done()
                check_failures(done, total, limit=self._max_failed_fraction, none_succeeded=none)
                if self.on_progress is not None:
                    self.on_progress(len(done), total)
            return [task.result() for task in tasks]
        except SkyrlTrainError as error:
            ended = [(part, task) for part, task in zip(parts, tasks) if task.done() and not task.exception()]
            error.trajectories = tuple(
                (part.prompts[number // part.n_samples_per_prompt], one)
                for part, task in ended
                for number, one in enumerate(task.result())
            )
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, part: Part, room: asyncio.Semaphore) -> list[Trajectory]:
        async with room:
            made = await self._engine.roll_out(part)
        return made if isinstance(made, list) else trajectories_of(*made)

    def _release(self, step: int | None) -> None:
        """Remove the segments of other steps than this one."""
        kept = self._folder / f"step_{step:06d}" if step is not None else None
        for each in self._folder.glob("step_*"):
            if each != kept:
                shutil.rmtree(each, ignore_errors=True)
