"""What an environment may answer, checked, and a session with one."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.rollout.boundary.session import (
        MAX_WORKERS,
        Broken,
        Environments,
        EnvironmentSession,
        Request,
        StepResult,
        check_step,
        describe,
        read_answer,
    )

__all__ = [
    "MAX_WORKERS",
    "Broken",
    "EnvironmentSession",
    "Environments",
    "Request",
    "StepResult",
    "check_step",
    "describe",
    "read_answer",
]

__getattr__ = lazily(__name__)
