"""Advantages, their filters and controllers: what a batch is worth, computed from its columns."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.algorithms.advantages import grpo as grpo
    from skyrl_train.algorithms.baseline_advantages import (
        with_greedy_rewards as with_greedy_rewards,
        with_reward_columns as with_reward_columns,
    )
    from skyrl_train.algorithms.controllers import (
        EntropyControllerState as EntropyControllerState,
        KLControllerState as KLControllerState,
        initial_entropy_state as initial_entropy_state,
        initial_state as initial_state,
        mean_token_kl as mean_token_kl,
        next_entropy_state as next_entropy_state,
        next_state as next_state,
    )
    from skyrl_train.algorithms.dynamic_sampling import (
        SamplingState as SamplingState,
        sample_dynamically as sample_dynamically,
    )
    from skyrl_train.algorithms.estimate import (
        advantage_inputs as advantage_inputs,
        estimate_advantages as estimate_advantages,
    )
    from skyrl_train.algorithms.filters import (
        differing_prompts as differing_prompts,
        mask_rows as mask_rows,
        shape_rewards as shape_rewards,
        with_sample_counts as with_sample_counts,
    )
    from skyrl_train.algorithms.groups import score as score
    from skyrl_train.algorithms.inputs import AdvantageInputs as AdvantageInputs, AdvantageOutput as AdvantageOutput
    from skyrl_train.algorithms.self_distillation import teacher_logprobs as teacher_logprobs
    from skyrl_train.algorithms.step_columns import (
        high_entropy as high_entropy,
        missing_step_column as missing_step_column,
        with_step_columns as with_step_columns,
    )

__getattr__ = lazily(__name__)
