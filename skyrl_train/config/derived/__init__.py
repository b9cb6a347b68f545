"""What follows from stated settings: sizes, contexts, and what each model of a run gets."""

from skyrl_train.config.derived.learners import (
    LearnerSettings as LearnerSettings,
    RunModels as RunModels,
    ScheduleLength as ScheduleLength,
    gpus_needed as gpus_needed,
    layout_of as layout_of,
    learner_settings as learner_settings,
    old_logprobs_scored as old_logprobs_scored,
    reference_is_base as reference_is_base,
    roles_of as roles_of,
    run_models as run_models,
    scores_entropies as scores_entropies,
    sft_learner_settings as sft_learner_settings,
)
from skyrl_train.config.derived.values import (
    COMPILE as COMPILE,
    CONTEXT as CONTEXT,
    RATES as RATES,
    READ as READ,
    RL_DERIVED as RL_DERIVED,
    SFT_DERIVED as SFT_DERIVED,
    Situation as Situation,
    context_length as context_length,
    derive as derive,
    derive_sft as derive_sft,
    reasons as reasons,
)
