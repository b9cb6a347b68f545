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
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


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


@pytest.mark.slow
def test_each_private_module_stands_on_the_page() -> None:
    private = used()
    assert len(private) > 15
    missing = []
    for module in sorted(private):
        parts = module.split(".")
        if not any(f"`{'.'.join(parts[:length])}" in PAGE for length in range(2, len(parts) + 1)):
            missing.append(module)
    assert missing == []


def test_the_tests_that_the_page_names_exist() -> None:
    named = set(re.findall(r"tests/[\w/]+\.py", PAGE))
    assert len(named) > 15
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []
