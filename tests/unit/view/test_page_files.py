"""The page's own files: no browser needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

STATIC = Path(__file__).resolve().parents[3] / "skyrl_train" / "view" / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))
MAKES_MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|\beval\(|new Function"
)


def test_scripts_never_make_markup_of_text() -> None:
    assert len(SCRIPTS) >= 6
    assert [path.name for path in SCRIPTS if MAKES_MARKUP.search(path.read_text())] == []


def test_the_page_names_each_of_its_files_once_and_no_other() -> None:
    page = (STATIC / "index.html").read_text()
    named = re.findall(r'^<link rel="stylesheet" href="static/([^"]+)">$', page, re.M)
    named += re.findall(r'^<script src="static/([^"]+)" defer></script>$', page, re.M)

    files = [path for path in STATIC.rglob("*") if path.suffix in (".js", ".css")]
    assert sorted(named) == sorted(path.relative_to(STATIC).as_posix() for path in files)
    assert page.count("<script") == sum(name.endswith(".js") for name in named)
    assert "style=" not in page  # the page's policy refuses it


def test_a_vendored_library_comes_with_its_licence() -> None:
    assert "Leon Sorokin" in (STATIC / "vendor" / "uPlot.LICENSE").read_text()
    assert "(v1.6.32)" in (STATIC / "vendor" / "uPlot.iife.min.js").read_text()[:100]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_scripts_parse_alone_and_share_no_name(tmp_path: Path) -> None:
    for path in SCRIPTS:
        subprocess.run(["node", "--check", path], check=True, timeout=30)
    together = tmp_path / "all.js"  # they share one scope in the page: a name that two of them declare is refused here
    together.write_text("\n".join(path.read_text() for path in SCRIPTS))
    subprocess.run(["node", "--check", together], check=True, timeout=30)


def test_scripts_and_styles_stay_small() -> None:
    lines = [len(path.read_text().splitlines()) for path in (*SCRIPTS, STATIC / "app.css")]
    assert sum(lines) <= 2950
    assert max(lines) <= 400
