"""The learning rate: one pure function of the optimizer step, or of the documents consumed."""

from __future__ import annotations

import math

from skyrl_train.config.models import OptimizerConfig
from skyrl_train.parts import SCHEDULES


def schedule_position(
    *, optimizer_steps: int, documents: int, total_optimizer_steps: float, total_documents: int
) -> float:
    """Where on its schedule a model stands that took `optimizer_steps` and consumed `documents`.

    The number of steps; with `docs_per_step`, when steps differ in size and their number is not known before, the share
    of the run's `total_documents` that was consumed, times `total_optimizer_steps`, which are then those documents in
    units of the target. `total_documents=0` counts steps.
    """
    if total_documents == 0:
        return optimizer_steps
    return documents / total_documents * total_optimizer_steps


def learning_rate(step: float, optimizer: OptimizerConfig, total_steps: float) -> float:
    """Learning rate of optimizer step `step`, counted from 0, of `total_steps`.

    Warm-up rises in `warmup_steps` equal steps: `lr / warmup_steps` for the first, `lr` for the last of them. Then,
    with `p = (step - warmup_steps) / (total_steps - warmup_steps)` clipped to [0, 1] and `r = min_lr_ratio`:
    constant `lr`; linear `lr * (1 - (1 - r) * p)`; cosine `lr * (r + (1 - r) * (1 + cos(pi * p)) / 2)`
    (arXiv:1608.03983).
    `step` may lie between two steps, where progress is counted in documents.
    """
    if step + 1 < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    progress = min(1.0, max(0.0, (step - optimizer.warmup_steps) / max(1, total_steps - optimizer.warmup_steps)))
    return optimizer.lr * float(SCHEDULES.resolve(optimizer.schedule)(progress, optimizer.min_lr_ratio))


def constant(_progress: float, _floor: float) -> float:
    """Return 1 at every step: the peak rate."""
    return 1.0


def linear(progress: float, floor: float) -> float:
    """From 1 to `floor` in a straight line."""
    return 1.0 - (1.0 - floor) * progress


def cosine(progress: float, floor: float) -> float:
    """From 1 to `floor` along half a wave of a cosine."""
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
