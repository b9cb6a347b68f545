"""Each test module stands alone: what several share lies in tests/support."""

from __future__ import annotations

import re

import pytest

from tests.support.source_calls import REPOSITORY

TESTS = REPOSITORY / "tests"
NAMES = {file.stem for file in TESTS.rglob("test_*.py")}
IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]+)|import[ \t]+([\w., \t]+))", re.MULTILINE
)


def imported_tests(source: str) -> set[str]:
    """The last parts of the names of test modules that `source` imports, in a text that it runs as well."""
    words: set[str] = set()
    for module, names, modules in IMPORT.findall(source):
        words |= set(re.findall(r"\w+", f"{module} {modules}"))
        if module.startswith("tests"):
            words |= set(re.findall(r"\w+", names))
    return words & NAMES


def test_no_test_module_is_imported_by_another_file() -> None:
    files = [*TESTS.rglob("*.py"), *(REPOSITORY / "scripts").rglob("*.py")]
    offences = {
        str(file.relative_to(REPOSITORY)): sorted(imports)
        for file in files
        if (imports := imported_tests(file.read_text(encoding="utf-8")) - {file.stem})
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
    assert len(imported_tests(f"    {line}\n")) == 1
