"""A request with images to a vLLM server: token ids and processed pixels, to its interface of tokens.

The interface of completions takes no images, that of chats writes the tokens itself and processes the images anew. This one
(`--enable-scale-out`) takes what the trainer computes with: each image as vLLM writes it between servers of its own, as
MessagePack in base64, in which a tensor is its type, its shape and its bytes.
"""

from __future__ import annotations

import base64
from functools import lru_cache
from typing import Any

import msgpack  # type: ignore[import-untyped]  # which ray needs, too
import numpy as np
from numpy.typing import NDArray

from skyrl_train.images import Image
from skyrl_train.types import GenerationRequest

PATH = "/inference/v1/generate"
_RAW_BYTES = 3
"""vLLM's code for the bytes of a tensor."""
_ENCODED = 64
"""Encoded images that are kept: samples of one prompt come one after the other."""


def image_body(request: GenerationRequest, completion: dict[str, Any]) -> dict[str, Any]:
    """Return what is asked of `PATH`; `completion` is what `/v1/completions` would be asked."""
    sampling = dict(completion)
    for name in ("model", "prompt", "return_token_ids", "request_id"):
        del sampling[name]
    images = [span.image for span in request.images]
    return {
        "model": completion["model"],
        "request_id": request.request_id,
        "token_ids": list(request.prompt_token_ids),
        "sampling_params": {**sampling, "stop": sampling["stop"] or [], "detokenize": bool(sampling["stop"])},
        "features": {
            "mm_hashes": {"image": [image.key for image in images]},
            "mm_placeholders": {
                "image": [{"offset": span.start, "length": span.image.num_tokens} for span in request.images]
            },
            "kwargs_data": {"image": [_encoded(image) for image in images]},
        },
    }


def as_completion(body: Any) -> Any:
    """Return an answer of `PATH` in the form of one of `/v1/completions`; one of another form as it is."""
    try:
        choice = body["choices"][0]
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        return {"choices": [{**choice, "logprobs": {"token_logprobs": logprobs}}]}
    except (KeyError, IndexError, TypeError):
        return body


@lru_cache(maxsize=_ENCODED)
def _encoded(image: Image) -> str:
    """One image of Qwen2.5-VL: its patches, flat, and how many there are of them each way."""
    grid = np.array(image.patches, dtype=np.int64)
    flat = {"keep_on_cpu": False, "slices": [[0, len(image.pixels), None]], "dim": 0}
    item = {
        "pixel_values": {"data": _tensor(image.pixels), "field": ["flat", flat]},
        "image_grid_thw": {"data": _tensor(grid), "field": ["batched", {"keep_on_cpu": True}]},
    }
    return base64.b64encode(msgpack.packb(item)).decode("ascii")


def _tensor(array: NDArray[Any]) -> list[Any]:
    return [array.dtype.name, list(array.shape), msgpack.ExtType(_RAW_BYTES, array.tobytes())]
