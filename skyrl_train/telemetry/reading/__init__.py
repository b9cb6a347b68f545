"""Which runs there are, and what their files hold: those of this trainer, and what TRL and verl dump."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.telemetry.reading.importers import Row as Row, rows_of as rows_of
    from skyrl_train.telemetry.reading.sources import (
        RolloutFile as RolloutFile,
        Run as Run,
        find_runs as find_runs,
        first_line as first_line,
        read_object as read_object,
        settings_of as settings_of,
    )

__getattr__ = lazily(__name__)
