"""Micro-batches that size themselves, at the beginning of a run: before its first step, or as in the run that it resumes.

`memory.json` in the run's folder holds, for each model and rank, what was probed, fitted and chosen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from skyrl_train.config.micro_batching import MicroBatchConfig
    from skyrl_train.learner.sizing import SizingReport

_GIB = 1 << 30


def size_micro_batches(
    trainer: MicroBatchConfig, learners: Sequence[Any], file: Path, *, longest: int, max_rows: int
) -> list[str]:
    """Sizes the micro-batches of `learners` (those of this process, or on Ray) and writes `file`; a line for each to
    print. Nothing where micro-batches are of stated sizes.

    `longest`: tokens of the longest legal row. `max_rows`: of the largest pass. Raises MemoryLimitError.
    """
    if not trainer.sizes_itself:
        return []
    from skyrl_train.learner.sizing import SizingLimits, size_all

    limits = SizingLimits(
        longest=longest,
        max_rows=max_rows,
        limit_bytes=round(trainer.memory_budget_gb * _GIB),
        margin=trainer.memory_margin,
        retries=trainer.memory_retries,
        source=trainer.memory_probe,
    )
    stored = read_reports(file)
    # a reference that is the policy without its adapter has no model of its own, and runs under the policy's budget
    apart = [learner for learner in learners if hasattr(learner, "size_micro_batches")]
    if apart:
        sized = [learner.size_micro_batches(limits, stored) for learner in apart]
        reports = {ranks[0].name: tuple(ranks) for ranks in sized}
    else:
        own = [learner for learner in learners if hasattr(learner, "engine")]
        alone = {name: ranks[0] for name, ranks in stored.items() if len(ranks) == 1}
        reports = {name: (report,) for name, report in size_all(own, limits, alone).items()}
    write_reports(file, reports)
    return [ranks[0].line() for ranks in reports.values()]


def read_reports(file: Path) -> dict[str, tuple[SizingReport, ...]]:
    """By model, then by rank; none where there is no such file, or one that cannot be read: it can be made again."""
    from skyrl_train.learner.sizing import report_from_json

    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return {name: tuple(report_from_json(report) for report in ranks) for name, ranks in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write_reports(file: Path, reports: Mapping[str, Sequence[SizingReport]]) -> None:
    """Inverse of `read_reports`."""
    from skyrl_train.learner.sizing import report_to_json

    content = {name: [report_to_json(report) for report in ranks] for name, ranks in reports.items()}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
