"""Images of a conversation as a model reads them: processed once, placed among tokens, counted as tokens.

A prompt's token ids hold a run of placeholder tokens for each image, as many as the model makes of it, so that whatever
counts tokens counts images with them. Which image a run stands for is said beside the ids:

    ids      7 8 P P P P 9        P: the family's placeholder
    spans    [2, 6): image 3f..   a placeholder outside of all spans is a token like any other: a policy may sample it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

_KEY_BITS = 60
_KEY = re.compile(r"[0-9a-f]{64}")
_NO_PIXELS = np.zeros((0, 0), np.float32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Image:
    """One image as the processor of a model's family makes it. Two are equal where their keys are."""

    key: str
    """SHA-256 of the encoded image, in hexadecimal."""
    pixels: NDArray[np.float32] = field(default_factory=lambda: _NO_PIXELS)
    """What the vision tower takes: `[patches, numbers]` (Qwen2.5-VL) or `[channels, height, width]` (Gemma 3). Empty where a
    record named the image, and it was not read yet (`with_pixels`)."""
    patches: tuple[int, int, int] | None = None
    """Frames, rows and columns of patches, where the tower is told them."""
    grid: tuple[int, int] | None = None
    """Rows and columns of its tokens, where they have positions of their own; None where they are counted as text."""
    num_tokens: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image, and where its first token stands."""

    start: int
    image: Image

    @property
    def stop(self) -> int:
        """One past its last token."""
        return self.start + self.image.num_tokens

    def moved(self, by: int) -> ImageSpan:
        """The same image `by` tokens further on."""
        return ImageSpan(self.start + by, self.image)


ImageSpans: TypeAlias = tuple[ImageSpan, ...]
"""In the order of their tokens."""


def check_spans(spans: Iterable[ImageSpan], num_tokens: int) -> ImageSpans:
    """Return the spans. Raises ValueError where they overlap, or are not among so many tokens."""
    found, end = tuple(spans), 0
    for span in found:
        if span.start < end or span.stop > num_tokens:
            raise ValueError(
                f"an image has the tokens {span.start} to {span.stop - 1}, of {num_tokens} tokens from {end} on"
            )
        end = span.stop
    return found


def between(spans: ImageSpans, start: int, stop: int) -> ImageSpans:
    """Return the spans that lie in `[start, stop)`, counted from `start`."""
    return tuple(span.moved(-start) for span in spans if start <= span.start and span.stop <= stop)


def find_spans(token_ids: Sequence[int], placeholder: int, images: Sequence[Image], start: int = 0) -> ImageSpans:
    """Return where `images` stand in `token_ids` from `start` on, whose runs of placeholders are theirs, in order.

    Raises ValueError where there are more placeholders than they have tokens, or fewer.
    """
    spans: list[ImageSpan] = []
    index, left = start, list(images)
    while index < len(token_ids):
        if token_ids[index] != placeholder:
            index += 1
            continue
        image = left.pop(0) if left else None
        size = image.num_tokens if image is not None else 0
        if image is None or any(each != placeholder for each in token_ids[index : index + size]):
            break
        spans.append(ImageSpan(index, image))
        index += size
    if index < len(token_ids) or left:
        raise ValueError(
            f"{len(images)} images, and the placeholders (token {placeholder}) of {len(spans)} of them in the prompt: texts "
            "must not hold the placeholder, and the chat template must write one for each image"
        )
    return tuple(spans)


def expanded(token_ids: Sequence[int], placeholder: int, images: Sequence[Image]) -> list[int]:
    """Return the ids with as many placeholders for each image as it has tokens; a template writes one.

    Raises ValueError where there are not as many placeholders as images.
    """
    count = sum(each == placeholder for each in token_ids)
    if count != len(images):
        raise ValueError(
            f"the prompt has {count} placeholders (token {placeholder}) for {len(images)} images: texts must not hold the "
            "placeholder, and the chat template must write one for each image"
        )
    sizes = iter(images)
    return [
        each for token in token_ids for each in ([token] * next(sizes).num_tokens if token == placeholder else [token])
    ]


def content_ids(token_ids: Sequence[int], spans: ImageSpans) -> tuple[int, ...]:
    """Return ids under which equal prefixes have equal contents: in place of a placeholder stands a number below 0 that
    comes of its image's key and of its place in it."""
    found = list(token_ids)
    for span in spans:
        base = -(int(span.image.key, 16) >> (256 - _KEY_BITS)) - 1
        found[span.start : span.stop] = range(base, base - span.image.num_tokens, -1)
    return tuple(found)


