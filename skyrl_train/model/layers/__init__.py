"""What is computed in a layer and above the last one: attention, products, log-probabilities."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.model.layers import index_limit
    from skyrl_train.model.layers.attention import flex, leave_uncompiled, masked_attention, segment_attention
    from skyrl_train.model.layers.index_limit import beyond_index, widest_activation
    from skyrl_train.model.layers.linear import product, use_fast_products
    from skyrl_train.model.layers.logprobs import (
        LossOfTokens,
        OfDistribution,
        OutputHead,
        TokenScores,
        score_tokens,
        sum_of_squares,
        token_scores,
    )
    from skyrl_train.model.layers.numerics import say_eager, set_numerics, weight_dtype
    from skyrl_train.model.layers.segments import Segments

__all__ = [
    "LossOfTokens",
    "OfDistribution",
    "OutputHead",
    "Segments",
    "TokenScores",
    "beyond_index",
    "flex",
    "index_limit",
    "leave_uncompiled",
    "masked_attention",
    "product",
    "say_eager",
    "score_tokens",
    "segment_attention",
    "set_numerics",
    "sum_of_squares",
    "token_scores",
    "use_fast_products",
    "weight_dtype",
    "widest_activation",
]

__getattr__ = lazily(__name__)
