"""Names in a registry, read from its source: algorithms import torch, and a misspelt name should not wait for that."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]

REGISTRIES = (
    ("data.row_format", "data/prompts.py", "ROW_FORMATS"),
    ("trainer.algorithm.advantage_estimator", "algorithms/advantages.py", "ADVANTAGE_ESTIMATORS"),
    ("trainer.algorithm.policy_loss", "algorithms/losses.py", "POLICY_LOSSES"),
    ("trainer.micro_batching", "batch/microbatch.py", "MICRO_BATCH_STRATEGIES"),
)
"""Field, file within the package, and the dictionary there whose names the field accepts."""


@cache
def registered_names(file: str, dictionary: str) -> tuple[str, ...]:
    """Keys of the dictionary literal called `dictionary` in the package's `file`, e.g. `algorithms/losses.py`.

    Empty where there is no such literal; then the registry itself refuses an unknown name when it is used.
    """
    path = _PACKAGE / file
    if not path.is_file():
        return ()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        named = any(isinstance(target, ast.Name) and target.id == dictionary for target in targets)
        value = getattr(node, "value", None)
        if named and isinstance(value, ast.Dict):
            return tuple(str(key.value) for key in value.keys if isinstance(key, ast.Constant))
    return ()


def module_exists(path: str) -> bool:
    """Whether the module of `package.module:attr` can be found. Imports its parent packages, but not the module."""
    module = path.partition(":")[0]
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
