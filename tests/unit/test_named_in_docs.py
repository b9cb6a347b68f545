"""What the documentation names is there: files, commands and their flags, settings, and Python that can be read."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.source_calls import REPOSITORY

PAGES = [
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *(REPOSITORY / f"{name}.md" for name in ("README", "CONTRIBUTING")),
]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
ids = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])

FOLDERS = "scripts|tests|docs|conf|examples|docker|requirements"
FILE = re.compile(rf"(?<![\w/.{{$])((?:{FOLDERS})/[\w./-]+\.(?:py|sh|md|ya?ml|lock|txt|jsonl?|png|sbatch))\b")
SETTINGS = set(re.findall(r"^\| `([\w.]+)`", TEXTS[REPOSITORY / "docs" / "configuration.md"], re.MULTILINE))
SETTING = re.compile(
    r"(?<![\w./+~@-])((?:trainer|generator|data|environment|model|placement|strategy|tracker|platform)(?:\.\w+)+)="
)
COMMAND = re.compile(
    r"(?:python|bin/python) (?:-m )?((?:scripts|skyrl_train|tests)[/.][\w./]+|scripts/[\w/]+\.py)([^\n|`]*)"
)


def python_blocks(page: Path) -> Iterator[tuple[str, bool]]:
    """The Python of a page, and whether it says, `<!-- a fragment: ... -->`, that it needs things of the reader."""
    block = r"(<!-- a fragment: .*-->\n)?^```python[^\n]*\n(.*?)^```"
    for found in re.finditer(block, TEXTS[page], re.MULTILINE | re.DOTALL):
        yield found[2], found[1] is not None


@ids
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    missing = {name for name in FILE.findall(TEXTS[page]) if not (REPOSITORY / name).exists()}
    assert missing == set()


@ids
def test_every_setting_that_a_page_gives_a_value_exists(page: Path) -> None:
    named = set(SETTING.findall(TEXTS[page]))
    unknown = {name for name in named if not any((each + ".").startswith(name + ".") for each in SETTINGS)}
    assert {name for name in unknown if not any(name.startswith(each + ".") for each in SETTINGS)} == set()


@ids
def test_every_command_that_a_page_shows_has_its_flags(page: Path) -> None:
    wrong = []
    for program, rest in COMMAND.findall(TEXTS[page].replace("\\\n", " ")):
        path = REPOSITORY / (program if program.endswith(".py") else program.replace(".", "/") + ".py")
        path = path if path.exists() else path.with_suffix("") / "__main__.py"
        if not path.exists():
            wrong.append(program)
        elif program.startswith("scripts"):
            source = path.read_text(encoding="utf-8")
            wrong += [f"{program} {flag}" for flag in re.findall(r"(?<!\S)(--[\w-]+)", rest) if flag not in source]
    assert wrong == []


@ids
def test_the_python_of_a_page_can_be_read(page: Path) -> None:
    for block, _ in python_blocks(page):
        ast.parse(block)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in TEXTS[page]], ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, each block in a module of its own: what it imports is there, and what it defines can be."""
    monkeypatch.chdir(tmp_path)
    for block, is_fragment in python_blocks(page):
        module = ModuleType("shown")
        monkeypatch.setitem(sys.modules, "shown", module)
        if not is_fragment:
            exec(compile(block, page.name, "exec"), vars(module))


def test_the_checks_find_something_to_check() -> None:
    assert sum(len(FILE.findall(text)) for text in TEXTS.values()) > 200
    assert sum(len(SETTING.findall(text)) for text in TEXTS.values()) > 200
    assert sum(len(COMMAND.findall(text)) for text in TEXTS.values()) > 40
