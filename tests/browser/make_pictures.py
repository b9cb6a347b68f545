"""Writes the pictures of docs/viewer.md and README: of real runs, the first of which is looked at.

    python tests/browser/make_pictures.py docs/images RUN [RUN ...]

Those there are were made of two runs of `./scripts/quickstart.sh`, the second with `trainer.policy.optimizer.lr=1e-4`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from browser_pages import PHONE, Page, served, start_chromium

TALL, WIDE = (1280, 1010), (1280, 740)
UNSURE = (
    "api/trajectories?run={run}&purpose=train&outcome=done&step_max=6&turns_min=2&reward_min=0.5&sort=tokens&limit=1"
)


def main() -> None:
    """Write `viewer_overview`, `viewer_group`, `viewer_trajectory` (dark) and `viewer_phone`, as PNG."""
    folder, first, *others = [Path(argument) for argument in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as profile, served(first, *others) as address:
        driver = start_chromium(Path(profile))
        page = Page(driver, address)
        try:
            _picture_views(page, folder, first.name, ",".join(other.name for other in others))
        finally:
            driver.quit()


def _picture_views(page: Page, folder: Path, run: str, others: str) -> None:
    row = page.js(
        "return (async (path) => (await (await fetch(path)).json()).rows[0])(arguments[0])",
        UNSURE.format(run=quote(run)),
    )
    group = {name: row[name] for name in ("purpose", "step", "uid")}

    page.size(TALL)
    page.open("overview", run=run, smooth=0.6, **{"with": others})
    page.save(folder / "viewer_overview.png")
    page.size(WIDE)
    page.open("group", run=run, **group)
    page.save(folder / "viewer_group.png")
    page.dark(True)
    page.open("trajectory", run=run, sample=row["sample"], colour="logprob", **group)
    page.click(".turn:last-of-type .tokens span[data-n='2']")
    page.save(folder / "viewer_trajectory.png")
    page.dark(False)
    page.size(PHONE)
    page.open("groups", run=run).until("return document.querySelector('a.group')")
    page.save(folder / "viewer_phone.png")


if __name__ == "__main__":
    main()
