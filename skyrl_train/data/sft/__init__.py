"""Supervised examples: from conversations to token stores, packed and collated beside the update."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.data.sft.collate import Collator, DefaultCollator, PackedDataCollator, example_batch
    from skyrl_train.data.sft.examples import Loaded, load_examples
    from skyrl_train.data.sft.loader import AsyncBatchCollator
    from skyrl_train.data.sft.step_stream import EpochOrder, StepStream, by_documents, by_rows, by_tokens
    from skyrl_train.data.sft.token_store import ExampleSet, Ints, SourcePart, TokenStore, store_of

__all__ = [
    "AsyncBatchCollator",
    "Collator",
    "DefaultCollator",
    "EpochOrder",
    "ExampleSet",
    "Ints",
    "Loaded",
    "PackedDataCollator",
    "SourcePart",
    "StepStream",
    "TokenStore",
    "by_documents",
    "by_rows",
    "by_tokens",
    "example_batch",
    "load_examples",
    "store_of",
]

__getattr__ = lazily(__name__)
