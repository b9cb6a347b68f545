"""docs/private_apis.md against the imports of the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "private_apis.md").read_text(encoding="utf-8")
OTHERS = ("torch", "transformers", "hydra", "omegaconf", "ray", "vllm", "peft", "wandb")


def imported(tree: ast.AST) -> set[str]:
    """The modules that a file imports, wherever it does."""
    found = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    return found | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


def is_private(module: str) -> bool:
    """Whether a module of another package has a name that is not meant for us; of vLLM, whether it lies inside of it."""
    return module.startswith(OTHERS) and ("._" in module or module.startswith("vllm."))


def used() -> set[str]:
    files = (ROOT / "skyrl_train").rglob("*.py")
    return {
        module
        for file in files
        for module in imported(ast.parse(file.read_text(encoding="utf-8")))
        if is_private(module)
    }


@pytest.mark.parametrize("module", sorted(used()))
def test_a_private_module_stands_on_the_page(module: str) -> None:
    parts = module.split(".")
    assert any(f"`{'.'.join(parts[:length])}" in PAGE for length in range(2, len(parts) + 1)), module


def test_the_tests_that_the_page_names_exist() -> None:
    named = set(re.findall(r"tests/[\w/]+\.py", PAGE))
    assert len(named) > 15
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []
