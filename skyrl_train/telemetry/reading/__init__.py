"""Which runs there are, and what their files hold: those of this trainer, and what TRL and verl dump."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.telemetry.reading.importers import Row, rows_of
    from skyrl_train.telemetry.reading.sources import RolloutFile, Run, find_runs, first_line, read_object, settings_of

__all__ = ["RolloutFile", "Row", "Run", "find_runs", "first_line", "read_object", "rows_of", "settings_of"]

__getattr__ = lazily(__name__)
