"""`trainer.profile_steps`: what an optimizer step computes and where its time and memory go, of each model on each rank.

    profiles/step_000003_policy_rank0_update1.json.gz        a trace, for ui.perfetto.dev or chrome://tracing
    profiles/step_000003_policy_rank0_update1.memory.pickle  CUDA: a snapshot of its allocator, for pytorch.org/memory_viz

A file covers one optimizer step, from the first forward to the moved weights; scoring and generation are not in it. Nothing
that is computed changes. A profile that cannot be written is warned about and costs the run nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_MOST_MEMORY_EVENTS = 200_000


class Profiler:
    """Profiles the optimizer steps of some training steps, of one model on one rank."""

    def __init__(self, steps: Sequence[int], folder: Path, *, name: str, rank: int, device: torch.device) -> None:
        self._steps, self._folder, self._name, self._rank = frozenset(steps), folder, name, rank
        self._on_cuda = device.type == "cuda"
        self._running: torch.profiler.profile | None = None
        self._step = self._update = 0

    def begin(self, step: int) -> None:
        """An optimizer step of training step `step` begins, or goes on."""
        if step not in self._steps or self._running is not None:
            return
        # A training step has several optimizer steps, each with files of its own.
        self._update = self._update + 1 if step == self._step else 1
        self._step = step
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._on_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MOST_MEMORY_EVENTS)
        self._running = torch.profiler.profile(activities=activities)
        self._running.start()

    def end(self) -> None:
        """It has moved the weights: its files are written."""
        if self._running is None:
            return
        # Let go ahead of writing: a profile that cannot be written does not stop the next one.
        running, self._running = self._running, None
        running.stop()
        name = f"step_{self._step:06d}_{self._name}_rank{self._rank}_update{self._update}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            if self._on_cuda:
                torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}.memory.pickle"))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            logger.warning("the profile %s could not be written: %s", name, error)
        finally:
            if self._on_cuda:
                torch.cuda.memory._record_memory_history(enabled=None)
