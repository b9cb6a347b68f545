"""The one number of each rule that decides whether it speaks, by the rule's name; `docs/doctor.md` has what others would do.

`python -m scripts.studies.diseases roc FOLDER` sets each to other values and counts on recorded runs.
"""

from __future__ import annotations

LIMITS: dict[str, float] = {
    # Rewards
    "constant_reward": 1e-9,  # largest deviation of a step's rewards
    "zero_variance_groups": 0.8,  # share of groups, at least
    "verifier_contradicts_truth": 0.5,  # share of right answers with the lowest reward, more than
    "equal_answers_unequal_rewards": 0.05,  # share of texts that came twice, at least
    "truth_contradicts_row": 0.1,  # share of rows, at least
    "truth_in_prompt": 0.9,  # share of prompts, at least
    "reward_without_solving": 0.5,  # gain of the reward over its deviation, at least
    "rewards_follow_length": 0.8,  # rank correlation within groups, at least
    "silence_pays": 0.5,  # answers without an action that a trajectory has more, at least
    "reward_fails": 0.2,  # share of trajectories, at least
    # Answers
    "answers_cut_off": 0.25,  # share of turns, at least
    "conversation_goes_on_by_itself": 0.1,  # share of answers, at least
    "never_ends": 0.8,  # share of answers, at least
    "length_changes": 2.5,  # length over what it was, or the inverse, at least
    "repetition": 0.35,  # share of repeated 4-grams, at least
    "unreadable_answers": 0.5,  # surprise over that of a guess, at least
    "questions_not_read": 2.5,  # standard errors, at most
    "calls_not_read": 0.5,  # share of answers with a call, more than
    "entropy_collapses": 0.1,  # entropy over what it was, at most
    "tokens_trained": 0.8,  # share of steps that differ, at least
    # Data
    "duplicated_prompts": 0.1,  # share of prompts, at least
    "order_repeats": 2,  # steps, at least
    "few_prompts_again": 0.5,  # different prompts over all that are asked, at most
    "evaluation_is_trained_on": 0.05,  # share of held-out prompts, at least
    "nothing_is_learned": 1e-4,  # nats that updates of a step move a token by, at most
    # The update
    "training_breaks": 0.3,  # loss of reward over its deviation, at least
    "gradient_always_clipped": 3,  # median norm over the bound, at least
    "advantages_off": 0.5,  # share of groups, more than
    "critic_diverges": 5,  # loss over what it was, more than
    "critic_is_dead": 0.05,  # variance explained, at most
    "held_out_gets_worse": 1.1,  # loss over the lowest, more than
    # Engines and machines
    "stale_weights": 5,  # mismatch over what it was, more than
    "computes_otherwise": 0.01,  # nats a token, at least
    "one_engine_behind": 0.1,  # share of trajectories, at least
    "too_old": 2,  # steps, at least
    "one_group_is_waited_for": 0.6,  # share of the generation without the engine, more than
    "steps_get_slower": 2.0,  # seconds a token over what they were, at least
    "memory_grows": 0.15,  # growth over what there was, more than
}
