"""Encoded images of data rows and observations: read, checked, and named by what they hold.

    {"type": "image", "path": "a.png"}           a file, from the folder of the data file or the working folder
    {"type": "image", "bytes": b"..."}           of a Parquet file; so is {"bytes": ..., "path": ...} in the image column
    {"type": "image", "image": "data:image/png;base64,..."}
    {"type": "image_url", "image_url": {"url": "https://..."}}     where `data.images.urls` allows it
    {"type": "image"}                            the next image of the row's image column

All become `{"type": "image", "image": "sha256:..."}`: conversations stay small plain data, equal images are one, and a run
keeps each image that it used in `OUTPUT_DIR/images`, under that name.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from skyrl_train.config.data import ImagesConfig
from skyrl_train.data.columns import PROMPTS
from skyrl_train.data.rows import Row
from skyrl_train.errors import DataError, ModelError
from skyrl_train.images import Image, ImageSpans, find_spans
from skyrl_train.system.files import shown
from skyrl_train.types import ChatMessage, Prompt, TokenIds, Tokenizer

REFERENCE = "sha256:"
_TIMEOUT_S = 30.0
"""For an image's URL to answer, and to send the image whole."""
_READ_BYTES = 1 << 16
_COLUMNS = ("images", "image")
"""Columns that hold images where `data.images.column` is not set, if what they hold is an encoded image."""
_GIVEN_AS = ("image", "path", "bytes", "url", "image_url")
_PROCESSED = 256
"""Processed images that are kept: samples of one prompt come one after the other."""


