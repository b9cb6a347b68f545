"""`skyrl-train --find "new tokens"`: settings, choices and names of other trainers that have these words."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from skyrl_train.config import RunConfig
from skyrl_train.config.door import as_typed
from skyrl_train.config.fields import TRAINERS, documentation, parts_of, peer_rows, walk
from skyrl_train.registry import TARGET
from skyrl_train.runs.cli.conf_folder import conf_dir

FLAG = "--find"
MOST = 20
"""Of what was found, the best so many are shown."""


@dataclass(frozen=True, kw_only=True)
class Hit:
    """Something that may be typed, and what it is."""

    typed: str
    meaning: str
    distance: int
    """0 for a name of another trainer, 1 for the words in the last part of a name, 2 in a name, 3 in its meaning alone."""


def find(text: str, schema: type[RunConfig]) -> list[Hit]:
    """Return what has all words of `text`, the nearest first; a word counts as the beginning of one, in any case."""
    words = [word for word in re.split(r"[\s._-]+", text.casefold()) if word]
    hits: dict[str, Hit] = {}
    for hit in [*_peers(words, schema), *_settings(words, schema), *_choices(words)] if words else ():
        if hit.typed not in hits or hit.distance < hits[hit.typed].distance:
            hits[hit.typed] = hit
    return sorted(hits.values(), key=lambda hit: (hit.distance, len(hit.meaning.partition(". ")[0]), len(hit.typed)))


def _has(words: Sequence[str], text: str) -> bool:
    there = re.split(r"[^\w]+|_", text.casefold())
    return all(any(each.startswith(word) for each in there) for word in words)


def _peers(words: Sequence[str], schema: type[RunConfig]) -> Iterator[Hit]:
    known = {field.path for field in walk(schema)}
    for row in peer_rows():
        for trainer, names in row.names.items():
            for name in names:
                if [word for word in re.split(r"[._-]+", name.casefold()) if word] == [*words]:
                    of = f"{name} of {TRAINERS[trainer]}" if trainer != "any" else name
                    meaning = f"{of}. {row.convert}".rstrip(". ") + "."
                    settings = [each for each in row.settings if each in known or "=" in each]
                    for setting in settings[:1] or (["(nothing)"] if not row.settings else []):
                        yield Hit(typed=setting, meaning=meaning, distance=0)


def _settings(words: Sequence[str], schema: type[RunConfig]) -> Iterator[Hit]:
    for field in walk(schema):
        if field.section:
            continue
        meaning = documentation(field)
        last = field.path.rpartition(".")[2]
        distance = 1 if _has(words, last) else 2 if _has(words, field.path) else 3
        if distance < 3 or _has(words, f"{field.path} {meaning}"):
            yield Hit(typed=f"{field.path}={as_typed(field.default)}", meaning=meaning, distance=distance)
    for setting, seam in parts_of(schema).items():
        for part in seam:
            for name, argument in seam.arguments(part).items():
                if _has(words, f"{name} {argument.meaning}"):
                    typed = f"{setting}={{{TARGET}: {part}, {name}: {as_typed(argument.default)}}}"
                    yield Hit(typed=typed, meaning=argument.meaning, distance=1 if _has(words, name) else 3)


def _choices(words: Sequence[str]) -> Iterator[Hit]:
    """Choices of groups, by their name and the comment at their head."""
    for file in sorted(conf_dir().glob("*/*.yaml")):
        lines = file.read_text(encoding="utf-8").splitlines()
        comments = [line[1:].strip() for line in lines if line.startswith("#") and not line.startswith("# @")]
        meaning = comments[0] if comments else ""
        typed = f"{'+' if file.parent.name == 'experiment' else ''}{file.parent.name}={file.stem}"
        if file.parent.name != "hydra" and _has(words, f"{typed} {meaning}"):
            yield Hit(typed=typed, meaning=meaning, distance=1 if _has(words, file.stem) else 3)


def main(argv: Sequence[str], schema: type[RunConfig]) -> int:
    """Answer `--find TEXT`; return the exit status: 1 where nothing has these words, 2 without any."""
    text = " ".join(word for word in argv if word != FLAG).strip()
    if not text:
        sys.stderr.write(f'{FLAG} takes words: {FLAG} "new tokens"\n')
        return 2
    hits = find(text, schema)
    for hit in hits[:MOST]:
        sys.stdout.write(f"{hit.typed}\n    {hit.meaning.partition('. ')[0].rstrip('.')}.\n")
    if len(hits) > MOST:
        sys.stdout.write(f"{len(hits) - MOST} more: add a word, or read docs/configuration.md\n")
    if not hits:
        sys.stderr.write(f"nothing has all words of {text!r}: try fewer, or read docs/configuration.md\n")
    return 0 if hits else 1
