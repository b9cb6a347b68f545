"""Images by their reference, for who assembles rows of recorded rollouts. What it gives travels to other processes, which
import no transformers unless an image is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from skyrl_train.config.data import ImagesConfig
from skyrl_train.config.models import ModelConfig
from skyrl_train.data.sources import ImageReading
from skyrl_train.errors import ModelError
from skyrl_train.images import Image
from skyrl_train.model import files


def image_reader(model: ModelConfig, settings: ImagesConfig) -> Callable[[str], Image]:
    """Return what gives an image by its reference, or its sum. The model's folder is looked at when the first is asked for:
    ModelError is raised then where it reads none."""

    return _Reader(model, settings)


@dataclass(frozen=True)
class _Reader:
    """What `image_reader` gives; it travels to other processes."""

    model: ModelConfig
    settings: ImagesConfig

    def __call__(self, reference: str) -> Image:
        return self._reading.read(reference)

    @cached_property
    def _reading(self) -> ImageReading:
        found = files.image_reading(self.model, self.settings)
        if found is None:
            raise ModelError(
                f"model path {self.model.path!r} reads no images, and rollouts have some. Give one that does"
            )
        return found
