"""What follows from stated settings: sizes, contexts, and what each model of a run gets."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.config.derived.learners import (
        LearnerSettings,
        RunModels,
        ScheduleLength,
        gpus_needed,
        layout_of,
        learner_settings,
        old_logprobs_scored,
        reference_is_base,
        roles_of,
        run_models,
        scores_entropies,
    )
    from skyrl_train.config.derived.values import (
        COMPILE,
        CONTEXT,
        RATES,
        READ,
        RL_DERIVED,
        SFT_DERIVED,
        Situation,
        context_length,
        derive,
        derive_sft,
        reasons,
    )

__all__ = [
    "COMPILE",
    "CONTEXT",
    "RATES",
    "READ",
    "RL_DERIVED",
    "SFT_DERIVED",
    "LearnerSettings",
    "RunModels",
    "ScheduleLength",
    "Situation",
    "context_length",
    "derive",
    "derive_sft",
    "gpus_needed",
    "layout_of",
    "learner_settings",
    "old_logprobs_scored",
    "reasons",
    "reference_is_base",
    "roles_of",
    "run_models",
    "scores_entropies",
]

__getattr__ = lazily(__name__)