def image_positions(length: int, spans: ImageSpans) -> NDArray[np.int64]:
    """`[3, length]`: frame, row and column position of each token (multimodal rotary positions, arXiv:2409.12191).

    A text token stands one further than the largest before it, in all three; the tokens of an image begin there and count
    rows and columns. Images without a `grid` are counted as text.
    """
    found = np.tile(np.arange(length, dtype=np.int64), (3, 1))
    for start, stop, grid in ((span.start, span.stop, span.image.grid) for span in spans):
        if grid is None:
            continue
        first = int(found[0, start])
        rows, columns = np.divmod(np.arange(stop - start), grid[1])
        found[:, start:stop] = first
        found[1, start:stop] += rows
        found[2, start:stop] += columns
        found[:, stop:] += max(grid) - (stop - start)
    return found


def precedes_image(length: int, spans: ImageSpans) -> NDArray[np.bool_]:
    """`[length]`: whether the token behind each is one of an image, which nothing predicts."""
    found = np.zeros(length, np.bool_)
    for span in spans:
        found[max(0, span.start - 1) : span.stop - 1] = True
    return found


def position_offset(spans: ImageSpans) -> int:
    """Return how much further than its number the token behind these images stands; mostly below 0."""
    return sum(max(span.image.grid) - span.image.num_tokens for span in spans if span.image.grid is not None)


def distinct(spans: Iterable[ImageSpan]) -> dict[Image, int]:
    """Return each image once, with the number of its first token where their tokens lie one after the other."""
    found: dict[Image, int] = {}
    size = 0
    for span in spans:
        if span.image not in found:
            found[span.image] = size
            size += span.image.num_tokens
    return found


def as_record(spans: ImageSpans) -> list[list[Any]]:
    """Return the spans as JSON takes them: `[start, tokens, key]` each."""
    return [[span.start, span.image.num_tokens, span.image.key] for span in spans]


def from_record(record: object) -> ImageSpans:
    """Return what `as_record` gave, whose images have no pixels. Raises ValueError for anything else."""
    found: list[ImageSpan] = []
    parts: list[Any] = record if isinstance(record, list) else [record]
    for each in parts:
        kinds = [type(part) for part in each] if isinstance(each, list) else []
        if kinds != [int, int, str] or each[0] < 0 or each[1] < 1 or not _KEY.fullmatch(each[2]):
            raise ValueError(f"images must be lists [start, tokens, SHA-256 sum]; got {each!r:.80}")
        found.append(ImageSpan(each[0], Image(key=each[2], num_tokens=each[1])))
    return tuple(found)


def with_pixels(spans: ImageSpans, read: Callable[[str], Image]) -> ImageSpans:
    """Return the spans with the images that a record named as `read` gives them by their keys.

    Raises ValueError where the model makes another number of tokens of one than it has in the record.
    """
    found = []
    for span in spans:
        image = span.image if span.image.pixels.size else read(span.image.key)
        if image.num_tokens != span.image.num_tokens:
            raise ValueError(
                f"image sha256:{image.key} has {span.image.num_tokens} tokens in the record, and this model's processor "
                f"makes {image.num_tokens} of it. Give the model, and its processor, that the record was made with"
            )
        found.append(ImageSpan(span.start, image))
    return tuple(found)
