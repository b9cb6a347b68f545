"""What pyproject.toml says, held against the code, the pages and the locks."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from itertools import pairwise
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import skyrl_train
from skyrl_train.system import DISTRIBUTION, install_command
from tests.support.source_calls import REPOSITORY

TOLD = {"PIL": "pillow", "aiohttp": "aiohttp", "mcp_types": "mcp"}
"""Packages that a run is told to install when it needs them, and a module of an extra with a name of its own."""
DISTRIBUTIONS = {
    "hydra": "hydra-core",
    "yaml": "pyyaml",
    "openenv": "openenv-core",
    "prometheus_client": "prometheus-client",
    "mlflow": "mlflow-skinny",
    "pydantic_core": "pydantic",  # which requires one version of it
}
"""By what is imported, where the names differ by more than a hyphen."""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no parser for TOML")
    parsed: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    return parsed["project"]


def imported() -> set[str]:
    """Top-level names of other packages that the package imports, inside functions too."""
    found: set[str] = set()
    for path in (REPOSITORY / "skyrl_train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"skyrl_train"}


@pytest.mark.slow
def test_each_package_that_is_imported_is_required_or_an_extra(project: dict[str, Any]) -> None:
    lines = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    required = {Requirement(line).name.lower() for line in lines}
    missing = {
        name for name in imported() - TOLD.keys() if DISTRIBUTIONS.get(name, name.replace("_", "-")) not in required
    }
    assert missing == set()


def test_the_version_has_one_home(project: dict[str, Any]) -> None:
    citation = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {project['version']}\n" in citation
    changes = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## ([\d.]+)", changes, flags=re.MULTILINE)[0] == project["version"]
    assert skyrl_train.__version__ == metadata.version(DISTRIBUTION)


def test_classifiers_name_the_versions_of_python_that_are_allowed(project: dict[str, Any]) -> None:
    listed = {each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r"Python :: 3\.\d+$", each)}
    allowed = SpecifierSet(project["requires-python"])
    assert listed == {f"3.{minor}" for minor in range(8, 20) if allowed.contains(f"3.{minor}")}


def test_the_page_on_installing_names_each_extra(project: dict[str, Any]) -> None:
    table = (REPOSITORY / "docs" / "installing.md").read_text(encoding="utf-8").partition("## Extras")[2]
    named = set(re.findall(r"`([\w-]+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if "| " in line)))
    assert named == project["optional-dependencies"].keys()


def test_uv_lock_is_of_these_requirements_and_names_pypi_alone(project: dict[str, Any]) -> None:
    """`scripts/lock.sh` writes it."""
    tomllib = pytest.importorskip("tomllib")
    text = (REPOSITORY / "uv.lock").read_text(encoding="utf-8")
    assert set(re.findall(r"\w+://([^/\"]+)", text)) == {"pypi.org", "files.pythonhosted.org"}
    assert set(re.findall(r"source = \{ (\w+) =", text)) == {"registry", "editable"}
    packages = tomllib.loads(text)["package"]
    (ours,) = (each for each in packages if each["name"] == DISTRIBUTION)
    locked = {
        (each["name"], SpecifierSet(each.get("specifier", "")), extra_of(each.get("marker", "")))
        for each in ours["metadata"]["requires-dist"]
    }
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    stated = {
        (Requirement(line).name.lower(), Requirement(line).specifier, extra)
        for extra in groups
        for line in groups[extra]
    }
    assert locked == stated, "run scripts/lock.sh"
    versions: dict[str, set[Version]] = {}
    for each in packages:
        versions.setdefault(each["name"], set()).add(Version(each.get("version", "0")))
    for name, specifier, _ in stated:
        assert all(specifier.contains(version) for version in versions[name]), name


def extra_of(marker: str) -> str:
    found = re.search(r"extra == '([\w-]+)'", marker)
    return found[1] if found else ""


STRANGERS = {
    "hydra-optuna-sweeper": "one of Hydra's own plug-ins",
    "s3fs": "a file system of fsspec's",
    "pillow": "with images, and the model's processor asks for it",
    "flash-attn": "a kernel of another project, on GPUs",
    "langchain": "in the agent's own environment",
    "langgraph": "in the agent's own environment",
    "langchain-openai": "in the agent's own environment",
}
"""Packages that no extra has although a command names them, and why."""
COMMAND = re.compile(r"\bpip install ((?:(?!  )[^`\"#;|&)\\\n])+)", re.IGNORECASE)
WITH_VALUE = ("-r", "--index-url", "--extra-index-url", "--override")
OF_ANOTHER_PROJECT = re.compile(r"skyrl[-_]train\[", re.IGNORECASE)


def read_by_users() -> Iterator[tuple[str, str]]:
    """Pages, configurations, examples and the package: where a command may be read."""
    for place in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "conf", "examples", "skyrl_train"):
        found = [REPOSITORY / place] if place.endswith(".md") else sorted((REPOSITORY / place).rglob("*"))
        for path in found:
            if path.suffix in (".md", ".yaml", ".py") and path.name != "installed.py":  # which composes such commands
                yield str(path.relative_to(REPOSITORY)), path.read_text(encoding="utf-8")


def packages_of(command: str) -> list[str]:
    """What `pip install` is told to install, up to what is filled in later; of `--no-deps` the first alone."""
    words = [quoted or word for quoted, word in re.findall(r"'([^']+)'|([^\s']+)", command.partition("{")[0])]
    values = {after for word, after in pairwise(words) if word in WITH_VALUE}
    packages = [each for each in words if not each.startswith("-") and each not in values]
    return packages[: 1 if "--no-deps" in words else None]


def is_of(project: dict[str, Any], package: str) -> bool:
    """Whether it is the checkout, with extras that there are, or a package of this project's, in its versions if in any."""
    if of_checkout := re.fullmatch(r"\.(?:\[([\w,-]+)\])?|one_gradient_skyrl_train-\*\.whl", package):
        return of_checkout[1] is None or {*of_checkout[1].split(",")} <= project["optional-dependencies"].keys()
    named = Requirement(package)
    groups = (project["dependencies"], *project["optional-dependencies"].values())
    ranges = [Requirement(line) for lines in groups for line in lines]
    pin = re.fullmatch(r"==([\w.+]+)", str(named.specifier))
    return named.name in STRANGERS or any(
        not named.specifier
        or each.specifier == named.specifier
        or (pin is not None and each.specifier.contains(pin[1]))
        for each in ranges
        if each.name == named.name
    )


