"""`skyrl-doctor RUN [RUN2]`: what is wrong with a run, worst first. `skyrl-doctor audit RUN`: whether what it recorded can
be computed again from its checkpoints.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_train.doctor.__main__ import main as examine
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.system import find_modules_here


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `skyrl-doctor`; returns the exit status: 1 where something is wrong, 2 for no run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] != ["audit"]:
        return examine(arguments)
    parser = argparse.ArgumentParser(
        prog="skyrl-doctor audit",
        description="Computes log-probabilities, advantages and rewards again, from the checkpoints of RUN.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's output folder")
    parser.add_argument(
        "--step", type=int, action="append", default=[], metavar="N", help="this step alone; may come again"
    )
    options = parser.parse_args(arguments[1:])
    find_modules_here()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: idle threads spin on busy cores
    from skyrl_train.runs import audit

    try:
        lines = list(audit.audit(options.run, options.step))
    except SkyrlTrainError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    sys.stdout.write(f"{audit.table(lines)}\n")
    return int(not all(line.holds for line in lines))


if __name__ == "__main__":
    sys.exit(main())