class ImageStore:
    """Encoded images by the SHA-256 of their bytes. What comes from a file is read from there again."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        """Where what is used is kept; None keeps nothing."""
        self.recorded: list[Path] = []
        """Folders of other runs whose images are used."""
        self._held: dict[str, bytes | Path] = {}

    def add(self, data: bytes, path: Path | None = None) -> str:
        """Return the reference of an encoded image, which stands in `path` if that is given."""
        key = hashlib.sha256(data).hexdigest()
        self._held.setdefault(key, data if path is None else path)
        return REFERENCE + key

    def read(self, reference: str) -> bytes:
        """Return the encoded image, and keep it in `folder`. Raises DataError where it is gone or was changed."""
        key = reference.removeprefix(REFERENCE)
        folders = [*([] if self.folder is None else [self.folder]), *self.recorded]
        held = self._held.get(key) or next((file for each in folders if (file := each / key).is_file()), None)
        if held is None:
            places = ", ".join(map(str, folders)) or "a row, as no folder of images is known"
            raise DataError(f"image {reference} is not in {places}. Put it back, under its sum")
        place = "memory" if isinstance(held, bytes) else str(held)
        try:
            data = held if isinstance(held, bytes) else held.read_bytes()
        except OSError as error:
            raise DataError(f"image {reference}: {place} cannot be read ({error.strerror}). Put it back") from error
        if hashlib.sha256(data).hexdigest() != key:
            raise DataError(f"image {reference}: {place} was changed. Put back what this run began with")
        if self.folder is not None:
            _keep(self.folder / key, data)
            if isinstance(held, bytes):
                self._held[key] = self.folder / key  # what environments show in a long run does not stay in memory
        return data

    def keep(self, keys: Iterable[str], folder: Path) -> None:
        """Keep images in `folder`. Raises DataError."""
        for key in keys:
            if not (folder / key).is_file():
                _keep(folder / key, self.read(key))


def _keep(file: Path, data: bytes) -> None:
    if file.is_file():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, file)


IMAGES = ImageStore()
"""The images of this process: what a name stands for never changes."""


@dataclass(frozen=True)
class ImageReading:
    """How the images of conversations become what a model reads."""

    placeholder: int
    """The token that stands for a part of an image."""
    process: Callable[[bytes, str], Image]
    """Of an encoded image and its key. Raises ValueError for one that it cannot take."""
    settings: ImagesConfig
    store: ImageStore = IMAGES
    marks: tuple[int, int] | None = None
    """The tokens that begin and end an image, where the template writes the first alone (Gemma 3)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_processed", lru_cache(maxsize=_PROCESSED)(self._process))

    def read(self, reference: str) -> Image:
        """Return the image of a reference, or of its sum alone. Raises DataError."""
        processed: Callable[[str], Image] = self._processed  # type: ignore[attr-defined]
        return processed(REFERENCE + reference.removeprefix(REFERENCE))

    def of(self, messages: Iterable[ChatMessage]) -> list[Image]:
        """Return the images of messages whose parts are references, in order. Raises DataError."""
        return [self.read(reference) for reference in references_in(messages)]

    def spans(self, token_ids: TokenIds, messages: Iterable[ChatMessage], start: int = 0) -> ImageSpans:
        """Return where the images of `messages` stand in `token_ids` from `start` on. Raises ValueError, DataError."""
        return find_spans(token_ids.tolist(), self.placeholder, self.of(messages), start)

    def written(self, text: str, tokenizer: Tokenizer) -> str:
        """Return a rendered text as the family's processor writes it. Where the template writes only what begins an image,
        its placeholder and its end follow, with empty lines around them."""
        if self.marks is None:
            return text
        begin, end, placeholder = (str(tokenizer.decode([each])) for each in (*self.marks, self.placeholder))
        return text.replace(begin, f"\n\n{begin}{placeholder}{end}\n\n")

    def with_references(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return what an environment, or a tool, said with references in place of its images, which are given in the
        messages themselves: files and addresses are the data's alone. Raises DataError."""
        return [_referenced(each, _Source(self.store, self.settings, None, "an observation")) for each in messages]

    def _process(self, reference: str) -> Image:
        try:
            return self.process(self.store.read(reference), reference.removeprefix(REFERENCE))
        except ValueError as error:
            raise DataError(f"image {reference}: {error}") from error


def is_image(part: object) -> bool:
    """Whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and (part.get("type") in ("image", "image_url", "input_image"))


def references_in(messages: Iterable[ChatMessage]) -> list[str]:
    """Return the references of all images in messages, in order."""
    parts = [part for each in messages if isinstance(each.get("content"), (list, tuple)) for part in each["content"]]
    return [str(part.get("image")) for part in parts if is_image(part)]


def refuse_images(prompt: Prompt) -> None:
    """For a model that reads none. Raises DataError naming the row."""
    if references_in(prompt.messages):
        place = prompt.place or f"prompt {prompt.uid}"
        raise DataError(f"{place}: has images, and the model reads none. Give model.path one that does.")


def with_references(row: Row, settings: ImagesConfig, store: ImageStore = IMAGES) -> Row:
    """Return the row with references in place of its images; a row without any as it is.

    Raises DataError naming the row and the image: one that is missing, broken, too large, at an address that is not
    allowed, or for which there is no place in the messages, or none in the column.
    """
    column = _image_column(row, settings)
    conversations = {name: value for name, value in row.values.items() if _has_images(value)}
    if column is None and not conversations:
        return row
    source = _Source(store, settings, Path(row.place.rpartition(", ")[0] or row.place).parent, row.place)
    values = dict(row.values)
    if column is not None:
        given = values[column]
        each = given if isinstance(given, (list, tuple)) else [given]
        source.left = [source.reference(value, f"image {number} of {column!r}") for number, value in enumerate(each)]
        values[column] = list(source.left)
    used = len(source.left)
    for name, value in conversations.items():
        values[name] = [_referenced(each, source) if isinstance(each, Mapping) else each for each in value]
    if source.left and len(source.left) == used:
        values = _put_first(values, source)
    if source.left:
        raise DataError(
            f"{row.place}: {used} images in {column!r}, and parts {{'type': 'image'}} for {used - len(source.left)} of them "
            "in its messages. Give as many of one as of the other, or no such part, which puts the images first"
        )
    return replace(row, values=values)


def _put_first(values: dict[str, Any], source: _Source) -> dict[str, Any]:
    """Put the images of the column before the text of the first user message, or of the prompt that is a text."""
    parts = [{"type": "image", "image": each} for each in source.left]
    for name, value in values.items():
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping) and "role" in value[0]:
            number = next((index for index, each in enumerate(value) if each["role"] == "user"), None)
            if number is not None and isinstance(value[number].get("content"), str):
                text = {"type": "text", "text": value[number]["content"]}
                changed = {**value[number], "content": [*parts, text]}
                source.left = []
                return {**values, name: [*value[:number], changed, *value[number + 1 :]]}
    for name in PROMPTS:
        if isinstance(values.get(name), str):
            source.left = []
            content = [*parts, {"type": "text", "text": values[name]}]
            return {**values, name: [{"role": "user", "content": content}]}
    return values


def _image_column(row: Row, settings: ImagesConfig) -> str | None:
    if settings.column:
        return settings.column if row.values.get(settings.column) is not None else None
    for name in _COLUMNS:
        value = row.values.get(name)
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        encoded = isinstance(first, bytes) or (isinstance(first, Mapping) and {"bytes", "path"} & set(first))
        if encoded or (value is not None and any(_has_images(each, bare=True) for each in row.values.values())):
            return name
    return None


def _has_images(value: object, *, bare: bool = False) -> bool:
    """Whether a column holds messages with images, or with parts that take one of the image column."""
    if not isinstance(value, (list, tuple)) or not value or not isinstance(value[0], Mapping):
        return False
    contents = [each.get("content") for each in value if isinstance(each, Mapping)]
    parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content if is_image(part)]
    return any(not bare or not any(part.get(name) for name in _GIVEN_AS) for part in parts)


def _referenced(message: ChatMessage, source: _Source) -> ChatMessage:
    content = message.get("content")
    if not isinstance(content, (list, tuple)) or not any(is_image(part) for part in content):
        return message
    return {**message, "content": [source.part(part) if is_image(part) else part for part in content]}


@dataclass
class _Source:
    """Where images of one row, or of one observation, come from."""

    store: ImageStore
    settings: ImagesConfig
    folder: Path | None
    """Of the data file; None where neither files nor addresses are read."""
    place: str
    left: list[str] = field(default_factory=list)
    """References of the image column that no part has taken yet."""

    def part(self, part: Mapping[str, Any]) -> dict[str, str]:
        """Return the part with a reference. Raises DataError."""
        value = next((part[name] for name in _GIVEN_AS if part.get(name)), None)
        if value is not None:
            return {"type": "image", "image": self.reference(value, "an image")}
        if not self.left:
            raise DataError(
                f"{self.place}: a part {{'type': 'image'}} without an image, and none is left in the row's image column. "
                "Give the part a 'path', 'bytes' or 'url', or name the column with data.images.column"
            )
        return {"type": "image", "image": self.left.pop(0)}

    def reference(self, value: Any, what: str) -> str:
        """Return the reference of an image that was read and looked at. Raises DataError."""
        if isinstance(value, str) and value.startswith(REFERENCE):
            return value
        try:
            data, path = self._bytes_of(value)
            if len(data) > self.settings.max_bytes:
                raise ValueError(f"it has {len(data):,} bytes; data.images.max_bytes={self.settings.max_bytes}")
            check_image(data, max_pixels=self.settings.max_pixels)
        except (ValueError, OSError, urllib.error.URLError) as error:
            raise DataError(f"{self.place}: {what} cannot be read: {error}. Fix or drop the row") from error
        return self.store.add(data, path)

    def _bytes_of(self, value: Any) -> tuple[bytes, Path | None]:
        if isinstance(value, Mapping):
            value = next((value[name] for name in ("bytes", "url", "path") if value.get(name)), value)
        if isinstance(value, bytes):
            return value, None
        if not isinstance(value, str) or not value:
            raise ValueError(f"{shown(value)} is none: give a path, bytes, a data: URL or an address")
        if value.startswith("data:"):
            return _decoded(value, self.settings.max_bytes), None
        if self.folder is None:
            raise ValueError(f"{shown(value)}: environments and tools give images as data: URLs")
        if value.startswith(("http://", "https://")):
            return _fetched(value, self.settings), None
        path = Path(value.removeprefix("file://")).expanduser()
        beside = self.folder / path
        found = beside if beside.is_file() else path
        if not found.is_file():
            raise ValueError(f"{value} is no file, neither in {self.folder} nor here")
        if found.stat().st_size > self.settings.max_bytes:
            raise ValueError(f"{found.stat().st_size:,} bytes; data.images.max_bytes={self.settings.max_bytes}")
        return found.read_bytes(), found


def _decoded(url: str, max_bytes: int) -> bytes:
    head, _, text = url.partition(",")
    if not head.endswith(";base64") or len(text) > max_bytes * 4 // 3 + 4:
        raise ValueError(f"{shown(head)} must be data:image/...;base64 of at most data.images.max_bytes={max_bytes}")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"a data: URL that is not base64 ({error})") from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An address that is allowed does not lead to one that is not."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _fetched(url: str, settings: ImagesConfig) -> bytes:
    if not any(_is_below(url, allowed) for allowed in settings.urls):
        raise ValueError(f"{url} begins with none of data.images.urls={list(settings.urls)}")
    found, ends = bytearray(), time.monotonic() + _TIMEOUT_S
    try:
        with urllib.request.build_opener(_NoRedirect).open(url, timeout=_TIMEOUT_S) as answer:
            while len(found) <= settings.max_bytes and (part := answer.read1(_READ_BYTES)):
                found += part
                if time.monotonic() > ends:
                    raise ValueError(f"{url} did not send it within {_TIMEOUT_S:g} s")
    except urllib.error.HTTPError as error:
        where = error.headers.get("Location")
        raise ValueError(f"{url} leads to {where}, and redirects are not followed" if where else str(error)) from error
    return bytes(found)


def _is_below(url: str, allowed: str) -> bool:
    """Whether an address begins with an allowed one, of which a host is whole, and does not leave its folder."""
    begin = allowed if "/" in allowed.partition("://")[2] else f"{allowed}/"
    return url.startswith(begin) and ".." not in urllib.parse.unquote(url).split("/")


def check_image(data: bytes, *, max_pixels: int) -> None:
    """Raises ValueError for what is no whole image, or has too many pixels, which is told by its head."""
    image = _opened(data)
    if image.width * image.height > max_pixels:
        size = f"{image.width} x {image.height} pixels"
        raise ValueError(f"{size}; data.images.max_pixels={max_pixels}")
    _loaded(image)


def decode_image(data: bytes) -> Any:
    """Return the `PIL.Image.Image` in RGB. Raises ValueError for what is none."""
    return _loaded(_opened(data)).convert("RGB")


def image_format(data: bytes) -> str:
    """Return what Pillow calls the format, e.g. `PNG`. Raises ValueError for what is no image."""
    return str(_opened(data).format)


def _opened(data: bytes) -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise ModelError("images need Pillow: pip install pillow") from error
    try:
        return PIL.Image.open(io.BytesIO(data))
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise ValueError(f"not an image that Pillow reads ({type(error).__name__})") from error


def _loaded(image: Any) -> Any:
    try:
        image.load()
    except Exception as error:  # decoders raise what they like at damaged data
        raise ValueError(f"a damaged image ({type(error).__name__}: {error})") from error
    return image
