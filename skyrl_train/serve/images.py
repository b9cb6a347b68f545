"""Images that clients send, as the served model reads them. Decoders and limits are those of data sets (`data.images`)."""

from __future__ import annotations

import hashlib
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from skyrl_train.config.data import ImagesConfig
from skyrl_train.config.derived import LearnerSettings
from skyrl_train.data.sources import ImageReading, check_image, image_format
from skyrl_train.images import Image, ImageSpan, ImageSpans
from skyrl_train.model.files import image_reading, pads_rows
from skyrl_train.serve.refusals import Refused
from skyrl_train.serve.wire import SentImages
from skyrl_train.system.files import shown

PlacedTokens: TypeAlias = tuple[NDArray[np.int64], ImageSpans]
"""`[n]` tokens, with as many placeholders for each image as the model makes of it, and where images stand."""
_MAX_PIXEL_BYTES = 1 << 30
"""Of the images of one request as the model reads them, equal ones once."""
_FORMATS = {"PNG": "png", "JPEG": "jpeg", "MPO": "jpeg"}
"""From Pillow's names to the protocol's. MPO are JPEG files of several pictures, of which the first is read."""


def served_images(settings: LearnerSettings, limits: ImagesConfig) -> ImageReading | None:
    """Return how a model reads images; None where it reads none, or not in its rows' layout. Raises ModelError."""
    is_exact = settings.micro_batching.layout == "padded" or not pads_rows(settings.model)
    return image_reading(settings.model, limits) if is_exact else None


def require_taken(reading: ImageReading | None) -> ImageReading:
    """Return how images are read. Raises Refused where the served model takes none."""
    if reading is None:
        takes = "Leave them out, or have Qwen2.5-VL served, or with trainer.layout=padded Gemma 3"
        raise Refused(f"images are not taken: this model is served with text alone. {takes}")
    return reading


class RequestImages:
    """The images of one request, or of passes that are computed together, each of which is decoded once."""

    def __init__(self, reading: ImageReading | None) -> None:
        """`reading`: of the served model; None where it takes no images."""
        self._reading = reading
        self._images: dict[str, Image] = {}
        self._num_bytes = 0

    def placed(self, tokens: NDArray[np.int64], images: SentImages) -> PlacedTokens:
        """Return tokens of text with those of the images among them. Raises Refused."""
        if not images:
            return tokens, ()
        reading = require_taken(self._reading)
        found = [self._image(f"image {number}", sent, reading) for number, (_, sent) in enumerate(images)]
        starts, counts = [start for start, _ in images], [each.num_tokens for each in found]
        spans = tuple(map(ImageSpan, map(sum, zip(starts, accumulate(counts, initial=0))), found))
        return np.insert(tokens, np.repeat(starts, counts), reading.placeholder), spans

    def _image(self, place: str, sent: Any, reading: ImageReading) -> Image:
        stated = {field.name: value for field, value in sent.ListFields()}
        if "override_dimensions" in stated:
            raise Refused(f"{place}: override_dimensions is not read; scale the image itself")
        key = hashlib.sha256(sent.data).hexdigest()
        if key not in self._images:
            limits = reading.settings
            try:
                if len(sent.data) > limits.max_bytes:
                    raise ValueError(f"it has {len(sent.data):,} bytes; data.images.max_bytes={limits.max_bytes}")
                # Looked at before it is decoded: no decoder of another format begins.
                if _FORMATS.get(kind := image_format(sent.data)) != sent.format:
                    raise ValueError(f"it is {kind}, and its format is stated as {shown(sent.format)}")
                check_image(sent.data, max_pixels=limits.max_pixels)
                self._images[key] = reading.process(sent.data, key)
            except ValueError as error:
                raise Refused(
                    f"{place}: data is refused: {error}. Send a whole png or jpeg within the limits"
                ) from None
            self._num_bytes += self._images[key].pixels.nbytes
        if self._num_bytes > _MAX_PIXEL_BYTES:
            most = f"{_MAX_PIXEL_BYTES} at most: send fewer at once, or scale them"
            raise Refused(f"{place}: so far images are {self._num_bytes} bytes as the model reads them, of {most}")
        image = self._images[key]
        if stated.get("expected_tokens", image.num_tokens) != image.num_tokens:
            remedy = f"state {image.num_tokens}, or scale the image"
            raise Refused(f"{place}: expected_tokens={sent.expected_tokens}, and it has {image.num_tokens}; {remedy}")
        return image
