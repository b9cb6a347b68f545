"""Settings of environments: rewards, and agents in sandboxes."""

from skyrl_train.config.environment.agents import (
    AGENT as AGENT,
    AGENT_RULES as AGENT_RULES,
    OF_SANDBOX as OF_SANDBOX,
    OF_TASK as OF_TASK,
    REPORTED as REPORTED,
    RUN_SETTING as RUN_SETTING,
    launcher_of as launcher_of,
    placeholder_violations as placeholder_violations,
    with_target as with_target,
)
from skyrl_train.config.environment.rewards import (
    IN_TRAINER as IN_TRAINER,
    MODEL_CODE as MODEL_CODE,
    ONE_SCORE as ONE_SCORE,
    OWN_REWARD as OWN_REWARD,
    REWARD_RULES as REWARD_RULES,
    SINGLE_TURN as SINGLE_TURN,
    RewardEntry as RewardEntry,
    has_own_reward as has_own_reward,
    is_one_score as is_one_score,
    reward_entries as reward_entries,
    runs_model_code as runs_model_code,
    with_reward_components as with_reward_components,
    with_sandbox as with_sandbox,
)