def test_each_command_that_installs_something_names_packages_of_this_project(project: dict[str, Any]) -> None:
    named = [
        (page, each) for page, text in read_by_users() for found in COMMAND.findall(text) for each in packages_of(found)
    ]
    assert len(named) > 25
    assert [(page, package) for page, package in named if not is_of(project, package)] == []


def test_no_command_names_the_project_that_has_this_ones_name_on_the_index() -> None:
    assert [(page, found) for page, text in read_by_users() for found in OF_ANOTHER_PROJECT.findall(text)] == []


def test_advice_about_an_extra_is_about_one_that_there_is(project: dict[str, Any]) -> None:
    asked = {extra for _, text in read_by_users() for extra in re.findall(r"install_command\([\"'](\w+)[\"']\)", text)}
    assert {"lora", "view", "mcp"} <= asked <= project["optional-dependencies"].keys()
    for extra in asked:
        stated = {Requirement(line) for line in project["optional-dependencies"][extra]}
        told = {Requirement(each) for each in packages_of(install_command(extra).removeprefix("pip install "))}
        assert {(each.name, each.specifier) for each in told} == {(each.name, each.specifier) for each in stated}


def test_the_name_that_pip_knows_is_this_projects_alone(project: dict[str, Any]) -> None:
    assert project["name"] == DISTRIBUTION
    assert not DISTRIBUTION.replace("_", "-").startswith("skyrl-train")
