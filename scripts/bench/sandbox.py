"""What a call of the reward `code` costs, by level of `environment.sandbox`: `python scripts/bench/sandbox.py`.

Each call starts two processes of Python, and with namespaces bubblewrap before each. Best on an idle machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import harness

from skyrl_train.rollout.rewards import run_tests
from skyrl_train.system.sandbox import sandbox

CODE = "def add(a, b): return a + b"
TESTS = [f"assert add({number}, 1) == {number + 1}" for number in range(3)]


def measure(level: sandbox.Level, num_calls: int) -> tuple[str, str]:
    """Return milliseconds of the median call and of the longest."""
    walls = []
    for _ in range(num_calls):
        begun = time.perf_counter()
        verdict = run_tests(CODE, TESTS, timeout_s=30.0, memory_mb=512, sandbox=level)
        walls.append(time.perf_counter() - begun)
        assert verdict.passed == len(TESTS), verdict
    return f"{1e3 * statistics.median(walls):.0f}", f"{1e3 * max(walls):.0f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--calls", type=int, default=50)
    arguments = parser.parse_args(argv)
    table = harness.Table("level", "ms, median", "ms, longest")
    for level in ("required", "best", "off"):
        missing = sandbox.violations(level, "this script")
        table.row(level, *((missing[0], "") if missing else measure(level, arguments.calls)))
    found = sandbox.programs
    sandbox.programs = list
    sandbox._way.cache_clear()
    table.row("best, without namespaces", *measure("best", arguments.calls))
    sandbox.programs = found


if __name__ == "__main__":
    harness.run(main)
