"""Code that nobody trusts, in a process of its own with nothing around it."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.system.sandbox import sandbox
    from skyrl_train.system.sandbox.sandbox import (
        START_WITHIN_S,
        Level,
        Limits,
        SandboxUnavailable,
        made,
        missing,
        programs,
        readable,
        run,
        system_words,
        violations,
    )

__all__ = [
    "START_WITHIN_S",
    "Level",
    "Limits",
    "SandboxUnavailable",
    "made",
    "missing",
    "programs",
    "readable",
    "run",
    "sandbox",
    "system_words",
    "violations",
]

__getattr__ = lazily(__name__)
