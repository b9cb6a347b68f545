"""Rules between settings, each with the remedy for what breaks it."""

from skyrl_train.config.rules.algorithm_rules import ALGORITHM_RULES as ALGORITHM_RULES
from skyrl_train.config.rules.batch_rules import (
    Role as Role,
    Sizes as Sizes,
    data_parallel_size as data_parallel_size,
    divisors as divisors,
)
from skyrl_train.config.rules.mix import MixedDataset as MixedDataset, mixed_datasets as mixed_datasets
from skyrl_train.config.rules.validate import (
    RULES as RULES,
    near_path as near_path,
    rule_violations as rule_violations,
    run_rules as run_rules,
)
from skyrl_train.config.rules.validate_batch import (
    FIELDS as FIELDS,
    sizes_of as sizes_of,
    validate_batch_sizes as validate_batch_sizes,
    validate_config as validate_config,
    with_sound_sizes as with_sound_sizes,
)
from skyrl_train.config.rules.validate_engines import ENGINE_RULES as ENGINE_RULES
from skyrl_train.config.rules.validate_models import (
    layout_violations as layout_violations,
    part_violations as part_violations,
    quantization as quantization,
)
from skyrl_train.config.rules.validate_placement import (
    ENGINE_PLACEMENT_RULES as ENGINE_PLACEMENT_RULES,
    EXPERT_PARALLEL as EXPERT_PARALLEL,
    PLACEMENT_RULES as PLACEMENT_RULES,
    num_experts as num_experts,
)
