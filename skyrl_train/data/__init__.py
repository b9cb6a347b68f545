"""Prompts and examples as rows, in an order that a seed decides."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.data.columns import names_of, near_column
    from skyrl_train.data.conversations import read_content
    from skyrl_train.data.curriculum import Curriculum, SolveRates
    from skyrl_train.data.mix import MixedSource
    from skyrl_train.data.prompts import (
        GSM8K_ENV_CLASS,
        GSM8K_HUB,
        GSM8K_SPLITS,
        PromptSource,
        filter_by_length,
        gsm8k_row,
        load_prompts,
        make_prompt,
    )
    from skyrl_train.data.rows import Row, Source, find_sources, read_rows
    from skyrl_train.data.sft.loader import BatchLoader, SFTBatch, one_ahead

__all__ = [
    "GSM8K_ENV_CLASS",
    "GSM8K_HUB",
    "GSM8K_SPLITS",
    "BatchLoader",
    "Curriculum",
    "MixedSource",
    "PromptSource",
    "Row",
    "SFTBatch",
    "SolveRates",
    "Source",
    "filter_by_length",
    "find_sources",
    "gsm8k_row",
    "load_prompts",
    "make_prompt",
    "names_of",
    "near_column",
    "one_ahead",
    "read_content",
    "read_rows",
]

__getattr__ = lazily(__name__)
