"""Supervised examples: from conversations to token stores, packed and collated beside the update."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.data.sft.collate import (
        Collator as Collator,
        DefaultCollator as DefaultCollator,
        PackedDataCollator as PackedDataCollator,
        example_batch as example_batch,
    )
    from skyrl_train.data.sft.examples import Loaded as Loaded, load_examples as load_examples
    from skyrl_train.data.sft.loader import AsyncBatchCollator as AsyncBatchCollator
    from skyrl_train.data.sft.step_stream import (
        EpochOrder as EpochOrder,
        StepStream as StepStream,
        by_documents as by_documents,
        by_rows as by_rows,
        by_tokens as by_tokens,
    )
    from skyrl_train.data.sft.token_store import (
        ExampleSet as ExampleSet,
        Ints as Ints,
        SourcePart as SourcePart,
        TokenStore as TokenStore,
        store_of as store_of,
    )

__getattr__ = lazily(__name__)
