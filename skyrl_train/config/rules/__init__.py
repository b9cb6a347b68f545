"""Rules between settings, each with the remedy for what breaks it."""

from skyrl_train.config.rules.algorithm_rules import ALGORITHM_RULES
from skyrl_train.config.rules.batch_rules import Role, Sizes, data_parallel_size, divisors
from skyrl_train.config.rules.mix import MixedDataset, mixed_datasets
from skyrl_train.config.rules.validate import RULES, near_path, run_rules, validate_config
from skyrl_train.config.rules.validate_batch import FIELDS, sizes_of, validate_batch_sizes, with_sound_sizes
from skyrl_train.config.rules.validate_engines import ENGINE_RULES
from skyrl_train.config.rules.validate_models import layout_violations, part_violations, quantization
from skyrl_train.config.rules.validate_placement import (
    ENGINE_PLACEMENT_RULES,
    EXPERT_PARALLEL,
    PLACEMENT_RULES,
    num_experts,
)

__all__ = [
    "ALGORITHM_RULES",
    "ENGINE_PLACEMENT_RULES",
    "ENGINE_RULES",
    "EXPERT_PARALLEL",
    "FIELDS",
    "PLACEMENT_RULES",
    "RULES",
    "MixedDataset",
    "Role",
    "Sizes",
    "data_parallel_size",
    "divisors",
    "layout_violations",
    "mixed_datasets",
    "near_path",
    "num_experts",
    "part_violations",
    "quantization",
    "run_rules",
    "sizes_of",
    "validate_batch_sizes",
    "validate_config",
    "with_sound_sizes",
]
