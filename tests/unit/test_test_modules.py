"""Each test module stands alone: what several share lies in tests/support."""

from __future__ import annotations

import ast

import pytest

from tests.support.source_calls import REPOSITORY

TESTS = REPOSITORY / "tests"


def imported_modules(source: str) -> set[str]:
    """Every module that `source` may import, each name of a `from` import included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names if module.startswith("tests")}
    return found


def is_test(module: str) -> bool:
    *folders, name = module.split(".")
    return name.startswith("test_") and any(TESTS.rglob(f"{name}.py")) and folders[:1] in ([], ["tests"])


def test_no_test_module_is_imported_by_another_file() -> None:
    files = [*TESTS.rglob("*.py"), *(REPOSITORY / "scripts").rglob("*.py")]
    offences = {
        str(file.relative_to(REPOSITORY)): sorted(imports)
        for file in files
        if (imports := {module for module in imported_modules(file.read_text()) if is_test(module)})
    }
    assert offences == {}


def test_helpers_lie_in_a_package() -> None:
    assert [file.name for file in TESTS.glob("*.py")] == ["conftest.py"]


@pytest.mark.parametrize(
    "line",
    [
        "from tests.unit.test_test_modules import TESTS",
        "import test_test_modules",
        "from tests.unit import test_threads",
    ],
)
def test_each_way_to_import_a_test_is_seen(line: str) -> None:
    assert any(map(is_test, imported_modules(line)))
