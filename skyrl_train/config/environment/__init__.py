"""Settings of environments: rewards, and agents in sandboxes."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.config.environment.agents import (
        AGENT,
        AGENT_RULES,
        OF_SANDBOX,
        OF_TASK,
        REPORTED,
        RUN_SETTING,
        launcher_of,
        placeholder_violations,
        with_target,
    )
    from skyrl_train.config.environment.rewards import (
        IN_TRAINER,
        MODEL_CODE,
        ONE_SCORE,
        OWN_REWARD,
        REWARD_RULES,
        SINGLE_TURN,
        RewardEntry,
        has_own_reward,
        is_one_score,
        reward_entries,
        runs_model_code,
        with_reward_components,
        with_sandbox,
    )

__all__ = [
    "AGENT",
    "AGENT_RULES",
    "IN_TRAINER",
    "MODEL_CODE",
    "OF_SANDBOX",
    "OF_TASK",
    "ONE_SCORE",
    "OWN_REWARD",
    "REPORTED",
    "REWARD_RULES",
    "RUN_SETTING",
    "SINGLE_TURN",
    "RewardEntry",
    "has_own_reward",
    "is_one_score",
    "launcher_of",
    "placeholder_violations",
    "reward_entries",
    "runs_model_code",
    "with_reward_components",
    "with_sandbox",
    "with_target",
]

__getattr__ = lazily(__name__)
