"""Settings of data sets and their mixes."""

from skyrl_train.config.data.sources import (
    NO_HELD_OUT as NO_HELD_OUT,
    CurriculumConfig as CurriculumConfig,
    DataConfig as DataConfig,
    EnvironmentConfig as EnvironmentConfig,
    ImagesConfig as ImagesConfig,
    ReasoningGymConfig as ReasoningGymConfig,
    is_own_data as is_own_data,
)
