"""Images on their way to actors: each goes into the object store once, under its sum, and readers map it without copying.

process of the loop   SentImages.of(spans)  ->  where which image stands, and a reference to each
actor                 arrived(sent)         ->  spans, of images that it has already or reads now
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from skyrl_train.images import Image, ImageSpan, ImageSpans
from skyrl_train.types import GenerationRequest

_KEPT_BYTES = 2**31
"""Pixels that either side keeps for the next call, where a step has no more."""
_FETCH_S = 300.0
"""Deadline of reading images that are there, from another node perhaps."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Images of several rows, as references into Ray's object store."""

    rows: tuple[tuple[tuple[int, str], ...], ...] = ()
    """Of each row the first tokens and the sums of its images."""
    images: Mapping[str, Any]
    """Ray's reference to each image, by its sum."""


class _Kept(OrderedDict[str, tuple[int, Any]]):
    """What was used last, by sum, each with the bytes of its pixels."""

    def use(self, key: str) -> Any:
        """Return what is there, which is used now; None where nothing is."""
        if key not in self:
            return None
        self.move_to_end(key)
        return self[key][1]

    def drop(self, used: Mapping[str, Any]) -> None:
        """Drop what was not used for longest, beyond the bytes that are kept, and nothing of `used`."""
        left = sum(size for size, _ in self.values()) - _KEPT_BYTES
        for key in [each for each in self if each not in used]:
            if left <= 0:
                return
            left -= self.pop(key)[0]


class SentImages:
    """The images that this process has put into the object store of one session."""

    def __init__(self) -> None:
        self._references = _Kept()
        self.num_sent = 0
        """Images that were put there."""

    def of(self, rows: Sequence[ImageSpans]) -> Sent | None:
        """Return the images of rows in the form in which they travel; None where they have none."""
        if not any(rows):
            return None
        images: dict[str, Any] = {}
        for image in {span.image for spans in rows for span in spans}:
            reference = self._references.use(image.key)
            if reference is None:
                reference = ray.put(image)
                self._references[image.key] = image.pixels.nbytes, reference
                self.num_sent += 1
            images[image.key] = reference
        self._references.drop(images)
        return Sent(rows=tuple(tuple((span.start, span.image.key) for span in spans) for spans in rows), images=images)

    def parted(self, request: GenerationRequest) -> tuple[GenerationRequest, Sent | None]:
        """Return the request without its images, and these."""
        return replace(request, images=()), self.of((request.images,))


_ARRIVED = _Kept()
"""Of this actor."""


def arrived(sent: Sent | None) -> tuple[ImageSpans, ...]:
    """Return of each row its images. Raises ray.exceptions.GetTimeoutError."""
    if sent is None:
        return ()
    # Pixels are read where they lie, and nothing writes into them.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    missing = [key for key in sent.images if _ARRIVED.use(key) is None]
    found: list[Image] = ray.get([sent.images[key] for key in missing], timeout=_FETCH_S)
    for key, image in zip(missing, found):
        _ARRIVED[key] = image.pixels.nbytes, image
    _ARRIVED.drop(sent.images)
    return tuple(tuple(ImageSpan(start, _ARRIVED[key][1]) for start, key in row) for row in sent.rows)
