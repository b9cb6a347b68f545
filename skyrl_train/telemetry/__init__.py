"""What a run did: metrics, alerts, activity, its folder."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.telemetry.activity import Activity as Activity, TellsWhenBusy as TellsWhenBusy
    from skyrl_train.telemetry.alerts import Alerts as Alerts
    from skyrl_train.telemetry.declared import (
        Declared as Declared,
        declarations as declarations,
        undeclared as undeclared,
    )
    from skyrl_train.telemetry.metrics import (
        Last as Last,
        Max as Max,
        Mean as Mean,
        Metric as Metric,
        Min as Min,
        StepMetrics as StepMetrics,
        Sum as Sum,
        later as later,
        merge_metrics as merge_metrics,
        to_values as to_values,
    )
    from skyrl_train.telemetry.metrics_log import (
        MetricsLog as MetricsLog,
        cut_metrics_after as cut_metrics_after,
        phase_seconds as phase_seconds,
        read_metrics as read_metrics,
    )
    from skyrl_train.telemetry.run_folder import (
        STATE_FILE as STATE_FILE,
        HeldFolder as HeldFolder,
        RunFolder as RunFolder,
        environment_of_run as environment_of_run,
        git_commit as git_commit,
    )

__getattr__ = lazily(__name__)
