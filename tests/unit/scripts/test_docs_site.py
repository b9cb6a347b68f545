"""The pages of the documentation site, and the site itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.source_calls import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
import make_site_pages as site


def named_in(entry: Any) -> list[str]:
    """The files below an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    return [name for each in (entry.values() if isinstance(entry, dict) else entry) for name in named_in(each)]


def test_the_navigation_leads_to_pages_that_there_are_each_once() -> None:
    settings = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    named = named_in(settings["nav"])
    assert len(named) == len(set(named)) > 30
    assert set(named) <= {*site.pages(), "api.md"}


def test_what_a_page_names_becomes_a_link_that_holds(tmp_path: Path) -> None:
    site.write_pages(tmp_path)
    text = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert "[status](status.md)" in text
    assert "](docs/" not in text
    assert "](images/learning_curve.png)" in text
    assert (tmp_path / "images" / "learning_curve.png").exists()
    assert "`docs/configuration.md`](configuration.md)" in (tmp_path / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("See `data.md`, `docs/data.md#rows`.", "See [`data.md`](data.md), `docs/data.md#rows`."),
        ("[tests](../tests/unit) and [rows](data.md#rows)", "tests (`../tests/unit`) and [rows](data.md#rows)"),
        ("```sh\ncat docs/data.md `docs/data.md`\n```\n", "```sh\ncat docs/data.md `docs/data.md`\n```\n"),
    ],
)
def test_links_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, shown: str) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    known = {name: folder / name for name in ("data.md", "this.md")}
    monkeypatch.setattr(site, "ROOT", tmp_path)
    known["this.md"].write_text(line, encoding="utf-8")
    assert site.converted(known["this.md"], known) == shown


def test_a_link_to_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "ROOT", tmp_path)
    (tmp_path / "this.md").write_text("[x](../scripts/gone.py)", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"this\.md: \.\./scripts/gone\.py is neither a page nor a file"):
        site.converted(tmp_path / "this.md", {"this.md": tmp_path / "this.md"})


def test_versions_are_listed_newest_first(tmp_path: Path) -> None:
    for name in ("0.1", "0.2"):
        (tmp_path / name).mkdir()
    site.list_versions(tmp_path, "0.2")
    assert [each["version"] for each in yaml.safe_load((tmp_path / "versions.json").read_text())] == ["0.2", "0.1"]
    assert "url=0.2/" in (tmp_path / "index.html").read_text()


def run_script(name: str, *arguments: str) -> str:
    """What a script says; skips the test where no package index answers."""
    variables = {**os.environ, "SKYRL_TRAIN_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["sh", str(REPOSITORY / "scripts" / name), *arguments]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=840, check=False)
    if "could not be installed" in ran.stderr:
        pytest.skip(f"{name}: no package index answered: {ran.stderr[-400:]}")
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    return ran.stdout + ran.stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_the_site_is_built_strictly_with_the_reference_and_a_search() -> None:
    run_script("docs.sh")
    built = REPOSITORY / "build" / "site" / "latest"
    reference = (built / "api" / "index.html").read_text(encoding="utf-8")
    assert all(name in reference for name in ("NonFiniteError", "skyrl_train.api.train"))
    assert "NonFiniteError" in (built / "search.json").read_text(encoding="utf-8")
    assert (built.parent / "versions.json").exists()


@pytest.mark.slow
def test_the_wheel_trains_the_quickstart_and_an_own_task_from_another_folder() -> None:
    said = run_script("check_wheel.sh", "--quick")
    assert "two steps of the quickstart ran" in said
    assert "a step of the README's own task ran by skyrl-train" in said
    assert "its export was evaluated by the reward of its run" in said
