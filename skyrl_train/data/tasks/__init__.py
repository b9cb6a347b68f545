"""Tasks that make their own rows: word problems and reasoning_gym."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.data.tasks import reasoning_tasks
    from skyrl_train.data.tasks.reasoning_tasks import COLUMN, package, score
    from skyrl_train.data.tasks.word_problems import (
        ANSWER_MARK,
        RETRY_MESSAGE,
        Split,
        WordProblem,
        draw_problem,
        generate_problems,
        to_row,
        write_demonstration,
    )

__all__ = [
    "ANSWER_MARK",
    "COLUMN",
    "RETRY_MESSAGE",
    "Split",
    "WordProblem",
    "draw_problem",
    "generate_problems",
    "package",
    "reasoning_tasks",
    "score",
    "to_row",
    "write_demonstration",
]

__getattr__ = lazily(__name__)
