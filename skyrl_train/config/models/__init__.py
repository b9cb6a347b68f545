"""Settings of models, optimizers and engines."""

from skyrl_train.config.models.engines import (
    GeneratorConfig as GeneratorConfig,
    HTTPConfig as HTTPConfig,
    SamplingConfig as SamplingConfig,
    VLLMConfig as VLLMConfig,
    quantizes_itself as quantizes_itself,
    ships_adapter as ships_adapter,
)
from skyrl_train.config.models.models import (
    CriticConfig as CriticConfig,
    CriticModelConfig as CriticModelConfig,
    LoraConfig as LoraConfig,
    ModelConfig as ModelConfig,
    OptimizerConfig as OptimizerConfig,
    PolicyConfig as PolicyConfig,
    ReferenceConfig as ReferenceConfig,
    ReferenceModelConfig as ReferenceModelConfig,
)
from skyrl_train.config.models.placement import (
    RATE_NAMES as RATE_NAMES,
    ROLES as ROLES,
    STATE_BUCKET_BYTES as STATE_BUCKET_BYTES,
    WEIGHT_BUCKET_BYTES as WEIGHT_BUCKET_BYTES,
    MeshSizes as MeshSizes,
    PlacementConfig as PlacementConfig,
    PlatformConfig as PlatformConfig,
    StrategyConfig as StrategyConfig,
    mesh_sizes as mesh_sizes,
    sums_once_a_step as sums_once_a_step,
)
