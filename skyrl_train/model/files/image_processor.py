"""The image processor of a model's family: encoded images to what its vision tower takes, and how many tokens that is.

Of transformers' processors those are taken that need Pillow and numpy alone; torchvision is not needed.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoImageProcessor

from skyrl_train.config.data import ImagesConfig
from skyrl_train.config.models import ModelConfig
from skyrl_train.data.sources import ImageReading, decode_image
from skyrl_train.errors import ModelError
from skyrl_train.images import Image
from skyrl_train.model.causal_lm import quiet_transformers, resolve_model_path
from skyrl_train.model.vision.models import FAMILIES, family_of

_PLACEHOLDERS = ("image_token_id", "image_token_index")


def image_reading(model: ModelConfig, settings: ImagesConfig) -> ImageReading | None:
    """Return how images of conversations are read for this model; None where it reads none.

    Raises ModelError where the model's folder lacks its processor.
    """
    folder = resolve_model_path(model.path, model.revision)
    if not family_of(folder):
        return None
    processor = FamilyProcessor.of(folder)
    return ImageReading(processor.placeholder, processor, settings, marks=processor.marks)


def pads_rows(model: ModelConfig) -> bool:
    """Whether rows with images are exact for this model in the padded layout alone."""
    kind = family_of(resolve_model_path(model.path, model.revision))
    return bool(kind) and FAMILIES[kind].sees_whole_images


class FamilyProcessor:
    """`(encoded image, key) -> Image`."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError where the folder lacks what it needs."""
        kind = family_of(folder)
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.placeholder = next(int(config[name]) for name in _PLACEHOLDERS if config.get(name) is not None)
        marks = [config.get(name) for name in ("boi_token_index", "eoi_token_index")]
        self.marks = (int(marks[0]), int(marks[1])) if marks[0] is not None and marks[1] is not None else None
        self._has_grid = FAMILIES[kind].rotary
        self._merge = int(config["vision_config"].get("spatial_merge_size", 1))
        self._tokens = int(config.get("mm_tokens_per_image") or 0)
        try:
            with quiet_transformers():
                load: Any = AutoImageProcessor.from_pretrained
                self._processor: Any = load(str(folder), local_files_only=True, backend="pil")
        except Exception as error:
            raise ModelError(
                f"model path {str(folder)!r}: its image processor cannot be loaded ({type(error).__name__}: {error}). It "
                "needs preprocessor_config.json beside the model, and Pillow: pip install pillow"
            ) from error

    @staticmethod
    @cache
    def of(folder: Path) -> FamilyProcessor:
        """Return the one of a folder."""
        return FamilyProcessor(folder)

    def __call__(self, data: bytes, key: str) -> Image:
        """Return the image. Raises ValueError for one that the processor refuses, such as one much wider than high."""
        found = self._processor(images=[decode_image(data)], return_tensors="np")
        pixels = np.asarray(found["pixel_values"], dtype=np.float32)
        if not self._has_grid:
            return Image(key=key, pixels=pixels[0], num_tokens=self._tokens)
        frames, rows, columns = (int(each) for each in found["image_grid_thw"][0])
        grid = rows // self._merge, columns // self._merge
        patches = frames, rows, columns
        return Image(key=key, pixels=pixels, patches=patches, grid=grid, num_tokens=frames * grid[0] * grid[1])
