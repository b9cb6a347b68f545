"""What is computed again: a run's recorded steps, and an engine's distributions."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.runs.checks import audit as audit, compare as compare

__getattr__ = lazily(__name__)
