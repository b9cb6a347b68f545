"""Sources of supervised data to examples: read, rendered, tokenised once, masked, and cut to length.

rows --conversations.py--> messages or text --loss_spans.py--> text and what the assistant wrote
     --tokenizer--> token ids and loss mask --token_store.py--> TokenStore --over_long--> ExampleSet
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_train.config import SFTDataConfig
from skyrl_train.data.conversations import Content, Conversation, PlainText, read_content
from skyrl_train.data.rows import Row, Source, find_sources, read_rows
from skyrl_train.data.sft.loss_spans import LossSpans, Rendered, Span, trained_messages
from skyrl_train.data.sft.token_store import (
    FORMAT,
    ExampleSet,
    PlacedReference,
    SourcePart,
    TokenStore,
    cached,
    default_folder,
    digest_of_file,
    store_of,
)
from skyrl_train.data.sources.images import ImageReading, references_in, with_references
from skyrl_train.errors import DataError
from skyrl_train.images import Image, expanded, find_spans
from skyrl_train.types import Tokenizer

Progress = Callable[[str, int], None]
"""Called with (source, rows tokenised so far)."""

_ROWS_AT_ONCE = 512
"""Rows that the tokenizer gets together: it works on them in parallel."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Examples, and what became of the others."""

    examples: ExampleSet
    num_truncated: int
    num_dropped: int
    """Longer than `max_length`."""
    num_without_loss: int
    """Left out because no trained token was left in the first `max_length`."""
    longest: int
    """Tokens of the longest example before anything was cut."""
    sha256: str
    """Of token ids, masks and lengths: what the run trains on."""


def load_examples(
    specs: Sequence[str],
    tokenizer: Tokenizer,
    data: SFTDataConfig,
    *,
    limit: int = 0,
    on_progress: Progress | None = None,
    images: ImageReading | None = None,
) -> Loaded:
    """Return the examples of all sources that `specs` name, in order.

    Args:
        limit: Read only so many rows, from the first source on; 0 is all.
        images: How images are read, where the model reads any; its rows are tokenised in memory.

    Raises:
        DataError: A source is missing or damaged, a row lacks what it needs, or nothing is left to train on.
    """
    stores: list[tuple[str, TokenStore]] = []
    left = limit
    for source in find_sources(specs, data.reader):
        store = _tokenised(source, Encoder(tokenizer, data, images), left, on_progress)
        stores.append((source.name, store))
        if limit and (left := left - len(store.lengths)) <= 0:
            break
    return _cut_to_length(stores, data.max_length, data.over_long, None if images is None else images.read)


def _tokenised(source: Source, encoder: Encoder, limit: int, on_progress: Progress | None) -> TokenStore:
    def make() -> Iterator[tuple[Sequence[int], Sequence[bool]]]:
        rows = read_rows(source)
        yield from encoder.tokenise(islice(rows, limit) if limit else rows, on_progress)

    data = encoder.data
    if encoder.images is not None or not data.cache:
        store = store_of(make())
        return replace(store, images=tuple(encoder.placed) if any(encoder.placed) else ())
    folder = Path(data.cache_dir).expanduser() if data.cache_dir else default_folder()
    try:
        return cached(folder, cache_key(source, encoder.tokenizer, data, limit), make)
    except OSError as error:
        raise DataError(
            f"{source.location}: its tokens cannot be kept in {folder} ({error}). "
            "Set data.cache_dir to a folder with room, or data.cache=false."
        ) from error


