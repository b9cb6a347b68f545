"""Files of models that are not safetensors' own: GGUF, tokenizers' vocabularies, exports."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.model.files.export import export_model
    from skyrl_train.model.files.image_processor import FamilyProcessor, image_reader, image_reading, pads_rows
    from skyrl_train.model.files.reward_model import ScorerSettings, SequenceScorer, weights_identity
    from skyrl_train.model.files.vocabulary import (
        check_special_tokens,
        check_special_tokens_of,
        check_token_ids,
        stated_vocabulary_size,
        vocabulary_size,
    )

__all__ = [
    "FamilyProcessor",
    "ScorerSettings",
    "SequenceScorer",
    "check_special_tokens",
    "check_special_tokens_of",
    "check_token_ids",
    "export_model",
    "image_reader",
    "image_reading",
    "pads_rows",
    "stated_vocabulary_size",
    "vocabulary_size",
    "weights_identity",
]

__getattr__ = lazily(__name__)
