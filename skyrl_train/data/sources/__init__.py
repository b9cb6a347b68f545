"""Where rows and pictures come from: files, folders and the Hugging Face hub."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.data.sources.hub import (
        endpoint as endpoint,
        fetch_config as fetch_config,
        is_cached as is_cached,
        is_reachable as is_reachable,
        problem_of as problem_of,
    )
    from skyrl_train.data.sources.images import (
        IMAGES as IMAGES,
        REFERENCE as REFERENCE,
        ImageReading as ImageReading,
        ImageStore as ImageStore,
        check_image as check_image,
        decode_image as decode_image,
        image_format as image_format,
        is_image as is_image,
        references_in as references_in,
        refuse_images as refuse_images,
    )

__getattr__ = lazily(__name__)