def cache_key(source: Source, tokenizer: Tokenizer, data: SFTDataConfig, limit: int) -> str:
    """Return the hash of the source's content, the tokenizer, the format, and the versions of the libraries that
    tokenise.
    """
    rows = {name: getattr(data, name) for name in ("format", "prompt_column", "completion_column", "chat_template")}
    form = {"rows": rows, "loss_on": data.loss_on, "template_kwargs": data.template_kwargs}
    parts = [
        str(FORMAT),
        digest_of_file(Path(source.location), "sha256") if source.is_file else _digest_of_rows(source, limit),
        _digest_of_tokenizer(tokenizer),
        json.dumps(form, sort_keys=True, default=str),
        str(limit),
        *(metadata.version(name) for name in ("transformers", "tokenizers")),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


class Encoder:
    """Rows to tokens with one tokenizer and one format.

    A text is tokenised in pieces, cut where the assistant begins to write: just as it is when the model is asked and
    its answer is appended, token by token. So the mask needs no token to be divided, and the model is trained on the
    prompts that it will be given.
    """

    def __init__(self, tokenizer: Tokenizer, data: SFTDataConfig, images: ImageReading | None = None) -> None:
        self.tokenizer, self.data, self.images = tokenizer, data, images
        self.placed: list[tuple[PlacedReference, ...]] = []
        """Of each example so far its images."""
        self._guard = _guard(tokenizer)
        self._spans: LossSpans | None = None

    def tokenise(
        self, rows: Iterator[Row], on_progress: Progress | None = None
    ) -> Iterator[tuple[Sequence[int], Sequence[bool]]]:
        """Yield token ids and loss mask of each row, in order. Raises DataError naming the row."""
        done = 0
        while group := list(islice(rows, _ROWS_AT_ONCE)):
            yield from self.encode(group)
            done += len(group)
            if on_progress is not None:
                on_progress(group[0].source, done)

    def encode(self, rows: Sequence[Row]) -> Iterator[tuple[Sequence[int], Sequence[bool]]]:
        rows = [with_references(row, self.data.images) for row in rows]
        contents = [read_content(row, self.data) for row in rows]
        texts = [self._rendered(content, row.place) for row, content in zip(rows, contents)]
        cuts = [_cuts(text) for text in texts]
        pieces = [(text.text, span) for text, spans in zip(texts, cuts) for span in spans]
        token_ids = iter(self._tokenise(pieces))
        for row, content, spans in zip(rows, contents, cuts):
            ids, mask = _join(list(islice(token_ids, len(spans))))
            if isinstance(content, PlainText):
                ids, mask = self._ended(ids, mask)
            else:
                ids, mask = self._with_images(ids, mask, content, row.place)
            if not any(mask[1:]):
                raise DataError(f"{row.place}: nothing to train on: no token has loss. Fix or drop the row.")
            yield ids, [False, *mask[1:]]

    def _with_images(
        self, ids: list[int], mask: list[bool], content: Conversation, place: str
    ) -> tuple[list[int], list[bool]]:
        """Return the tokens with as many placeholders for each image as it has tokens, and note where they stand."""
        if self.images is None:
            return ids, mask
        references, placeholder = references_in(content.messages), self.images.placeholder
        try:
            images = [self.images.read(each) for each in references]
            longer = expanded(ids, placeholder, images)
            spans = find_spans(longer, placeholder, images)
        except ValueError as error:
            raise DataError(f"{place}: {error}. Fix or drop the row.") from error
        sizes = iter(images)
        mask = [
            flag
            for token, flag in zip(ids, mask)
            for flag in [flag] * (next(sizes).num_tokens if token == placeholder else 1)
        ]
        places = zip(spans, references)
        self.placed.append(
            tuple(PlacedReference(span.start, span.image.num_tokens, reference) for span, reference in places)
        )
        return longer, mask

    def _rendered(self, content: Content, place: str) -> Rendered:
        if isinstance(content, PlainText):
            text = content.prompt + content.completion
            return Rendered(text=text, spans=((len(content.prompt), len(text)),))
        if self.images is None and references_in(content.messages):  # which the template may refuse, or leave out
            raise DataError(f"{place}: has images, and the model reads none. Give model.path one that does.")
        if self._spans is None:
            self._spans = LossSpans(self.tokenizer, self.data.template_kwargs, self.images)
        return self._spans.render(content, trained_messages(content, self.data.loss_on, place), place)

    def _tokenise(self, pieces: Sequence[tuple[str, Span]]) -> list[list[int]]:
        """Return the token ids of each piece of a text, without any that the tokenizer adds."""
        guard, guard_id = self._guard
        texts = [f"{guard if start else ''}{text[start:stop]}" for text, (start, stop) in pieces]
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return [
            list(ids[1 if start and guard_id is not None else 0 :]) for ids, (_, (start, _)) in zip(encoded, pieces)
        ]

    def _ended(self, ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
        """Put plain text between the tokens that begin and end one."""
        bos, eos = getattr(self.tokenizer, "bos_token_id", None), self.tokenizer.eos_token_id
        if bos is not None and self.tokenizer([""], add_special_tokens=True)["input_ids"][0][:1] == [bos]:
            ids, mask = [bos, *ids], [False, *mask]
        return (ids, mask) if eos is None else ([*ids, int(eos)], [*mask, True])


def _cuts(rendered: Rendered) -> list[Span]:
    """Return the pieces that are tokenised by themselves: what stands before the first span; then for each span three: with
    what follows it, alone, what follows."""
    spans = rendered.spans
    cuts = [(0, spans[0][0])]
    for (start, stop), end in zip(spans, [*(start for start, _ in spans[1:]), len(rendered.text)]):
        cuts += [(start, end), (start, stop), (stop, end)]
    return cuts


def _join(pieces: Sequence[list[int]]) -> tuple[list[int], list[bool]]:
    """Return token ids and mask from the tokens of `_cuts`.

    A span is tokenised together with what follows it, as templates mean it (a token such as `<|end|>` may take the
    newline after it along), unless that would join the span's last token with something else.
    """
    ids = list(pieces[0])
    mask = [False] * len(ids)
    for with_rest, span, rest in zip(pieces[1::3], pieces[2::3], pieces[3::3]):
        ids += with_rest if with_rest[: len(span)] == span else [*span, *rest]
        mask += [True] * len(span)
        mask += [False] * (len(ids) - len(mask))
    return ids, mask


def _guard(tokenizer: Tokenizer) -> tuple[str, int | None]:
    """A special token put before pieces from the middle of a text, and taken away again.

    It keeps tokenizers that put a blank before every text (SentencePiece) from doing so in the middle of one.
    """
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    for token_id, token in added.items():
        if token.special and not token.rstrip and not token.single_word:
            return str(token), token_id
    return "", None


def _cut_to_length(
    stores: Sequence[tuple[str, TokenStore]],
    max_length: int,
    over_long: str,
    read_image: Callable[[str], Image] | None,
) -> Loaded:
    """Apply `over_long` to every source."""
    parts, digest = [], hashlib.sha256(f"{max_length} {over_long}".encode())
    truncated = dropped = without_loss = longest = 0
    for name, store in stores:
        lengths = store.lengths
        too_long = np.flatnonzero(lengths > max_length)
        longest = max(longest, int(lengths.max(initial=0)))
        if over_long == "error" and len(too_long):
            raise DataError(
                f"{name}, row {too_long[0]}: {lengths[too_long[0]]} tokens, more than data.max_length={max_length} "
                f"({len(too_long)} of {len(lengths)} rows are; the longest has {lengths.max()}). Raise "
                "data.max_length, or set data.over_long=truncate or drop."
            )
        kept = np.ones(len(lengths), dtype=bool)
        if over_long == "drop":
            kept[too_long] = False
            dropped += len(too_long)
        else:
            if (row := store.first_cut_image(max_length)) is not None:
                raise DataError(
                    f"{name}, row {row}: data.max_length={max_length} cuts an image off. Raise data.max_length, or set "
                    "data.over_long=drop."
                )
            starts = store.offsets[too_long]
            has_loss = [store.loss_mask[start : start + max_length].any() for start in starts.tolist()]
            empty = too_long[~np.asarray(has_loss, dtype=bool)]
            kept[empty] = False
            without_loss += len(empty)
            truncated += len(too_long) - len(empty)
        parts.append(SourcePart(name=name, store=store, rows=np.flatnonzero(kept), max_length=max_length))
        digest.update(np.ascontiguousarray(store.input_ids).data)
        digest.update(np.ascontiguousarray(store.loss_mask).data)
        digest.update(np.ascontiguousarray(store.offsets).data)
        if store.images:
            digest.update(repr(store.images).encode())
    examples = ExampleSet(parts, read_image)
    if not len(examples):
        raise DataError(
            f"{', '.join(name for name, _ in stores) or 'the sources'}: no example is left to train on "
            f"({dropped} are longer than data.max_length={max_length}, {without_loss} have no loss within it). "
            "Raise data.max_length."
        )
    return Loaded(
        examples=examples,
        num_truncated=truncated,
        num_dropped=dropped,
        num_without_loss=without_loss,
        longest=longest,
        sha256=digest.hexdigest(),
    )


def _digest_of_rows(source: Source, limit: int) -> str:
    digest = hashlib.sha256()
    for row in islice(read_rows(source), limit or None):
        try:
            digest.update(json.dumps(dict(row.values), sort_keys=True, default=str).encode() + b"\n")
        except Exception as error:  # of names that are no texts, of depth, of an object without a text
            raise DataError(
                f"{row.place}: cannot be written as JSON ({type(error).__name__}: {error}). Fix the row, or set "
                "data.cache=false."
            ) from error
    return digest.hexdigest()


def _digest_of_tokenizer(tokenizer: Tokenizer) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        type(tokenizer).__name__,
        backend.to_str() if backend is not None else repr(tokenizer),
        json.dumps(tokenizer.chat_template, default=str),
        str(tokenizer.eos_token_id),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
