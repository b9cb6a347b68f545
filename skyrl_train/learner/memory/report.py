"""What sizing found, for each model and rank: JSON in the run's folder, and a line for the run's first lines.

`memory.json` holds what was probed, fitted and chosen; a run that is resumed reads it, and takes the same budgets where
they hold for what is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyrl_train.batch.planner import TokenBudgets
from skyrl_train.learner.memory.fit import MemoryModel, MemoryProbe
from skyrl_train.learner.memory.meter import GIB


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """One phase of one model on one rank."""

    tokens: int
    """The budget, of all ranks."""
    own_tokens: int
    """What this rank's memory would allow."""
    limit_bytes: int
    cell_share: float
    """Of all ranks; 0 where rows are padded (`TokenBudgets.cell_shares`)."""
    model: MemoryModel
    probes: tuple[MemoryProbe, ...]
    predicted_tokens: int = 0
    """The budget by prediction; 0 where none was made."""


@dataclass(frozen=True, kw_only=True)
class SizingReport:
    """One model on one rank."""

    name: str
    facts: Mapping[str, str]
    """What the budgets hold for: model, lengths, layout, device, memory."""
    is_reused: bool
    forward: PhaseReport
    training: PhaseReport | None
    """None for a model that is only scored."""

    @property
    def budgets(self) -> TokenBudgets:
        training = self.training or self.forward
        return TokenBudgets(
            training=training.tokens,
            forward=self.forward.tokens,
            cell_shares=(training.cell_share, self.forward.cell_share),
        )

    def line(self) -> str:
        """Return a line for the run's first lines."""
        named = {"training": self.training, "forward": self.forward}
        phases = {name: phase for name, phase in named.items() if phase is not None}
        parts = [f"{name} {phase.tokens} positions" for name, phase in phases.items()]
        probes = sum(len(phase.probes) for phase in phases.values())
        fit = max(phase.model.largest_relative_error for phase in phases.values())
        source = "of the run that is resumed" if self.is_reused else f"{probes} probes, fitted within {fit:.1%}"
        if probes == 0:
            how = "compiled by XLA" if self.facts["source"] == "xla" else "traced"
            source = f"{how}, nothing was run"
        elif any(phase.predicted_tokens for phase in phases.values()):
            beside = (
                f"{name} {phase.predicted_tokens} ({phase.predicted_tokens / phase.tokens - 1:+.1%})"
                for name, phase in phases.items()
            )
            source = f"{source}; predicted: {', '.join(beside)}"
        return (
            f"{self.name:<11} {', '.join(parts)} a micro-batch in {self.forward.limit_bytes / GIB:.3g} GiB ({source})"
        )


def read_reports(file: Path) -> dict[str, tuple[SizingReport, ...]]:
    """Return reports by model, then by rank; none where there is no such file, or one that cannot be read: it can be made
    again."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return {name: tuple(_report(report) for report in ranks) for name, ranks in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write_reports(file: Path, reports: Mapping[str, Sequence[SizingReport]]) -> None:
    """Write what `read_reports` reads."""
    content = {name: [asdict(report) for report in ranks] for name, ranks in reports.items()}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _report(content: Mapping[str, Any]) -> SizingReport:
    """Raises KeyError, TypeError for what is no report."""
    training = content["training"]
    return SizingReport(
        **{
            **content,
            "forward": _phase(content["forward"]),
            "training": None if training is None else _phase(training),
        }
    )


def _phase(found: Mapping[str, Any]) -> PhaseReport:
    probes = tuple(MemoryProbe(**probe) for probe in found["probes"])
    return PhaseReport(**{**found, "model": MemoryModel(**found["model"]), "probes": probes})
