"""The schema: the whole configuration of an RL run and of an SFT run, as dataclasses."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.config.schema import (
        AlertsConfig,
        Config,
        ConsoleConfig,
        LoopConfig,
        MicroBatchConfig,
        MlflowConfig,
        PlanConfig,
        PrometheusConfig,
        RolloutsConfig,
        RunConfig,
        TensorboardConfig,
        TrackerConfig,
        TrackioConfig,
        TrainerConfig,
        WandbConfig,
    )
    from skyrl_train.config.sft import (
        SFT_RULES,
        AnyConfig,
        SFTConfig,
        SFTDataConfig,
        SFTTrainerConfig,
        sft_learner_settings,
        validate_sft,
    )

__all__ = [
    "SFT_RULES",
    "AlertsConfig",
    "AnyConfig",
    "Config",
    "ConsoleConfig",
    "LoopConfig",
    "MicroBatchConfig",
    "MlflowConfig",
    "PlanConfig",
    "PrometheusConfig",
    "RolloutsConfig",
    "RunConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTTrainerConfig",
    "TensorboardConfig",
    "TrackerConfig",
    "TrackioConfig",
    "TrainerConfig",
    "WandbConfig",
    "sft_learner_settings",
    "validate_sft",
]

__getattr__ = lazily(__name__)
