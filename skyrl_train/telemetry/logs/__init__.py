"""The console, the log, stacks of processes that hang, and secrets taken out of all of it."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.telemetry.logs import stacks as stacks
    from skyrl_train.telemetry.logs.console import RunConsole as RunConsole
    from skyrl_train.telemetry.logs.notebook import in_notebook as in_notebook
    from skyrl_train.telemetry.logs.redaction import (
        REDACTED as REDACTED,
        RedactingFormatter as RedactingFormatter,
        copy_redacted as copy_redacted,
        is_secret_name as is_secret_name,
        learn_arguments as learn_arguments,
        learn_secrets as learn_secrets,
        redact as redact,
        redact_text as redact_text,
    )
    from skyrl_train.telemetry.logs.run_log import (
        RunLogHandler as RunLogHandler,
        console_streams as console_streams,
        log_once as log_once,
    )
    from skyrl_train.telemetry.logs.stacks import Answering as Answering, innermost as innermost, of_run as of_run

__getattr__ = lazily(__name__)
