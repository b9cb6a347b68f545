"""How long the viewer takes to answer for a run of many turns: the first page, and every filter.

    python scripts/bench_view.py [--turns 100000] [--check]

Writes a synthetic run (tests/view_runs.py), starts `skyrl-view` on it as a user would, and asks over HTTP. What the first
view needs is asked for right after the address is printed, with nothing read before; then the filters of the lists, each
three times, of which the slowest counts. With `--check` the exit status is 1 where the first view takes 2 s or a filter 1 s.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.view_runs import write_large_run

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
START_LIMIT_S = 60.0


def main() -> int:
    """Print a line for each question; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=100_000)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = write_large_run(Path(folder) / "run", turns=args.turns)
        files = list(run.glob("rollouts/*"))
        size = sum(file.stat().st_size for file in files) / 1e6
        print(f"about {args.turns} turns in {len(files)} files, {size:.0f} MB")
        began = time.perf_counter()
        command = [sys.executable, "-m", "skyrl_train.view", str(run), "--no-browser"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                address = re.match(r"(http://[^/]+)/\?token=(\S+)", server.stdout.readline())
                if address is None:
                    raise SystemExit("skyrl-view did not start")
                print(f"{'start of the command':28} {time.perf_counter() - began:6.2f} s")
                worst_first, worst_filter = measure(address[1], address[2], last=len(list(run.glob("rollouts/train*"))))
            finally:
                server.terminate()
    print(f"{'first view, in all':28} {worst_first:6.2f} s  (limit {FIRST_LIMIT_S:g})")
    print(f"{'slowest filter':28} {worst_filter:6.2f} s  (limit {FILTER_LIMIT_S:g})")
    return int(args.check and (worst_first >= FIRST_LIMIT_S or worst_filter >= FILTER_LIMIT_S))


def measure(home: str, token: str, *, last: int) -> tuple[float, float]:
    """Return the seconds of the first view and those of the slowest filter."""
    with httpx.Client(base_url=home, timeout=START_LIMIT_S, follow_redirects=True) as client:
        began = time.perf_counter()
        client.get("/", params={"token": token})
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
    sys.exit(main())
