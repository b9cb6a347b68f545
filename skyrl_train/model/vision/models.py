"""How a model's forward reads images: features of the vision tower in place of placeholder tokens.

    images of a forward, each once --vision tower--> features --at their positions--> embeddings of the ids --> layers

The language model inside is what layouts drive, as any other. Images take effect through one hook before the forward of
the part that has both: it embeds the ids, puts the features where `showing` (rows of a batch) or `Shown` (an engine's
prompts) says, and gives positions, and where the family asks for it a mask, of the family's own.

Families: Qwen2.5-VL, whose image tokens have positions of three numbers and attend causally, so that every layout is
exact; Gemma 3, in which the tokens of an image see one another, so that rows are padded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from skyrl_train.batch import TrainingInputBatch, moved, sequence_offsets
from skyrl_train.batch.layouts import Layout
from skyrl_train.errors import BatchError, ModelError
from skyrl_train.images import Image, ImageSpan, ImageSpans, between, distinct, image_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VISION = "_skyrl_vision"
"""Attribute of a model that reads images."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is particular about the images of one family of models."""

    tower: tuple[str, ...]
    """Parts of the base model that images go through, and nothing else does."""
    rotary: bool
    """Whether image tokens have a row's and a column's position; else they are counted as text."""
    sees_whole_images: bool
    """Whether each token of an image sees all others of it."""
    kept: tuple[int, int]
    """Numbers of a patch that a layer of the tower keeps for its backward pass: so many times its hidden size, and so many
    times the size within its two or three matrices after attention."""


FAMILIES = {
    "qwen2_5_vl": Family(tower=("visual",), rotary=True, sees_whole_images=False, kept=(13, 4)),
    "gemma3": Family(
        tower=("vision_tower", "multi_modal_projector"), rotary=False, sees_whole_images=True, kept=(8, 2)
    ),
}
"""By `model_type`."""


def family_of(folder: Path) -> str:
    """Return the `model_type` of a model of images and text that this package knows; empty for any other."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = str(config.get("model_type"))
        return kind if kind in FAMILIES and isinstance(config.get("vision_config"), dict) else ""
    except (OSError, ValueError, AttributeError):
        return ""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The images of one forward, on its device."""

    images: tuple[Image, ...]
    """Each once."""
    positions: Tensor
    """int64 `[image tokens]`: places in `input_ids.flatten()`, each once."""
    features: Tensor
    """int64 `[image tokens]`: which feature of all images, one after the other, stands there."""
    position_ids: Tensor | None
    """int64 `[3, rows, width]`, where the family has such positions."""
    blocks: Tensor | None
    """int64 `[rows, width]`: the number of the image that a token is of, -1 for text, where the family sees whole images."""


