"""The schema: the whole configuration of an RL run and of an SFT run, as dataclasses."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.config.schema import (
        AlertsConfig as AlertsConfig,
        Config as Config,
        ConsoleConfig as ConsoleConfig,
        LoopConfig as LoopConfig,
        MicroBatchConfig as MicroBatchConfig,
        MlflowConfig as MlflowConfig,
        PlanConfig as PlanConfig,
        PrometheusConfig as PrometheusConfig,
        RolloutsConfig as RolloutsConfig,
        RunConfig as RunConfig,
        TensorboardConfig as TensorboardConfig,
        TrackerConfig as TrackerConfig,
        TrackioConfig as TrackioConfig,
        TrainerConfig as TrainerConfig,
        WandbConfig as WandbConfig,
    )
    from skyrl_train.config.sft import (
        SFT_RULES as SFT_RULES,
        AnyConfig as AnyConfig,
        SFTConfig as SFTConfig,
        SFTDataConfig as SFTDataConfig,
        SFTTrainerConfig as SFTTrainerConfig,
    )

__getattr__ = lazily(__name__)
