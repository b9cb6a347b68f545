"""Tasks that make their own rows: word problems and reasoning_gym."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.data.tasks import reasoning_tasks as reasoning_tasks
    from skyrl_train.data.tasks.reasoning_tasks import COLUMN as COLUMN, package as package, score as score
    from skyrl_train.data.tasks.word_problems import (
        ANSWER_MARK as ANSWER_MARK,
        RETRY_MESSAGE as RETRY_MESSAGE,
        Split as Split,
        WordProblem as WordProblem,
        draw_problem as draw_problem,
        generate_problems as generate_problems,
        to_row as to_row,
        write_demonstration as write_demonstration,
    )

__getattr__ = lazily(__name__)
