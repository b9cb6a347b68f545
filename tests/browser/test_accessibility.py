"""The viewer's page by axe-core, the rules that screen readers' makers agree on; and whether a wide window is used."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")

from tests.support.browser_pages import Page, served
from tests.support.view_runs import write_run

pytestmark = pytest.mark.browser

OF_STEP = {"purpose": "train", "step": 2, "uid": "train-1"}
VIEWS: dict[str, dict[str, Any]] = {
    "overview": {},
    "groups": {"metric": "solved"},
    "group": OF_STEP,
    "trajectories": {"metric": "turns"},
    "trajectory": {**OF_STEP, "sample": 0},
    "failures": {},
    "findings": {},
}
SERIOUS = ("serious", "critical")
WIDE = (1400, 900)


@pytest.fixture(scope="module")
def axe() -> str:
    """The script of axe-core, from the package that has it inside."""
    spec = find_spec("axe_core_python")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("axe-core is not installed: pip install axe-core-python")
    (script,) = Path(spec.submodule_search_locations[0]).glob("axe.min.js")
    return script.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("runs")
    runs = [
        write_run(root / name, steps=6, prompts=6, samples=6, turns=3, seed=len(name)) for name in ("demo", "other")
    ]
    with served(*runs) as found:
        yield found


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("is_dark", [False, True])
def test_axe_finds_nothing_serious(chromium: Any, address: str, axe: str, view: str, is_dark: bool) -> None:
    page = Page(chromium, address)
    page.dark(is_dark)
    page.open(view, run="demo", **VIEWS[view])
    page.until("return !document.querySelector('.list') || document.querySelector('.list a')")
    page.js(axe)
    found = page.driver.execute_async_script("axe.run(document).then(arguments[0])")
    assert len(found["passes"]) > 10
    serious = [
        (each["id"], each["help"], [node["html"][:120] for node in each["nodes"][:3]])
        for each in found["violations"]
        if each["impact"] in SERIOUS
    ]
    assert serious == []


@pytest.mark.parametrize("view", VIEWS)
def test_a_wide_window_is_used(chromium: Any, address: str, view: str) -> None:
    page = Page(chromium, address)
    page.size(WIDE)
    page.open(view, run="demo", **VIEWS[view])
    page.until("return !document.querySelector('.list') || document.querySelector('.list a')")
    right = page.js(
        """return Math.max(...[...document.querySelectorAll('#main figure, #main section, #main article, #main .list')]
            .map((e) => e.getBoundingClientRect().right))"""
    )
    assert right >= 0.95 * WIDE[0]
    assert page.js("return document.documentElement.scrollWidth <= innerWidth")
