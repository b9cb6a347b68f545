"""Environments by name: those of the package and of the user."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.rollout.envs import model_code
    from skyrl_train.rollout.envs.environments import (
        environment_violations,
        is_adapter,
        make_environment,
        playing_itself_violations,
        reward_lines,
        split_environment,
        uses_processes,
    )
    from skyrl_train.rollout.envs.model_code import sandbox_lines
    from skyrl_train.rollout.envs.word_problems import WordProblemsEnv, parse_answer

__all__ = [
    "WordProblemsEnv",
    "environment_violations",
    "is_adapter",
    "make_environment",
    "model_code",
    "parse_answer",
    "playing_itself_violations",
    "reward_lines",
    "sandbox_lines",
    "split_environment",
    "uses_processes",
]

__getattr__ = lazily(__name__)
