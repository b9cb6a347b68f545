"""Environments by name: those of the package and of the user."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.rollout.envs import model_code as model_code
    from skyrl_train.rollout.envs.environments import (
        environment_violations as environment_violations,
        is_adapter as is_adapter,
        make_environment as make_environment,
        playing_itself_violations as playing_itself_violations,
        reward_lines as reward_lines,
        split_environment as split_environment,
        uses_processes as uses_processes,
    )
    from skyrl_train.rollout.envs.model_code import sandbox_lines as sandbox_lines
    from skyrl_train.rollout.envs.word_problems import WordProblemsEnv as WordProblemsEnv, parse_answer as parse_answer

__getattr__ = lazily(__name__)
