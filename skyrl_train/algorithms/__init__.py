"""Advantages, their filters and controllers: what a batch is worth, computed from its columns."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.algorithms.advantages import grpo
    from skyrl_train.algorithms.baseline_advantages import with_greedy_rewards, with_reward_columns
    from skyrl_train.algorithms.controllers import (
        EntropyControllerState,
        KLControllerState,
        initial_entropy_state,
        initial_state,
        mean_token_kl,
        next_entropy_state,
        next_state,
    )
    from skyrl_train.algorithms.dynamic_sampling import SamplingState, sample_dynamically
    from skyrl_train.algorithms.estimate import advantage_inputs, estimate_advantages
    from skyrl_train.algorithms.filters import differing_prompts, mask_rows, shape_rewards, with_sample_counts
    from skyrl_train.algorithms.groups import score
    from skyrl_train.algorithms.inputs import AdvantageInputs, AdvantageOutput
    from skyrl_train.algorithms.self_distillation import teacher_logprobs
    from skyrl_train.algorithms.step_columns import high_entropy, missing_step_column, with_step_columns

__all__ = [
    "AdvantageInputs",
    "AdvantageOutput",
    "EntropyControllerState",
    "KLControllerState",
    "SamplingState",
    "advantage_inputs",
    "differing_prompts",
    "estimate_advantages",
    "grpo",
    "high_entropy",
    "initial_entropy_state",
    "initial_state",
    "mask_rows",
    "mean_token_kl",
    "missing_step_column",
    "next_entropy_state",
    "next_state",
    "sample_dynamically",
    "score",
    "shape_rewards",
    "teacher_logprobs",
    "with_greedy_rewards",
    "with_reward_columns",
    "with_sample_counts",
    "with_step_columns",
]

__getattr__ = lazily(__name__)
