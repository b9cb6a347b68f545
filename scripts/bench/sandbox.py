"""What a call of the reward `code` costs, by level of `environment.sandbox`: `python scripts/bench/sandbox.py`.

Each call starts two processes of Python, and with namespaces bubblewrap before each. Best on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time

from skyrl_train.rollout.rewards import run_tests
from skyrl_train.system.sandbox import sandbox

CODE = "def add(a, b): return a + b"
TESTS = [f"assert add({number}, 1) == {number + 1}" for number in range(3)]


def measure(level: sandbox.Level, num_calls: int) -> str:
    """Return a row of the table."""
    walls = []
    for _ in range(num_calls):
        begun = time.perf_counter()
        verdict = run_tests(CODE, TESTS, timeout_s=30.0, memory_mb=512, sandbox=level)
        walls.append(time.perf_counter() - begun)
        assert verdict.passed == len(TESTS), verdict
    return f"| {level} | {1e3 * statistics.median(walls):.0f} | {1e3 * max(walls):.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=50)
    arguments = parser.parse_args()
    print("| level | ms, median | ms, longest |")
    print("|---|---|---|")
    for level in ("required", "best", "off"):
        if found := sandbox.violations(level, "this script"):
            print(f"| {level} | {found[0]} | |")
            continue
        print(measure(level, arguments.calls))
    found = sandbox.programs
    sandbox.programs = list
    sandbox._way.cache_clear()
    print(measure("best", arguments.calls).replace("best", "best, without namespaces"))
    sandbox.programs = found


if __name__ == "__main__":
    main()
