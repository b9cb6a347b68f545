"""Token ids and loss masks of many examples, back to back: in memory, or mapped from files.

TokenStore      one source, as it was tokenised
ExampleSet      the examples of several sources that are trained on, each cut to a longest length
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from skyrl_train.images import Image, ImageSpan, ImageSpans

Ints = NDArray[np.int64]


class PlacedReference(NamedTuple):
    """An image among an example's tokens, by its reference: what it looks like is read when it is trained on."""

    start: int
    num_tokens: int
    reference: str


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStore:
    """Example i is the tokens `offsets[i]` to `offsets[i + 1] - 1`."""

    input_ids: NDArray[np.int32]
    """`[tokens]`."""
    loss_mask: NDArray[np.bool_]
    """`[tokens]`: True where the token is trained on. Never an example's first, which nothing predicts."""
    offsets: Ints
    """`[examples + 1]`."""
    images: tuple[tuple[PlacedReference, ...], ...] = ()
    """Of each example its images; empty where no example has any."""

    @property
    def num_examples(self) -> int:
        return len(self.offsets) - 1

    def first_cut_image(self, max_length: int) -> int | None:
        """Return the first example of which an image is not within so many tokens."""
        ends = (placed[-1].start + placed[-1].num_tokens if placed else 0 for placed in self.images)
        return next((row for row, end in enumerate(ends) if end > max_length), None)


@dataclass(frozen=True, kw_only=True)
class Flat:
    """Some examples, one after the other."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    lengths: Ints
    """`[examples]`."""


@dataclass(frozen=True, kw_only=True)
class SourcePart:
    """What is used of one source."""

    name: str
    store: TokenStore
    rows: Ints
    """`[kept]`: example numbers in the store."""
    max_length: int
    """Tokens; longer examples are cut there."""


class ExampleSet:
    """Examples of one or several sources under one numbering: those of the first source, then the second, and so on."""

    def __init__(self, parts: Sequence[SourcePart], read_image: Callable[[str], Image] | None = None) -> None:
        """`read_image` gives the image of a reference, where stores have some."""
        self.parts = tuple(parts)
        self._read_image = read_image
        self.lengths: Ints = _concatenate(
            [np.minimum(np.diff(part.store.offsets)[part.rows], part.max_length) for part in self.parts]
        )
        """`[examples]`, tokens of each as they are trained on."""
        self._first: Ints = np.cumsum([0, *[len(part.rows) for part in self.parts]])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def source_sizes(self) -> tuple[int, ...]:
        """How many examples each source has."""
        return tuple(len(part.rows) for part in self.parts)

    def name(self, index: int) -> str:
        """`train-17`: the source and the row in it, stable between runs."""
        part, row = self._locate(index)
        return f"{part.name}-{row}"

    def gather(self, indices: Ints) -> Flat:
        """Return the examples `indices`, in that order."""
        lengths = self.lengths[indices]
        starts = np.cumsum(lengths) - lengths
        input_ids = np.empty(int(lengths.sum()), dtype=np.int32)
        loss_mask = np.empty(len(input_ids), dtype=np.bool_)
        source_of = np.searchsorted(self._first, indices, side="right") - 1
        for number, part in enumerate(self.parts):
            chosen = np.flatnonzero(source_of == number)
            if not len(chosen):
                continue
            rows = part.rows[indices[chosen] - self._first[number]]
            source = ranges(part.store.offsets[rows], lengths[chosen])
            target = ranges(starts[chosen], lengths[chosen])
            input_ids[target] = part.store.input_ids[source]
            loss_mask[target] = part.store.loss_mask[source]
        return Flat(input_ids=input_ids, loss_mask=loss_mask, lengths=lengths)

    def images(self, indices: Ints) -> tuple[ImageSpans, ...]:
        """Return the images of each of the examples `indices`; nothing where no source has any."""
        read = self._read_image
        if read is None or not any(part.store.images for part in self.parts):
            return ()
        found: list[ImageSpans] = []
        for index in indices.tolist():
            part, row = self._locate(index)
            placed = part.store.images[row] if part.store.images else ()
            found.append(tuple(ImageSpan(each.start, read(each.reference)) for each in placed))
        return tuple(found)

    def _locate(self, index: int) -> tuple[SourcePart, int]:
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        part = self.parts[number]
        return part, int(part.rows[index - self._first[number]])


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """`starts[0], starts[0] + 1, ...` (`lengths[0]` of them), then the same from `starts[1]`, and so on."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    result: Ints = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return result


def store_of(examples: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> TokenStore:
    """Return a store in memory, made of token ids and loss masks."""
    pairs = list(examples)
    return TokenStore(
        input_ids=_concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in pairs], np.int32),
        loss_mask=_concatenate([np.asarray(mask, dtype=np.bool_) for _, mask in pairs], np.bool_),
        offsets=np.cumsum([0, *[len(ids) for ids, _ in pairs]], dtype=np.int64),
    )


def _concatenate(parts: Sequence[NDArray[Any]], dtype: Any = np.int64) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
