"""Which rows make one micro-batch, and which rank computes them."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.batch.planner.balance import balance_groups, balance_rows, shard_rows
    from skyrl_train.batch.planner.documents import Admits, DocumentStep, document_steps, reduction_schedule
    from skyrl_train.batch.planner.forwards import (
        MemoryAwareBatchIterator,
        MicroBatch,
        TokenBudgets,
        make_micro_batch_strategy,
        token_budget,
        training_limit,
    )
    from skyrl_train.batch.planner.rows import Forward, RowFacts, facts_of
    from skyrl_train.batch.planner.splits import (
        balance_longest_first,
        computed_tokens,
        rows_over,
        split_packed,
        split_padded,
    )

__all__ = [
    "Admits",
    "DocumentStep",
    "Forward",
    "MemoryAwareBatchIterator",
    "MicroBatch",
    "RowFacts",
    "TokenBudgets",
    "balance_groups",
    "balance_longest_first",
    "balance_rows",
    "computed_tokens",
    "document_steps",
    "facts_of",
    "make_micro_batch_strategy",
    "reduction_schedule",
    "rows_over",
    "shard_rows",
    "split_packed",
    "split_padded",
    "token_budget",
    "training_limit",
]

__getattr__ = lazily(__name__)
