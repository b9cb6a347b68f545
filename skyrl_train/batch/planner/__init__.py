"""Which rows make one micro-batch, and which rank computes them."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.batch.planner.balance import (
        balance_groups as balance_groups,
        balance_rows as balance_rows,
        shard_rows as shard_rows,
    )
    from skyrl_train.batch.planner.documents import (
        Admits as Admits,
        DocumentStep as DocumentStep,
        document_steps as document_steps,
        reduction_schedule as reduction_schedule,
    )
    from skyrl_train.batch.planner.forwards import (
        MemoryAwareBatchIterator as MemoryAwareBatchIterator,
        MicroBatch as MicroBatch,
        TokenBudgets as TokenBudgets,
        make_micro_batch_strategy as make_micro_batch_strategy,
        token_budget as token_budget,
        training_limit as training_limit,
    )
    from skyrl_train.batch.planner.rows import Forward as Forward, RowFacts as RowFacts, facts_of as facts_of
    from skyrl_train.batch.planner.splits import (
        balance_longest_first as balance_longest_first,
        computed_tokens as computed_tokens,
        rows_over as rows_over,
        split_packed as split_packed,
        split_padded as split_padded,
    )

__getattr__ = lazily(__name__)
