"""Settings of data sets and their mixes."""

from skyrl_train.config.data.sources import (
    NO_HELD_OUT,
    CurriculumConfig,
    DataConfig,
    EnvironmentConfig,
    ImagesConfig,
    ReasoningGymConfig,
    is_own_data,
)

__all__ = [
    "NO_HELD_OUT",
    "CurriculumConfig",
    "DataConfig",
    "EnvironmentConfig",
    "ImagesConfig",
    "ReasoningGymConfig",
    "is_own_data",
]
