"""Models as they are loaded and computed: causal language models, value models, reward models."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.model.causal_lm import (
        disable_dropout as disable_dropout,
        empty_causal_lm as empty_causal_lm,
        last_hidden_state as last_hidden_state,
        load_causal_lm as load_causal_lm,
        load_tokenizer as load_tokenizer,
        output_head as output_head,
        place_model as place_model,
        quiet_transformers as quiet_transformers,
        resolve_model_path as resolve_model_path,
    )
    from skyrl_train.model.gguf import (
        PYPI as PYPI,
        WHEELS as WHEELS,
        check_gguf as check_gguf,
        pinned as pinned,
        source_line as source_line,
    )
    from skyrl_train.model.last_layer import (
        decoder_layers as decoder_layers,
        narrow_last_layer as narrow_last_layer,
        reading as reading,
    )
    from skyrl_train.model.layouts import hidden_states as hidden_states, supported_layout as supported_layout
    from skyrl_train.model.value_model import (
        HEAD as HEAD,
        empty_value_model as empty_value_model,
        load_value_model as load_value_model,
        replace_head as replace_head,
        token_values as token_values,
    )

__getattr__ = lazily(__name__)
