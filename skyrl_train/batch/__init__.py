"""The training batch: a container of token columns, its boundaries and how rollouts become one."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.batch.assembly import (
        assemble as assemble,
        compute_prompt_end_indices as compute_prompt_end_indices,
        compute_prompt_mini_batch_boundaries as compute_prompt_mini_batch_boundaries,
    )
    from skyrl_train.batch.batch_metadata import (
        DUMMY_ROW_LENGTH as DUMMY_ROW_LENGTH,
        BatchMetadata as BatchMetadata,
        Rows as Rows,
        ranges as ranges,
    )
    from skyrl_train.batch.layouts.layout import (
        ScoredTokens as ScoredTokens,
        loss_tokens as loss_tokens,
        sequence_offsets as sequence_offsets,
    )
    from skyrl_train.batch.reduce import (
        masked_mean as masked_mean,
        require_bool as require_bool,
        require_float as require_float,
        require_integer as require_integer,
        require_rows as require_rows,
        rounding_tolerance as rounding_tolerance,
        whiten as whiten,
    )
    from skyrl_train.batch.training_batch import (
        ROUTED as ROUTED,
        SCHEMA as SCHEMA,
        TrainingInputBatch as TrainingInputBatch,
        batch_of_lengths as batch_of_lengths,
        component_column as component_column,
        moved as moved,
        offsets_of as offsets_of,
        token_positions as token_positions,
    )

__getattr__ = lazily(__name__)
