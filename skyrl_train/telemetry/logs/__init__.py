"""The console, the log, stacks of processes that hang, and secrets taken out of all of it."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.telemetry.logs import stacks
    from skyrl_train.telemetry.logs.console import RunConsole
    from skyrl_train.telemetry.logs.redaction import (
        REDACTED,
        RedactingFormatter,
        copy_redacted,
        is_secret_name,
        learn_arguments,
        learn_secrets,
        redact,
        redact_text,
    )
    from skyrl_train.telemetry.logs.run_log import RunLogHandler, console_streams, log_once
    from skyrl_train.telemetry.logs.stacks import Answering, innermost, of_run

__all__ = [
    "REDACTED",
    "Answering",
    "RedactingFormatter",
    "RunConsole",
    "RunLogHandler",
    "console_streams",
    "copy_redacted",
    "innermost",
    "is_secret_name",
    "learn_arguments",
    "learn_secrets",
    "log_once",
    "of_run",
    "redact",
    "redact_text",
    "stacks",
]

__getattr__ = lazily(__name__)
