"""What a setting is for: the docstring under its declaration, from which docs/configuration.md and `--find` are made."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from pathlib import Path

from skyrl_train.config.fields.fields import SchemaField


def documentation(field: SchemaField) -> str:
    """The docstring under a field's declaration; where a class redeclares one without, that of its base. Empty where there
    is none."""
    for owner in field.owner.__mro__:
        found = _docstrings(sys.modules[owner.__module__].__file__ or "").get(f"{owner.__name__}.{field.name}")
        if found is not None:
            return found
    return ""


@cache
def _docstrings(file: str) -> dict[str, str]:
    """`Class.field` to the string that follows its declaration."""
    found = {}
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            for declaration, after in zip(node.body, node.body[1:]):
                if (
                    isinstance(declaration, ast.AnnAssign)
                    and isinstance(declaration.target, ast.Name)
                    and isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                ):
                    found[f"{node.name}.{declaration.target.id}"] = inspect.cleandoc(str(after.value.value))
    return found
