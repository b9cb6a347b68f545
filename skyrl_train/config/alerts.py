"""`alerts`: what of a run somebody is told of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from skyrl_train.config.parts import ALERTS
from skyrl_train.config.rules import NonNegativeFloat, Range
from skyrl_train.registry import PartSpec


@dataclass(frozen=True, kw_only=True)
class AlertsConfig:
    """`alerts`: told once where it begins to hold, as a warning, by trackers that have alerts, and to functions of yours."""

    stalled_after_s: NonNegativeFloat = 0.0
    """Seconds without a finished step; 0 does not watch."""
    failed: bool = False
    """The run ends by an error."""
    entropy_below: Annotated[float, Range(0.0)] | None = None
    """`policy/entropy`, in nats: the policy collapses."""
    reward_below: float | None = None
    """`reward/mean`."""
    reward_above: float | None = None
    """`reward/mean`: too good to be true."""
    length_below: Annotated[float, Range(0.0)] | None = None
    """`response_length/mean`, in tokens."""
    length_above: Annotated[float, Range(0.0)] | None = None
    """`response_length/mean`, in tokens."""
    failures_above: Annotated[float, Range(0.0, 1.0)] | None = None
    """`failures/fraction`."""
    on_alert: tuple[Annotated[PartSpec, ALERTS], ...] = ()
    """Functions that are called with each alert (`telemetry/alerts.py: Alert`), which may send a message, say."""
