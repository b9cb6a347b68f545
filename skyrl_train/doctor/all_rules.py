"""Every rule by its name, and what explains what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyrl_train.doctor.findings import Rule
from skyrl_train.doctor.rules import answers, data, engines, rewards, update

_RULES: Sequence[Rule] = (
    *(update.not_finite, update.training_breaks, update.gradient_always_clipped, update.advantages_off),
    *(update.critic_diverges, update.critic_is_dead, update.held_out_gets_worse),
    *(rewards.constant_reward, rewards.zero_variance_groups, rewards.verifier_contradicts_truth),
    *(rewards.equal_answers_unequal_rewards, rewards.truth_contradicts_row, rewards.truth_in_prompt),
    *(rewards.reward_without_solving, rewards.rewards_follow_length, rewards.reward_fails),
    rewards.silence_pays,
    *(answers.answers_cut_off, answers.conversation_goes_on_by_itself, answers.never_ends, answers.length_changes),
    *(answers.repetition, answers.unreadable_answers, answers.questions_not_read, answers.calls_not_read),
    *(answers.entropy_collapses, answers.tokens_trained),
    *(data.duplicated_prompts, data.order_repeats, data.few_prompts_again, data.evaluation_is_trained_on),
    data.nothing_is_learned,
    *(engines.stale_weights, engines.one_engine_behind, engines.computes_otherwise, engines.too_old),
    *(engines.one_group_is_waited_for, engines.steps_get_slower, engines.memory_grows),
)
RULES: Mapping[str, Rule] = {rule.__name__: rule for rule in _RULES}
"""By name, in the order in which they are asked."""

_UNREADABLE = ("unreadable_answers", "conversation_goes_on_by_itself", "questions_not_read")
_BAD_REWARD = ("verifier_contradicts_truth", "truth_contradicts_row", "constant_reward")
_BROKEN = ("not_finite", "training_breaks", *_UNREADABLE)
CAUSES: Mapping[str, Sequence[str]] = {
    "constant_reward": (*_UNREADABLE, "calls_not_read", "verifier_contradicts_truth"),
    "zero_variance_groups": (
        *_UNREADABLE,
        *_BAD_REWARD,
        *("answers_cut_off", "calls_not_read", "training_breaks", "entropy_collapses", "length_changes"),
        "reward_without_solving",
    ),
    "nothing_is_learned": (
        *_UNREADABLE,
        *_BAD_REWARD,
        "zero_variance_groups",
        "stale_weights",
        "equal_answers_unequal_rewards",
    ),
    "verifier_contradicts_truth": ("truth_contradicts_row",),
    "answers_cut_off": (
        *_UNREADABLE,
        "never_ends",
        "training_breaks",
        "repetition",
        "length_changes",
    ),
    "questions_not_read": ("unreadable_answers", "conversation_goes_on_by_itself", "training_breaks"),
    "conversation_goes_on_by_itself": ("unreadable_answers", "never_ends"),
    "length_changes": ("reward_without_solving", "rewards_follow_length", "training_breaks"),
    "rewards_follow_length": ("reward_without_solving",),
    "repetition": ("unreadable_answers", "training_breaks"),
    "entropy_collapses": (*_BAD_REWARD, "training_breaks", "stale_weights"),
    "computes_otherwise": ("tokens_trained",),
    "one_engine_behind": ("tokens_trained",),
    "stale_weights": ("one_engine_behind", "tokens_trained"),
    "training_breaks": ("not_finite", "one_engine_behind", "stale_weights", "computes_otherwise"),
    "held_out_gets_worse": ("training_breaks", "stale_weights"),
    "critic_diverges": ("not_finite",),
    "few_prompts_again": ("order_repeats",),
    "one_group_is_waited_for": ("reward_fails",),
    "critic_is_dead": ("critic_diverges",),
    "gradient_always_clipped": (*_BROKEN, "critic_diverges", "tokens_trained"),
}
"""By the name of a rule those whose findings explain its own, the likeliest first."""
