"""What packages export: few names, each of use to somebody, and nothing else is imported from outside of a package."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import skyrl_train
from scripts.faces_contract import exported, is_private, owner, source

ROOT = Path(__file__).resolve().parents[2]
MOST_NAMES = 25
OF_WHOLE_RUNS = {
    "trainers": {"trainers", "runs"},
    "cluster": {"cluster"},
    "browser": {"view"},
    "gpu": {"selftest"},
    "world": {"trainers", "runs", "serve", "system"},
}
"""Folders of tests beside `tests/unit`, and the packages that each is of."""
FACES = [
    each.name
    for each in pkgutil.walk_packages(skyrl_train.__path__, "skyrl_train.")
    if each.ispkg and not each.name.startswith("skyrl_train.conf")
]


@cache
def imports_of(file: Path) -> frozenset[str]:
    """What a file imports of the package: `skyrl_train.batch.TrainingInputBatch`, or a module."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return frozenset(each for each in found if each.startswith("skyrl_train."))


def files() -> Iterator[tuple[Path, set[str]]]:
    """Python files of the repository, each with the packages whose modules it may import."""
    for file in sorted((ROOT / "skyrl_train").rglob("*.py")):
        yield file, {file.relative_to(ROOT / "skyrl_train").parts[0]}
    for folder in ("scripts", "examples"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file, set()
    for file in sorted((ROOT / "tests").rglob("*.py")):
        of, *rest = file.relative_to(ROOT / "tests").parts
        yield file, {rest[0]} if of == "unit" else OF_WHOLE_RUNS.get(of, set())


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@pytest.mark.slow
def test_who_is_outside_of_a_package_imports_from_its_face() -> None:
    found = []
    for file, homes in files():
        for name in imports_of(file):
            module = name if is_module(name) else name.rpartition(".")[0]
            if is_module(module) and owner(module).split(".")[-1] not in homes and is_private(module):
                found.append(f"{file.relative_to(ROOT)} imports {module}: import from {module.rpartition('.')[0]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("face", FACES)
def test_a_face_says_what_it_is_for_and_exports_few_names(face: str) -> None:
    names = exported(face)  # that they exist is the type checker's to say
    assert len(names) <= MOST_NAMES
    assert len(set(names)) == len(names)
    assert ast.get_docstring(ast.parse(source(face).read_text(encoding="utf-8"))) or not names


@pytest.mark.parametrize("face", FACES)
def test_no_name_is_that_of_a_module_of_the_package(face: str) -> None:
    """Who imports the module would put it in the name's place."""
    for node in ast.walk(ast.parse(source(face).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module != face:
            assert not [each.name for each in node.names if is_module(f"{face}.{each.name}")]


def test_each_exported_name_is_used_outside_of_its_package_or_documented() -> None:
    used = {name for file, homes in files() for name in imports_of(file) if owner(name).split(".")[-1] not in homes}
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    through = re.findall(r"\b(\w+)\.(\w+)", "\n".join(file.read_text(encoding="utf-8") for file, _ in files()))
    named = {f"{package}.{name}" for package, name in through}
    idle = [
        f"{face}.{name}"
        for face in FACES
        for name in exported(face)
        if f"{face}.{name}" not in used
        and f"{face.rpartition('.')[2]}.{name}" not in named
        and not re.search(rf"\b{name}\b", pages)
    ]
    assert not idle, "\n".join(idle)
