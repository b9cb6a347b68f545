"""The viewer: reads run folders and serves them to a browser."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.view.sources import find_runs

__all__ = ["find_runs"]

__getattr__ = lazily(__name__)
