"""The commands that pages show, as a shell would read them.

A block whose commands any machine can run has `<!-- runs -->` on the line before it, or `<!-- runs: 1 3 -->` where only the
first and third can be run: a comment that no reader sees.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.source_calls import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(?:<!-- runs(?:: ([\d ]+))? -->\n)?^```(?:sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MARKED = re.compile(r"<!-- runs(?:: [\d ]+)? -->\n```(?:sh|bash)\n")
_VARIABLE = re.compile(r"\w+=\S*")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of a page."""

    page: str
    line: int
    words: tuple[str, ...]
    """Without what stands behind `#`, and without variables before the program."""
    variables: tuple[str, ...]
    runs: bool
    """Whether the page says that any machine can run it."""

    @property
    def program(self) -> str:
        """The module of `python -m MODULE`, else the first word."""
        is_module = self.words[0].rpartition("/")[2].startswith("python") and self.words[1:2] == ("-m",)
        return self.words[2] if is_module else self.words[0]

    @property
    def arguments(self) -> list[str]:
        """What stands behind the program, without the `...` that means more of the reader's own."""
        start = list(self.words).index(self.program) + 1
        return [word for word in self.words[start:] if word != "..."]

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {' '.join(self.words)}"


def commands_of(page: Path) -> Iterator[Command]:
    """Yield the commands of all shell blocks. Raises ValueError for a quote that nothing closes."""
    text = page.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(text):
        marked = _MARKED.match(text, block.start()) is not None
        chosen = {int(each) for each in (block[1] or "").split()}
        first = text.count("\n", 0, block.start(2)) + 1
        for count, (line, words) in enumerate(_commands(block[2], first), 1):
            variables = [word for word in words if _VARIABLE.fullmatch(word)]
            if len(variables) == len(words):  # settings that are shown alone
                variables = []
            variables = variables[: next(i for i, word in enumerate([*words, ""]) if not _VARIABLE.fullmatch(word))]
            yield Command(
                page=page.name,
                line=line,
                words=tuple(words[len(variables) :]),
                variables=tuple(variables),
                runs=marked and (not chosen or count in chosen),
            )


def _commands(block: str, first: int) -> Iterator[tuple[int, list[str]]]:
    begun, at = "", first
    for number, line in enumerate(block.splitlines(), first):
        begun, at = (f"{begun}\n{line}", at) if begun else (line, number)
        if begun.endswith("\\"):
            continue
        try:
            words = shlex.split(begun.replace("\\\n", ""), comments=True)
        except ValueError:  # a quote goes on in the next line
            continue
        begun = ""
        while "&&" in words:
            yield at, words[: words.index("&&")]
            words = words[words.index("&&") + 1 :]
        if words:
            yield at, words
    if begun:
        raise ValueError(f"line {at}: a quote is not closed: {begun}")
