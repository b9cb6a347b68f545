"""The dry run: sizes, memory and time of a run before it starts."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.plan.batch_plan import BatchPlan, SFTPlan, ceil_div, make_batch_plan
    from skyrl_train.plan.dry_run import (
        expected_peak_bytes,
        expected_step_seconds,
        make_plan_report,
        placement_report,
        plan_batches,
    )
    from skyrl_train.plan.estimate import RowLengths, recorded_lengths
    from skyrl_train.plan.machine import machine_rates
    from skyrl_train.plan.report import optimizer_steps_text, placement_lines, render_text, to_json
    from skyrl_train.plan.time import NO_TIME, PhaseTimes, duration, measured_phases, rates_of

__all__ = [
    "NO_TIME",
    "BatchPlan",
    "PhaseTimes",
    "RowLengths",
    "SFTPlan",
    "ceil_div",
    "duration",
    "expected_peak_bytes",
    "expected_step_seconds",
    "machine_rates",
    "make_batch_plan",
    "make_plan_report",
    "measured_phases",
    "optimizer_steps_text",
    "placement_lines",
    "placement_report",
    "plan_batches",
    "rates_of",
    "recorded_lengths",
    "render_text",
    "to_json",
]

__getattr__ = lazily(__name__)
