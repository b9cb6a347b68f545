"""Images of a prompt in vLLM's words.

vLLM is handed what the trainer computes with, pixels that were processed and the tokens that stand for them. Its own
processor, which would process with torchvision's arithmetic and expand placeholders that a policy may have sampled, sees
neither.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_train.errors import ModelError
from skyrl_train.images import Image
from skyrl_train.model.vision import family_of
from skyrl_train.types import GenerationRequest


def image_arguments(folder: Path, *, on_gpu: bool) -> dict[str, Any]:
    """Return arguments of `vllm.EngineArgs` for a model that reads images; none for any other.

    Raises ModelError where vLLM cannot load it.
    """
    kind = family_of(folder)
    if not kind:
        return {}
    if find_spec("torchvision") is None:
        raise ModelError(
            f"model path {str(folder)!r}: vLLM's {kind} needs torchvision, which is not installed. Install its build for "
            "this torch (docs/vision.md), or set generator=hf"
        )
    arguments: dict[str, Any] = {
        "limit_mm_per_prompt": {"video": 0},
        # Every request brings its pixels; which are the same the cache of the tower's features tells by their sum.
        "mm_processor_cache_gb": 0,
    }
    if not on_gpu:
        # The largest image there can be would be computed to see how much memory is left for keys and values: that is given.
        arguments["skip_mm_profiling"] = True
    return arguments


def prompt_with_images(request: GenerationRequest) -> dict[str, Any]:
    """Return a prompt as `LLMEngine.add_request` takes one that has been processed."""
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    images = [span.image for span in request.images]
    return dict(
        mm_input(
            prompt_token_ids=list(request.prompt_token_ids),
            mm_kwargs=MultiModalKwargsItems({"image": [_item(image) for image in images]}),
            mm_hashes={"image": [image.key for image in images]},
            mm_placeholders={
                "image": [PlaceholderRange(offset=span.start, length=span.image.num_tokens) for span in request.images]
            },
        )
    )


def _item(image: Image) -> Any:
    """One image of Qwen2.5-VL: its patches, flat, and how many there are of them each way."""
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalFlatField,
        MultiModalKwargsItem,
    )

    pixels = torch.from_numpy(np.ascontiguousarray(image.pixels))
    flat = MultiModalFlatField(slices=[slice(0, len(pixels))])
    batched = MultiModalBatchedField(keep_on_cpu=True)
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(data=pixels, field=flat),
            "image_grid_thw": MultiModalFieldElem(data=torch.tensor(image.patches), field=batched),
        }
    )
