"""Services that show metrics, and curves drawn without one."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.telemetry.trackers.base import (
        ConsoleTracker,
        SampleRow,
        Tracker,
        Trackers,
        sample_row,
    )
    from skyrl_train.telemetry.trackers.learning_curve import (
        draw_learning_curve,
        draw_loss_curve,
        new_figure,
        save_figure,
    )
    from skyrl_train.telemetry.trackers.services import (
        MlflowTracker,
        PrometheusTracker,
        TensorboardTracker,
        TrackioTracker,
        WandbTracker,
    )

__all__ = [
    "ConsoleTracker",
    "MlflowTracker",
    "PrometheusTracker",
    "SampleRow",
    "TensorboardTracker",
    "Tracker",
    "Trackers",
    "TrackioTracker",
    "WandbTracker",
    "draw_learning_curve",
    "draw_loss_curve",
    "new_figure",
    "sample_row",
    "save_figure",
]

__getattr__ = lazily(__name__)
