"""Images that messages name by their sums: read from a run's `images/` and nowhere else, and decoded before they are shown.

A name is a sum, so that it leads to no other folder; what is in the file is decoded, so that neither its name nor its own
word says what it is, and what a browser would run (SVG, HTML) is none.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from skyrl_train.config.data import ImagesConfig
from skyrl_train.data.sources import REFERENCE, check_image, decode_image, image_format, is_image
from skyrl_train.telemetry.reading import Run
from skyrl_train.view.filters import NotThereError

_SUM = re.compile(r"[0-9a-f]{64}")
_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}
"""What browsers show; images of other formats are handed on as PNG."""
_LIMITS = ImagesConfig()


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image as a browser shows it."""

    data: bytes
    media_type: str

    def url(self) -> str:
        """Return it as a `data:` URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"


def read_picture(run: Run, name: str) -> Picture:
    """Return the image of a sum. Raises ValueError for a name that is none, and for a file that is damaged or no image;
    NotThereError where there is no such file."""
    if not _SUM.fullmatch(name):
        raise ValueError(f"sum={name[:80]} must be the SHA-256 sum of an image")
    file = run.folder.images / name
    try:
        if file.stat().st_size > _LIMITS.max_bytes:
            raise ValueError(f"image {name[:12]} is too large to be shown: {file.stat().st_size:,} bytes")
        data = file.read_bytes()
    except OSError as error:
        raise NotThereError(f"image {name[:12]} is missing: images/ of {run.id} does not have it") from error
    if hashlib.sha256(data).hexdigest() != name:
        raise ValueError(f"image {name[:12]} is damaged: its file was changed")
    try:
        check_image(data, max_pixels=_LIMITS.max_pixels)
    except ValueError as error:
        raise ValueError(f"image {name[:12]} cannot be shown: {error}") from error
    media_type = _TYPES.get(image_format(data))
    if media_type is not None:
        return Picture(data=data, media_type=media_type)
    out = io.BytesIO()
    decode_image(data).save(out, format="PNG")
    return Picture(data=out.getvalue(), media_type="image/png")


def sums_in(answer: object) -> Iterator[str]:
    """Yield the sums of all images that messages somewhere in an answer name."""
    if isinstance(answer, Mapping):
        reference = answer.get("image")
        if is_image(answer) and isinstance(reference, str) and reference.startswith(REFERENCE):
            yield reference.removeprefix(REFERENCE)
        for each in answer.values():
            yield from sums_in(each)
    elif isinstance(answer, list):
        for each in answer:
            yield from sums_in(each)
