"""Prompts and examples as rows, in an order that a seed decides."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.data.columns import names_of as names_of, near_column as near_column
    from skyrl_train.data.conversations import read_content as read_content
    from skyrl_train.data.curriculum import Curriculum as Curriculum, SolveRates as SolveRates
    from skyrl_train.data.mix import MixedSource as MixedSource
    from skyrl_train.data.prompts import (
        GSM8K_ENV_CLASS as GSM8K_ENV_CLASS,
        GSM8K_HUB as GSM8K_HUB,
        GSM8K_SPLITS as GSM8K_SPLITS,
        PromptSource as PromptSource,
        filter_by_length as filter_by_length,
        gsm8k_row as gsm8k_row,
        load_prompts as load_prompts,
        make_prompt as make_prompt,
    )
    from skyrl_train.data.rows import Row as Row, Source as Source, find_sources as find_sources, read_rows as read_rows
    from skyrl_train.data.sft.loader import BatchLoader as BatchLoader, SFTBatch as SFTBatch, one_ahead as one_ahead

__getattr__ = lazily(__name__)
