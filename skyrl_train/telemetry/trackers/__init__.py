"""Services that show metrics, and curves drawn without one."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.telemetry.trackers.base import (
        ConsoleTracker as ConsoleTracker,
        SampleRow as SampleRow,
        Tracker as Tracker,
        Trackers as Trackers,
        sample_row as sample_row,
    )
    from skyrl_train.telemetry.trackers.learning_curve import (
        draw_learning_curve as draw_learning_curve,
        draw_loss_curve as draw_loss_curve,
        new_figure as new_figure,
        save_figure as save_figure,
    )
    from skyrl_train.telemetry.trackers.services import (
        MlflowTracker as MlflowTracker,
        PrometheusTracker as PrometheusTracker,
        TensorboardTracker as TensorboardTracker,
        TrackioTracker as TrackioTracker,
        WandbTracker as WandbTracker,
    )

__getattr__ = lazily(__name__)
