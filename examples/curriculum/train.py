"""A curriculum: word problems that the policy solves about half the time are taken more often than others.

    python examples/curriculum/train.py                     # settings may follow

runs the experiment in `conf/` beside this file:

    python -m skyrl_train.main --config-dir examples/curriculum/conf +experiment=curriculum

GRPO learns from problems of which some samples are right and some are not, and nothing from those that all of its samples
solve, or none. What to look at in `metrics.jsonl`: `curriculum/expected_solve_rate` of the problems taken,
`curriculum/resting`, which counts those that are solved and left out for a while, and `group/zero_variance`, the share of
prompts that taught nothing. `data.curriculum.enabled=false` is the same run without it. docs/data.md says what each setting
does; scripts/bench/curriculum.py measures what it saves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def main(settings: list[str]) -> int:
    """Train with further settings of the command line; returns the exit status."""
    conf = Path(__file__).resolve().parent / "conf"
    command = [sys.executable, "-m", "skyrl_train.main", "--config-dir", str(conf), "+experiment=curriculum", *settings]
    return subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
