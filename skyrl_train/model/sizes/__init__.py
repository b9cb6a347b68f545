"""Parameters and shapes of a model, counted without its weights."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.model.sizes.counts import (
        ModelSizes as ModelSizes,
        ParameterCounts as ParameterCounts,
        known_architectures as known_architectures,
        largest_parameter as largest_parameter,
        local_folder as local_folder,
        meta_model as meta_model,
        model_sizes as model_sizes,
        of_depth as of_depth,
        read_architecture as read_architecture,
        read_config as read_config,
        remember as remember,
        remembered_file as remembered_file,
        sizes_of_model as sizes_of_model,
        source_stamps as source_stamps,
        text_part as text_part,
        weight_bytes as weight_bytes,
    )

__getattr__ = lazily(__name__)
