"""Files of models that are not safetensors' own: GGUF, tokenizers' vocabularies, exports."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.model.files.export import export_model as export_model
    from skyrl_train.model.files.image_processor import (
        FamilyProcessor as FamilyProcessor,
        image_reading as image_reading,
        pads_rows as pads_rows,
    )
    from skyrl_train.model.files.recorded_images import image_reader as image_reader
    from skyrl_train.model.files.reward_model import (
        SequenceScorer as SequenceScorer,
        weights_identity as weights_identity,
    )
    from skyrl_train.model.files.vocabulary import (
        check_special_tokens as check_special_tokens,
        check_special_tokens_of as check_special_tokens_of,
        check_token_ids as check_token_ids,
        stated_vocabulary_size as stated_vocabulary_size,
        vocabulary_size as vocabulary_size,
    )

__getattr__ = lazily(__name__)
