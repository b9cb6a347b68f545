"""A server of Tinker's API on this package's learner, engine and checkpoints."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.serve.app import make_app
    from skyrl_train.serve.models import Models
    from skyrl_train.serve.service import Service
    from skyrl_train.serve.wire import schema

__all__ = ["Models", "Service", "make_app", "schema"]

__getattr__ = lazily(__name__)
