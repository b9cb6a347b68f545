"""How long the viewer takes for a run of many turns: the first page, and every filter, answered and on the screen.

    python scripts/bench/view.py [--turns 100000] [--check]
    python scripts/bench/view.py --steps 10000 --rows 1000 [--check]        a long run: as many trajectories in each step

Writes a synthetic run (tests/support/view_runs.py), starts `skyrl-view` on it as a user would, and asks over HTTP. What
the first view needs is asked for right after the address is printed, with nothing read before; then the filters of the
lists, each three times, of which the slowest counts. Then a Chromium without a window, where there is one, opens
another fresh viewer: the first paint and the first view with its data drawn count from the request on, a filter from the
change of the address until the list is drawn. Then overview and list are scrolled through, a frame at a time, while Chromium
reports what keeps its main thread for more than 50 ms. With `--check` the exit status is 1 where a first view takes 2 s, a
filter 1 s, or anything is reported; of a long run, of which each question takes in more files, where the page takes 2 s.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

import harness
import httpx

from tests.support.browser_pages import CHROMIUM, DRIVER, Page, served, start_chromium
from tests.support.view_runs import write_large_run, write_long_run

FIRST = ("", "api/runs", "api/overview", "api/metrics", "api/facets", "api/trajectories")
FILTERS = {
    "trajectories, no filter": "api/trajectories?",
    "one environment": "api/trajectories?environment=search",
    "failed": "api/trajectories?outcome=failed",
    "reward range, by length": "api/trajectories?reward_min=0.5&reward_max=1&sort=tokens",
    "steps 10 to 20": "api/trajectories?step_min=10&step_max=20",
    "last page": "api/trajectories?offset=40000",
    "text that is frequent": "api/trajectories?text=6.7%3D4",
    "text that is nowhere": "api/trajectories?text=(?i)no+such+(word%7Cphrase)$",
    "hostile pattern": "api/trajectories?text=(a*)*b(x%2B)%2By",
    "groups by spread": "api/groups?",
    "groups with a text": "api/groups?text=Wrong&environment=search",
    "failures": "api/failures?",
    "one prompt over steps": "api/prompt?uid=train-4",
    "one trajectory": "api/trajectory?step={last}&uid=train-4&sample=1",
}
FIRST_LIMIT_S = 2.0
FILTER_LIMIT_S = 1.0
_TAKES_IN_MORE = {"first view, answered", "slowest filter, answered", "slowest filter, drawn"}
START_LIMIT_S = 60.0
LONGEST_TASK_S = 0.05
"""What Chromium calls a long task: a shorter one is not reported, and counts as 0."""
SCROLL = """
const done = arguments[0], frames = 240;
let longest = 0, drawn = 0;
new PerformanceObserver((list) => {
  for (const task of list.getEntries()) longest = Math.max(longest, task.duration);
}).observe({ type: "longtask" });
const next = () => {
  scrollBy(0, drawn < frames / 2 ? 300 : 3000);
  if (++drawn < frames) requestAnimationFrame(next);
  else setTimeout(() => done(longest / 1000), 500);
};
requestAnimationFrame(next);
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each question; the exit status."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--turns", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=0, help="with --rows: a run of so many steps")
    parser.add_argument("--rows", type=int, default=1000, help="with --steps: trajectories in each")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        if args.steps:
            write_long_run(run, steps=args.steps, rows=args.rows)
        else:
            write_large_run(run, turns=args.turns)
        files = list(run.glob("rollouts/*"))
        size = sum(file.stat().st_size for file in files) / 1e6
        what = f"{args.steps} steps of {args.rows} trajectories" if args.steps else f"about {args.turns} turns"
        print(f"{what} in {len(files)} files, {size:.0f} MB")
        began = time.perf_counter()
        with served(run) as address:
            print(f"{'start of the command':28} {time.perf_counter() - began:6.2f} s")
            first, filters = measure(address, last=len(list(run.glob("rollouts/train*"))))
        found = {"first view, answered": (first, FIRST_LIMIT_S), "slowest filter, answered": (filters, FILTER_LIMIT_S)}
        if CHROMIUM and DRIVER:
            with served(run) as address:
                found |= measure_page(address, Path(folder) / "profile")
    if args.steps:
        found |= {name: (found[name][0], math.inf) for name in found.keys() & _TAKES_IN_MORE}
    return report(found, check=args.check)


def report(found: Mapping[str, tuple[float, float]], *, check: bool) -> int:
    """Print seconds with their limits; the exit status."""
    for name, (seconds, limit) in found.items():
        print(f"{name:28} {seconds:6.2f} s  (limit {limit:g})")
    if "first paint" not in found:
        print("no Chromium with its driver, or no selenium: what is on the screen is not measured")
    return int(check and any(seconds >= limit for seconds, limit in found.values()))


def measure_page(address: str, profile: Path) -> dict[str, tuple[float, float]]:
    """Return seconds and limits of what a browser shows."""
    driver = start_chromium(profile)
    try:
        page = Page(driver, address)
        paint, shown = (page.opened_in_ms[name] / 1000 for name in ("first-contentful-paint", "shown"))
        if not page.js("return document.querySelectorAll('figure canvas').length"):
            raise SystemExit("the first view has no curve")
        worst = 0.0
        for name, path in FILTERS.items():
            view, query = urlsplit(path).path.removeprefix("api/"), dict(parse_qsl(urlsplit(path).query))
            if view not in ("trajectories", "groups", "failures") or "offset" in query:
                continue
            sort = {"sort": f"{query.pop('sort')} desc"} if "sort" in query else {}
            seconds = []
            for _ in range(3):
                page.open("overview")
                seconds.append(page.seconds_to(f"#/{view}?{urlencode(query | sort)}"))
            print(f"{name + ', on the screen':40} {max(seconds):6.2f} s")
            worst = max(worst, *seconds)
        longest = max(page.open(view).driver.execute_async_script(SCROLL) for view in ("overview", "trajectories"))
    finally:
        driver.quit()
    return {
        "first paint": (paint, FIRST_LIMIT_S),
        "first view, drawn": (shown, FIRST_LIMIT_S),
        "slowest filter, drawn": (worst, FILTER_LIMIT_S),
        "longest task while scrolling": (longest, LONGEST_TASK_S),
    }


def measure(address: str, *, last: int) -> tuple[float, float]:
    """Return the seconds of the first view and those of the slowest filter."""
    with httpx.Client(base_url=address.partition("?")[0], timeout=START_LIMIT_S, follow_redirects=True) as client:
        began = time.perf_counter()
        client.get(address)
        for path in FIRST:
            moment = time.perf_counter()
            client.get(f"/{path}").raise_for_status()
            print(f"{'/' + path:28} {time.perf_counter() - moment:6.2f} s")
        first = time.perf_counter() - began
        worst = 0.0
        for name, path in FILTERS.items():
            seconds = []
            for _ in range(3):
                moment = time.perf_counter()
                answer = client.get(f"/{path.replace('{last}', str(last))}")
                seconds.append(time.perf_counter() - moment)
                answer.raise_for_status()
            found = answer.json()
            print(f"{name:28} {max(seconds):6.2f} s  {found.get('total', '')}")
            worst = max(worst, *seconds)
    return first, worst


if __name__ == "__main__":
    harness.run(main)
