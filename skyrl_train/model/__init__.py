"""Models as they are loaded and computed: causal language models, value models, reward models."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.model.causal_lm import (
        disable_dropout,
        empty_causal_lm,
        last_hidden_state,
        load_causal_lm,
        load_tokenizer,
        output_head,
        place_model,
        quiet_transformers,
        resolve_model_path,
    )
    from skyrl_train.model.gguf import PYPI, WHEELS, check_gguf, pinned, source_line
    from skyrl_train.model.last_layer import decoder_layers, narrow_last_layer, reading
    from skyrl_train.model.layouts import hidden_states, supported_layout
    from skyrl_train.model.value_model import HEAD, empty_value_model, load_value_model, replace_head, token_values

__all__ = [
    "HEAD",
    "PYPI",
    "WHEELS",
    "check_gguf",
    "decoder_layers",
    "disable_dropout",
    "empty_causal_lm",
    "empty_value_model",
    "hidden_states",
    "last_hidden_state",
    "load_causal_lm",
    "load_tokenizer",
    "load_value_model",
    "narrow_last_layer",
    "output_head",
    "pinned",
    "place_model",
    "quiet_transformers",
    "reading",
    "replace_head",
    "resolve_model_path",
    "source_line",
    "supported_layout",
    "token_values",
]

__getattr__ = lazily(__name__)
