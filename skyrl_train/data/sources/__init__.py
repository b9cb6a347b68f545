"""Where rows and pictures come from: files, folders and the Hugging Face hub."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.data.sources.hub import endpoint, fetch_config, is_cached, is_reachable, problem_of
    from skyrl_train.data.sources.images import (
        IMAGES,
        REFERENCE,
        ImageReading,
        ImageStore,
        check_image,
        decode_image,
        image_format,
        is_image,
        references_in,
        refuse_images,
    )

__all__ = [
    "IMAGES",
    "REFERENCE",
    "ImageReading",
    "ImageStore",
    "check_image",
    "decode_image",
    "endpoint",
    "fetch_config",
    "image_format",
    "is_cached",
    "is_image",
    "is_reachable",
    "problem_of",
    "references_in",
    "refuse_images",
]

__getattr__ = lazily(__name__)
