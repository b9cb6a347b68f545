"""`skyrl-capsule run RUN --step N`: executes one step of a run again, here and now, and compares; `bisect` finds what made
its loss or gradient bad.

Both read the step's capsule (`trainer.capsules=5` keeps those of the last five steps; a step that is refused leaves one by
itself) and write nothing to RUN. Exit status: 0 where the step is the same again, or something was found; 1 where it
differs, or nothing was found; 2 where there is no such capsule, or a file of it was damaged.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from skyrl_train import runs
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.system import find_modules_here
from skyrl_train.trainers import capsules


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `skyrl-capsule`; returns the exit status."""
    options = _parser().parse_args(argv)
    if argv is None:
        find_modules_here()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: idle threads spin on busy cores

    try:
        return _run(options) if options.command == "run" else _bisect(options)
    except SkyrlTrainError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="skyrl-capsule", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="execute a step again and compare", allow_abbrev=False)
    run.add_argument("--output", type=Path, metavar="FOLDER", help="keep the batch and the models here")
    bisect = commands.add_parser("bisect", help="find the weight, or the trajectory and token", allow_abbrev=False)
    bisect.add_argument(
        "--outlier", action="store_true", help="look for a large gradient, not for one that is not finite"
    )
    for each in (run, bisect):
        each.add_argument("run", type=Path, metavar="RUN", help="the run's output folder")
        each.add_argument("--step", type=int, required=True, metavar="N", help="training step, from 1")
    return parser


def _run(options: argparse.Namespace) -> int:
    opened = runs.open_capsule(options.run, options.step)
    refusal = opened.capsule.refusal
    if refusal is not None:
        found = runs.refuse_again(opened)
        _say([f"step {options.step} was refused: {refusal.error}", f"here: {found or 'it is not refused'}"])
        return 0 if found else 1
    bounds = opened.bounds()
    with ExitStack() as stack:
        output = options.output or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-capsule-")))
        output.mkdir(parents=True, exist_ok=True)
        lines = runs.run_again(opened, output)
    said = "every bit is compared" if bounds.is_exact else "on another placement: rounding is bounded"
    worst = max(lines, key=lambda line: (not line.holds, line.largest))
    differing = [line for line in lines if not line.holds]
    _say([f"step {options.step} of {options.run}, executed again in this process; {said}", capsules.table(lines)])
    _say([f"largest difference: {worst.what}, {worst.largest:.3g}" if worst.largest else "no difference anywhere"])
    _say([f"{len(differing)} of {len(lines)} differ" if differing else f"all {len(lines)} are the same"])
    return 1 if differing else 0


def _bisect(options: argparse.Namespace) -> int:
    found = runs.bisect(runs.open_capsule(options.run, options.step), outlier=options.outlier)
    _say(found.lines)
    return 0 if found.is_found else 1


def _say(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
