"""Settings of models, optimizers and engines."""

from skyrl_train.config.models.engines import (
    GeneratorConfig,
    HTTPConfig,
    SamplingConfig,
    VLLMConfig,
    quantizes_itself,
    ships_adapter,
)
from skyrl_train.config.models.models import (
    CriticConfig,
    CriticModelConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    ReferenceConfig,
    ReferenceModelConfig,
)
from skyrl_train.config.models.placement import (
    RATE_NAMES,
    ROLES,
    STATE_BUCKET_BYTES,
    WEIGHT_BUCKET_BYTES,
    MeshSizes,
    PlacementConfig,
    PlatformConfig,
    StrategyConfig,
    mesh_sizes,
    sums_once_a_step,
)

__all__ = [
    "RATE_NAMES",
    "ROLES",
    "STATE_BUCKET_BYTES",
    "WEIGHT_BUCKET_BYTES",
    "CriticConfig",
    "CriticModelConfig",
    "GeneratorConfig",
    "HTTPConfig",
    "LoraConfig",
    "MeshSizes",
    "ModelConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "PlatformConfig",
    "PolicyConfig",
    "ReferenceConfig",
    "ReferenceModelConfig",
    "SamplingConfig",
    "StrategyConfig",
    "VLLMConfig",
    "mesh_sizes",
    "quantizes_itself",
    "ships_adapter",
    "sums_once_a_step",
]