class Vision:
    """The part of a model that reads images. `given` is what the forward that runs is shown."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.family = FAMILIES[str(model.config.model_type)]
        self.given: Shown | None = None
        self._base: Any = model.base_model
        self._base.register_forward_pre_hook(self._before, with_kwargs=True)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield those of the vision tower; while a sharded model computes, the whole ones."""
        for name in self.family.tower:
            yield from getattr(self._base, name).parameters()

    def module_names(self, model: nn.Module) -> list[str]:
        """Return the names that linear layers of the vision tower have in `model`."""
        own = {id(part) for name in self.family.tower for part in getattr(self._base, name).modules()}
        return [name for name, part in model.named_modules() if id(part) in own and isinstance(part, nn.Linear)]

    def _before(self, _module: nn.Module, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        ids, given = named.get("input_ids"), self.given
        trained = [each for each in self.parameters() if each.requires_grad] if torch.is_grad_enabled() else []
        if ids is None or (given is None and not trained) or named.get("pixel_values") is not None:
            return None
        embeddings: Tensor = self._base.get_input_embeddings()(ids)
        if trained:
            # Rows without images leave the tower a gradient of 0, not none, and so do those with images the parts of a
            # tower that no feature comes from: which rows share a forward, or are on which rank, decides neither what is
            # decayed nor what ranks exchange.
            embeddings = embeddings + sum(each.flatten()[0] for each in trained) * 0.0
        if given is None:
            return args, {**named, "input_ids": None, "inputs_embeds": embeddings}
        features = self._features(given.images, embeddings)[given.features]
        shape = embeddings.shape
        embeddings = embeddings.flatten(0, 1).index_copy(0, given.positions, features).view(shape)
        changed = {**named, "input_ids": None, "inputs_embeds": embeddings}
        if given.position_ids is not None:
            changed["position_ids"] = given.position_ids
        if given.blocks is not None:
            changed["attention_mask"] = self._masks(given.blocks, changed)
        return args, changed

    def _features(self, images: Sequence[Image], like: Tensor) -> Tensor:
        """`[image tokens, hidden]` of all images, one after the other."""
        if any(not image.pixels.size for image in images):
            raise BatchError("rows have images of a record that were not read: its model.path reads none")
        parts = [torch.from_numpy(np.ascontiguousarray(image.pixels)).to(like.device) for image in images]
        if self.family.rotary:
            grids = torch.tensor([image.patches for image in images], device=like.device)
            found = self._base.get_image_features(torch.cat(parts), grids, return_dict=True).pooler_output
            return torch.cat(tuple(found)).to(like.dtype)
        pixels = torch.stack(parts).to(next(self.parameters()).dtype)
        whole: Tensor = self._base.get_image_features(pixels, return_dict=True).pooler_output
        return whole.flatten(0, 1).to(like.dtype)

    def _masks(self, blocks: Tensor, named: dict[str, Any]) -> Any:
        from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

        make: Any = create_masks_for_vision_model
        if (seen := named.get("attention_mask")) is not None:
            # Columns that a cache holds come before those of this forward; transformers would have them come after.
            blocks = nn.functional.pad(blocks, (seen.shape[-1] - blocks.shape[-1], 0), value=-1)
        return make(
            config=self._base.config.get_text_config(),
            inputs_embeds=named["inputs_embeds"],
            attention_mask=named.get("attention_mask"),
            past_key_values=named.get("past_key_values"),
            position_ids=named.get("position_ids"),
            block_sequence_ids=blocks,
        )


def add_vision(model: PreTrainedModel) -> None:
    """Have forwards of a model of a known family read the images that they are shown; others are left alone. Idempotent."""
    reads = str(model.config.model_type) in FAMILIES and hasattr(model.base_model, "get_image_features")
    if reads and not hasattr(model, _VISION):
        setattr(model, _VISION, Vision(model))


def vision_of(model: nn.Module) -> Vision | None:
    """Return the part that reads images; None for a model without one."""
    return getattr(model, _VISION, None)


def freeze_vision(model: PreTrainedModel, *, name: str) -> None:
    """Leave the vision tower as it is in training. Raises ModelError for a model without one."""
    vision = vision_of(model)
    if vision is None:
        raise ModelError(
            f"model path {name!r}: model.freeze=[vision], and {type(model).__name__} reads no images. Leave it out"
        )
    for parameter in vision.parameters():
        parameter.requires_grad_(False)


@contextmanager
def showing(model: PreTrainedModel, rows: TrainingInputBatch, layout: Layout, device: torch.device) -> Iterator[None]:
    """Forwards of `layout` inside, and their backwards, read the images of `rows`. Rows and layout are on the CPU.

    Raises BatchError where the model reads none, or not in this layout.
    """
    vision = vision_of(model)
    if not rows.metadata.images:
        yield
        return
    if vision is None:
        raise BatchError(f"rows have images, and {type(model).__name__} reads none. Give model.path one that does")
    if vision.family.sees_whole_images and (layout.segments or layout.group):
        raise BatchError(
            f"{type(model).__name__}: the tokens of an image see one another, which {layout.name} rows do not compute. Set "
            "trainer.layout=padded and strategy.sequence_parallel_size=1"
        )
    vision.given = _shown_in(vision.family, rows, layout, device)
    try:
        yield
    finally:
        vision.given = None


@contextmanager
def shown(model: nn.Module, given: Shown | None) -> Iterator[None]:
    """Forwards inside read the images of `given`; None for none."""
    vision = vision_of(model)
    if vision is None or given is None:
        yield
        return
    vision.given = given
    try:
        yield
    finally:
        vision.given = None


def shown_prompts(
    model: nn.Module, prompts: Sequence[tuple[int, int, ImageSpans]], *, width: int, device: torch.device
) -> Shown | None:
    """Return what right-aligned prompts in rows of `width` tokens show; None where they show nothing.

    `prompts`: of each row the tokens of the whole prompt, how many of them are known from before and not in the row, and
    the images of the whole prompt. Raises ModelError for a model that reads no images.
    """
    vision = vision_of(model)
    if not any(spans for _, _, spans in prompts):
        return None
    if vision is None:
        raise ModelError(f"a prompt has images, and {type(model).__name__} reads none")
    placed: list[ImageSpan] = []
    position_ids = np.zeros((3, len(prompts), width), np.int64)
    for row, (length, known, spans) in enumerate(prompts):
        first = row * width + width - (length - known)
        placed += [span.moved(first - known) for span in spans if span.start >= known]
        position_ids[:, row, width - (length - known) :] = image_positions(length, spans)[:, known:]
    whole = vision.family.rotary
    return _shown(vision.family, placed, position_ids if whole else None, (len(prompts), width), device)


def _shown_in(family: Family, rows: TrainingInputBatch, layout: Layout, device: torch.device) -> Shown:
    spans = flat_spans(rows)
    tokens = torch.from_numpy(_ranges((span.start, span.stop) for span in spans))
    numbers = distinct(spans)
    features = _ranges((numbers[span.image], numbers[span.image] + span.image.num_tokens) for span in spans)
    places = layout.locate(layout.position_of_token[tokens]).numpy()
    # Tokens of several rows at one position are of the same image: the features come there once, and so does the gradient.
    places, one_of = np.unique(places, return_index=True)
    one_of, places = one_of[places >= 0], places[places >= 0]
    position_ids = None
    if family.rotary:
        of_tokens = torch.from_numpy(_token_positions(rows, spans))
        whole = of_tokens.new_zeros((3, layout.num_positions))
        whole[:, layout.position_of_token] = of_tokens
        position_ids = moved(torch.stack([layout.own_columns(each) for each in whole]), device)
    blocks = None
    if family.sees_whole_images:
        blocks = moved(_blocks(spans, layout.position_of_token, layout.input_ids.shape), device)
    return Shown(
        images=tuple(numbers),
        positions=moved(torch.from_numpy(places), device),
        features=moved(torch.from_numpy(features[one_of]), device),
        position_ids=position_ids,
        blocks=blocks,
    )


def _shown(
    family: Family, spans: Sequence[ImageSpan], position_ids: Any, shape: tuple[int, int], device: torch.device
) -> Shown:
    """What `spans`, of places in rows of `shape`, show."""
    numbers = distinct(spans)
    places = torch.from_numpy(_ranges((span.start, span.stop) for span in spans))
    features = _ranges((numbers[span.image], numbers[span.image] + span.image.num_tokens) for span in spans)
    everywhere = torch.arange(shape[0] * shape[1])
    return Shown(
        images=tuple(numbers),
        positions=places.to(device),
        features=torch.from_numpy(features).to(device),
        position_ids=None if position_ids is None else torch.from_numpy(position_ids).to(device),
        blocks=_blocks(spans, everywhere, shape).to(device) if family.sees_whole_images else None,
    )


def flat_spans(rows: TrainingInputBatch) -> list[ImageSpan]:
    """Return the images of all rows, by their places in the flat columns."""
    offsets = rows.row_offsets.tolist()
    return [span.moved(offset) for offset, spans in zip(offsets, rows.metadata.images) for span in spans]


def _token_positions(rows: TrainingInputBatch, spans: list[ImageSpan]) -> np.ndarray[Any, Any]:
    """`[3, num_tokens]`: the positions of each token within its sequence."""
    bounds = sequence_offsets(rows).tolist()
    found = np.empty((3, bounds[-1]), np.int64)
    left = list(reversed(spans))
    for start, stop in pairwise(bounds):
        own: list[ImageSpan] = []
        while left and left[-1].start < stop:
            own.append(left.pop())
        found[:, start:stop] = image_positions(stop - start, between(tuple(own), start, stop))
    return found


def _blocks(spans: Iterable[ImageSpan], position_of_token: Tensor, shape: Sequence[int]) -> Tensor:
    """int64 of `shape`: which image each position is of, -1 for text."""
    found = torch.full((int(np.prod(shape)),), -1, dtype=torch.int64)
    for number, span in enumerate(spans):
        found[position_of_token[span.start : span.stop]] = number
    return found.view(tuple(shape))


def _ranges(bounds: Iterable[tuple[int, int]]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.empty(0, np.int64), *(np.arange(start, stop) for start, stop in bounds)])
