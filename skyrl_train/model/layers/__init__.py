"""What is computed in a layer and above the last one: attention, products, log-probabilities."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.model.layers import index_limit as index_limit
    from skyrl_train.model.layers.attention import (
        flex as flex,
        leave_uncompiled as leave_uncompiled,
        masked_attention as masked_attention,
        segment_attention as segment_attention,
    )
    from skyrl_train.model.layers.fused import use_fused_layers as use_fused_layers
    from skyrl_train.model.layers.index_limit import (
        beyond_index as beyond_index,
        widest_activation as widest_activation,
    )
    from skyrl_train.model.layers.linear import product as product, use_fast_products as use_fast_products
    from skyrl_train.model.layers.logprobs import (
        LossOfTokens as LossOfTokens,
        OfDistribution as OfDistribution,
        OutputHead as OutputHead,
        TokenScores as TokenScores,
        score_tokens as score_tokens,
        sum_of_squares as sum_of_squares,
        token_scores as token_scores,
    )
    from skyrl_train.model.layers.numerics import (
        say_eager as say_eager,
        set_numerics as set_numerics,
        weight_dtype as weight_dtype,
    )
    from skyrl_train.model.layers.segments import Segments as Segments

__getattr__ = lazily(__name__)
