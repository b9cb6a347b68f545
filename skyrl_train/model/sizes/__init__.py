"""Parameters and shapes of a model, counted without its weights."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.model.sizes.counts import (
        ModelSizes,
        ParameterCounts,
        known_architectures,
        largest_parameter,
        local_folder,
        meta_model,
        model_sizes,
        of_depth,
        read_architecture,
        read_config,
        remember,
        remembered_file,
        sizes_of_model,
        source_stamps,
        text_part,
        weight_bytes,
    )

__all__ = [
    "ModelSizes",
    "ParameterCounts",
    "known_architectures",
    "largest_parameter",
    "local_folder",
    "meta_model",
    "model_sizes",
    "of_depth",
    "read_architecture",
    "read_config",
    "remember",
    "remembered_file",
    "sizes_of_model",
    "source_stamps",
    "text_part",
    "weight_bytes",
]

__getattr__ = lazily(__name__)
