"""The pictures of docs/viewer.md and README: four views, each of which is drawn without a complaint of the browser.

    SKYRL_TRAIN_PICTURES=docs/images SKYRL_TRAIN_PICTURE_RUNS=RUN:RUN pytest -m browser tests/browser/test_pictures.py

writes those there are. They were made of two runs of `./scripts/quickstart.sh`, the second with
`trainer.policy.optimizer.lr=1e-4`. Without the variables the runs are made up, and the pictures go nowhere.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("duckdb")

from tests.support.browser_pages import PHONE, Page, served
from tests.support.view_runs import write_run

pytestmark = pytest.mark.browser

TALL, WIDE = (1280, 1010), (1280, 740)
UNSURE = (
    "api/trajectories?run={run}&purpose=train&outcome=done&step_max=6&turns_min=2&reward_min=0.5&sort=tokens&limit=1"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs; the first is looked at."""
    if given := os.environ.get("SKYRL_TRAIN_PICTURE_RUNS"):
        return [Path(each) for each in given.split(":")]
    root = tmp_path_factory.mktemp("runs")
    return [write_run(root / name, steps=12, prompts=6, samples=6, turns=4, hostile=False) for name in ("a", "b")]


@pytest.fixture(scope="module")
def page(chromium: Any, runs: list[Path]) -> Iterator[Page]:
    with served(*runs) as address:
        yield Page(chromium, address)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(os.environ.get("SKYRL_TRAIN_PICTURES", tmp_path))


def taken(page: Page, picture: Path) -> tuple[int, int]:
    """Take the picture; its width and height."""
    assert page.errors() == []
    page.save(picture)
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    return width, height


def test_the_overview_of_two_runs(page: Page, runs: list[Path], folder: Path) -> None:
    page.size(TALL)
    page.open("overview", run=runs[0].name, smooth=0.6, **{"with": ",".join(run.name for run in runs[1:])})
    assert taken(page, folder / "viewer_overview.png") == TALL


def test_a_group_and_its_trajectory_in_the_dark(page: Page, runs: list[Path], folder: Path) -> None:
    script = "return (async (path) => (await (await fetch(path)).json()).rows[0])(arguments[0])"
    row = page.js(script, UNSURE.format(run=quote(runs[0].name)))
    group = {name: row[name] for name in ("purpose", "step", "uid")}
    page.size(WIDE)
    page.open("group", run=runs[0].name, **group)
    assert taken(page, folder / "viewer_group.png") == WIDE
    page.dark(True)
    page.open("trajectory", run=runs[0].name, sample=row["sample"], colour="logprob", **group)
    page.click(".turn:last-of-type .tokens span[data-n='2']")
    assert taken(page, folder / "viewer_trajectory.png") == WIDE
    page.dark(False)


def test_groups_on_a_phone(page: Page, runs: list[Path], folder: Path) -> None:
    page.size(PHONE)
    page.open("groups", run=runs[0].name).until("return document.querySelector('a.group')")
    assert taken(page, folder / "viewer_phone.png") == PHONE
