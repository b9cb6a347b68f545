"""What a run did: metrics, alerts, activity, its folder."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.telemetry.activity import Activity, TellsWhenBusy
    from skyrl_train.telemetry.alerts import Alerts
    from skyrl_train.telemetry.declared import Declared, declarations, undeclared
    from skyrl_train.telemetry.metrics import (
        Last,
        Max,
        Mean,
        Metric,
        Min,
        StepMetrics,
        Sum,
        later,
        merge_metrics,
        to_values,
    )
    from skyrl_train.telemetry.metrics_log import MetricsLog, cut_metrics_after, phase_seconds, read_metrics
    from skyrl_train.telemetry.run_folder import STATE_FILE, HeldFolder, RunFolder, environment_of_run, git_commit

__all__ = [
    "STATE_FILE",
    "Activity",
    "Alerts",
    "Declared",
    "HeldFolder",
    "Last",
    "Max",
    "Mean",
    "Metric",
    "MetricsLog",
    "Min",
    "RunFolder",
    "StepMetrics",
    "Sum",
    "TellsWhenBusy",
    "cut_metrics_after",
    "declarations",
    "environment_of_run",
    "git_commit",
    "later",
    "merge_metrics",
    "phase_seconds",
    "read_metrics",
    "to_values",
    "undeclared",
]

__getattr__ = lazily(__name__)
