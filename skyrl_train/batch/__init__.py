"""The training batch: a container of token columns, its boundaries and how rollouts become one."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.batch.assembly import (
        AssemblySettings,
        assemble,
        compute_prompt_end_indices,
        compute_prompt_mini_batch_boundaries,
    )
    from skyrl_train.batch.batch_metadata import DUMMY_ROW_LENGTH, BatchMetadata, Rows
    from skyrl_train.batch.layouts.layout import ScoredTokens, loss_tokens, sequence_offsets
    from skyrl_train.batch.reduce import (
        masked_mean,
        require_bool,
        require_float,
        require_integer,
        require_rows,
        rounding_tolerance,
        whiten,
    )
    from skyrl_train.batch.training_batch import (
        ROUTED,
        SCHEMA,
        TrainingInputBatch,
        batch_of_lengths,
        component_column,
        moved,
        offsets_of,
        token_positions,
    )

__all__ = [
    "DUMMY_ROW_LENGTH",
    "ROUTED",
    "SCHEMA",
    "AssemblySettings",
    "BatchMetadata",
    "Rows",
    "ScoredTokens",
    "TrainingInputBatch",
    "assemble",
    "batch_of_lengths",
    "component_column",
    "compute_prompt_end_indices",
    "compute_prompt_mini_batch_boundaries",
    "loss_tokens",
    "masked_mean",
    "moved",
    "offsets_of",
    "require_bool",
    "require_float",
    "require_integer",
    "require_rows",
    "rounding_tolerance",
    "sequence_offsets",
    "token_positions",
    "whiten",
]

__getattr__ = lazily(__name__)
