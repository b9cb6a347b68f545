"""From examples that state a target at each of their tokens, or several, to the rows of a pass, and from what the pass found
back to the examples.

Where targets are the next tokens, as they are in nearly all examples, an example is one row: its tokens and the last target.
Any other target is a row of its own that ends with it. The pass computes common beginnings once where its layout shares
them, and nothing behind it needs to know.

    tokens  a b c     targets  b c d    ->  rows  a b c d
    tokens  a b c     targets  b x d    ->  rows  a b c d,  a b x        (of the first, c carries no loss)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_train.batch.training_batch import TrainingInputBatch, batch_of_lengths
from skyrl_train.errors import BatchError
from skyrl_train.images import ImageSpans, between, precedes_image

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Targets:
    """One example as token ids, each with what it predicts and how it counts."""

    token_ids: Ints
    """`[n]`"""
    targets: Ints
    """`[n]` or `[n, k]`"""
    weights: Floats
    """Of the shape of `targets`, as the others. Of several at a position, those of weight 0 are left out, unless all are."""
    old_logprobs: Floats
    advantages: Floats
    images: ImageSpans = ()
    """Among the tokens. Targets that stand for tokens of images are not computed, whatever they are."""


@dataclass(frozen=True, kw_only=True)
class TargetRows:
    """Examples as rows of a training batch, and where each of them went."""

    batch: TrainingInputBatch | None
    """With `loss_weights`, `old_logprobs` and `advantages`; None where no example has any target."""
    places: Ints
    """`[number of targets that are computed]`: where each is among the batch's tokens."""
    targets: Ints
    """`[the same]`: and among all targets of all examples, one example after the other."""
    shapes: Sequence[tuple[int, ...]]
    """Of the targets of each example."""

    def spread(self, found: Tensor) -> list[Floats]:
        """Return numbers of the batch's tokens `[num_tokens]` as numbers of each example's targets; 0 where nothing was
        computed."""
        ends = np.cumsum([0, *(int(np.prod(shape)) for shape in self.shapes)])
        flat = np.zeros(ends[-1], np.float32)
        with np.errstate(over="ignore"):  # infinite is what it is then
            flat[self.targets] = found.numpy()[self.places]
        return [flat[ends[i] : ends[i + 1]].reshape(shape) for i, shape in enumerate(self.shapes)]


@dataclass
class _Rows:
    """Rows as they are collected."""

    max_tokens: int
    tokens: list[Ints] = field(default_factory=list)
    num_tokens: int = 0
    places: list[Ints] = field(default_factory=list)
    targets: list[Ints] = field(default_factory=list)
    images: list[ImageSpans] = field(default_factory=list)

    def add(self, tokens: Ints, places: Ints, targets: Ints, images: ImageSpans) -> None:
        """A row with targets at these places of it, and with those of the images that are within it."""
        self.images.append(between(images, 0, len(tokens)))
        self.places.append(places + self.num_tokens)
        self.targets.append(targets)
        self.tokens.append(tokens)
        self.num_tokens += len(tokens)
        if self.num_tokens > self.max_tokens:
            raise BatchError(f"the examples become more than {self.max_tokens} tokens; give fewer at once")


def rows_of_targets(examples: Sequence[Targets], *, max_tokens: int = 1 << 22) -> TargetRows:
    """Return the rows of a pass. Raises BatchError where they have more than `max_tokens`."""
    rows, before = _Rows(max_tokens), 0
    for each in examples:
        _add_rows(rows, each, before)
        before += each.targets.size
    places, chosen = _joined(rows.places), _joined(rows.targets)
    shapes = [each.targets.shape for each in examples]
    if not len(places):
        return TargetRows(batch=None, places=places, targets=chosen, shapes=shapes)

    def column(values: Sequence[Floats], dtype: torch.dtype) -> Tensor:
        whole = torch.zeros(rows.num_tokens, dtype=dtype)
        flat = np.concatenate([each.reshape(-1) for each in values])[chosen]
        whole[torch.from_numpy(places)] = torch.from_numpy(flat).to(dtype)
        return whole

    mask = torch.zeros(rows.num_tokens, dtype=torch.bool)
    mask[torch.from_numpy(places)] = True
    batch = batch_of_lengths([len(each) for each in rows.tokens]).with_columns(
        # Whose samples examples are is not stated: as rows of one prompt they share whatever beginnings they have, and
        # planners cut them where a forward is full.
        prompt_index=torch.zeros(len(rows.tokens), dtype=torch.int32),
        input_ids=torch.from_numpy(np.concatenate(rows.tokens)).to(torch.int32),
        loss_mask=mask,
        old_logprobs=column([each.old_logprobs for each in examples], torch.float32),
        advantages=column([each.advantages for each in examples], torch.float32),
        loss_weights=column([each.weights for each in examples], torch.float64),
    )
    images = tuple(rows.images) if any(rows.images) else ()
    batch = replace(batch, metadata=replace(batch.metadata, uids=("examples",) * batch.num_rows, images=images))
    return TargetRows(batch=batch, places=places, targets=chosen, shapes=shapes)


def _add_rows(rows: _Rows, example: Targets, before: int) -> None:
    """The rows of one example, whose first target is number `before` of all."""
    tokens, targets = example.token_ids, example.targets
    if not targets.size:
        return
    is_text = ~precedes_image(len(tokens), example.images)
    if targets.ndim == 1:
        # The last target has no token behind it that it could differ from: the row ends with it.
        is_next = np.append(targets[:-1] == tokens[1:], True)
        main = np.flatnonzero(is_next & is_text)
        # A target is the token behind the one that predicts it: place i + 1 of the row.
        rows.add(np.append(tokens, targets[-1]), main + 1, before + main, example.images)
        others = np.argwhere(~is_next & is_text)
    else:
        weighs = example.weights != 0
        # A custom loss first asks for log-probabilities by weights that are all 0.
        others = np.argwhere((weighs if weighs.any() else np.ones_like(weighs)) & is_text[:, None])
    for cell in others:
        at = int(cell[0])
        number = at if targets.ndim == 1 else at * targets.shape[1] + int(cell[1])
        row = np.append(tokens[: at + 1], targets[tuple(cell)])
        rows.add(row, np.array([at + 1]), np.array([before + number]), example.images)


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *parts])
