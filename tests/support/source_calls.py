"""The calls in the package's source, for tests that hold a rule of all of them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Call:
    """One call, or the entry of a `with` block, which is a call without arguments."""

    file: str
    """Relative to the repository."""
    line: int
    node: ast.expr
    is_entry: bool = False

    @cached_property
    def text(self) -> str:
        """The source of the call on one line; of a `with` block, `with` and what is entered."""
        return ("with " if self.is_entry else "") + ast.unparse(self.node)

    @property
    def name(self) -> str:
        """The last part of what is called."""
        return self.target.rpartition(".")[2]

    @cached_property
    def target(self) -> str:
        """What is called, with its dots: `self._future.result`."""
        text = ast.unparse(self.node.func if isinstance(self.node, ast.Call) else self.node)
        return text.replace("lambda :", "lambda:")  # of Python 3.10

    @property
    def receiver(self) -> str:
        """What stands before the last dot; empty for a plain name."""
        return self.target.rpartition(".")[0]

    @property
    def num_arguments(self) -> int:
        """Arguments by position."""
        return len(self.node.args) if isinstance(self.node, ast.Call) else 0

    def keyword(self, name: str) -> str | None:
        """The source of a keyword argument; None where it is not given."""
        found = self.node.keywords if isinstance(self.node, ast.Call) else []
        return next((ast.unparse(each.value) for each in found if each.arg == name), None)

    def has_keyword(self, *names: str) -> bool:
        """Whether one of these keyword arguments is given."""
        return any(self.keyword(name) is not None for name in names)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


Rule = Callable[[Call], bool]
"""Whether a call is against the rule."""
Exceptions = dict[tuple[str, str], str]
"""Reasons by file and by what is called (`Call.target`)."""


def calls_of(source: str, file: str) -> Iterator[Call]:
    """All calls and entries of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield Call(file, node.lineno, node)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                yield Call(file, node.lineno, item.context_expr, is_entry=True)


def calls_in(*folders: str) -> list[Call]:
    """All calls in Python files below these folders of the repository."""
    return [
        call
        for folder in folders
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        for call in calls_of(path.read_text(encoding="utf-8"), path.relative_to(REPOSITORY).as_posix())
    ]


def offences(calls: Sequence[Call], rules: Sequence[Rule], exceptions: Exceptions) -> list[str]:
    """Calls that are against a rule and no exception, and exceptions that no call needs any more."""
    against = [call for call in calls if any(rule(call) for rule in rules)]
    found = [str(call) for call in against if (call.file, call.target) not in exceptions]
    needed = {(call.file, call.target) for call in against}
    return [*found, *(f"the exception {key} is not needed any more" for key in exceptions if key not in needed)]
