"""Pictures as clients send them to a server, whole and damaged."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image as Pictures

from tests.support.serve_cases import Caller, datum
from tests.support.vision_runs import png

TOKENS, PICTURE = 4, png(0)
"""Tokens of a picture of 8 times 8 pixels, in both families."""


def image(data: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(data).decode(), "format": "png", **fields}


def text(*tokens: int) -> dict[str, Any]:
    return {"type": "encoded_text", "tokens": list(tokens)}


def shown(number: int = 0, *, weight: float = 0.0, **inputs: Sequence[float]) -> dict[str, Any]:
    """Two tokens, a picture and three tokens; the targets in its place are 0, as the cookbook has them."""
    weights = [1.0, *[weight] * TOKENS, 1.0, 1.0, 1.0, 1.0]
    made = datum([5, 6, *[0] * TOKENS, 7, 8, 9], [6, *[0] * TOKENS, 7, 8, 9, 3], weights=weights, **inputs)
    return {**made, "model_input": {"chunks": [text(5, 6), image(png(number)), text(7, 8, 9)]}}


def encoded(kind: str) -> bytes:
    out = io.BytesIO()
    Pictures.new("RGB", (8, 8)).save(out, format=kind)
    return out.getvalue()


def claiming(side: int) -> bytes:
    """The picture, whose head says that it has so many pixels each way."""
    head = b"IHDR" + side.to_bytes(4, "big") * 2 + PICTURE[24:29]
    return PICTURE[:12] + head + zlib.crc32(head).to_bytes(4, "big") + PICTURE[33:]


BAD: Mapping[str, tuple[dict[str, Any], str]] = {
    "a location": ({"type": "image_asset_pointer", "location": "file:///etc/passwd"}, "Send its bytes"),
    "no base64": ({**image(PICTURE), "data": "!!"}, "data in base64"),
    "no bytes": (image(b""), "not an image"),
    "text": (image(b"hello"), "not an image"),
    "half of a picture": (image(PICTURE[:50]), "damaged"),
    "another format than it says": (image(encoded("JPEG")), "it is JPEG, and its format is stated as 'png'"),
    "a format that is not read": (image(encoded("GIF"), format="gif"), "it is GIF"),
    "a bomb": (image(claiming(30_000)), "data is refused"),
    "too many pixels": (image(claiming(8_000)), "8000 x 8000 pixels; data.images.max_pixels=50000000"),
    "too many bytes": (image(PICTURE + b"\0" * 20_000_000), "data.images.max_bytes=20000000"),
    "another count of tokens": (image(PICTURE, expected_tokens=5), "expected_tokens=5, and it has 4; state 4"),
}
"""Chunks that are refused, and what is said of them."""


def settled(caller: Caller, promise: Mapping[str, Any]) -> Any:
    found = caller.outcome(promise)
    assert "error" not in found, found
    return found


def logprobs(found: Any) -> list[list[float]]:
    return [each["logprobs"]["data"] for each in found["loss_fn_outputs"]]


def sample(caller: Caller, sampler: str, chunks: Sequence[Any], **asked: Any) -> Any:
    """The answer to a request for samples: a promise, or why there is none."""
    sent = {"sampling_session_id": sampler, "seq_id": 0, "sampling_params": {"max_tokens": 6, "seed": 5}, **asked}
    return caller.send("asample", {**sent, "prompt": {"chunks": chunks}}, status=None)
