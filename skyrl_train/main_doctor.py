"""`skyrl-doctor RUN [RUN2]`: what is wrong with a run, worst first, since which step, and which rows prove it.
`skyrl-doctor audit RUN`: whether what it recorded can be computed again from its checkpoints.

RUN is the output_dir of a run that is going on or over, or what TRL and verl dump of completions. It is read and never
written to. Exit status 1 where something worse than a note is found, 2 where RUN cannot be read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_train.doctor import MAX_FINDINGS, as_json, as_text, custom_rule, examine
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.system import find_modules_here
from skyrl_train.telemetry.reading import find_runs


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `skyrl-doctor`; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    find_modules_here()
    try:
        return _audit(arguments[1:]) if arguments[:1] == ["audit"] else _examine(arguments)
    except SkyrlTrainError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2


def _examine(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="skyrl-doctor",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument(
        "--rule", action="append", default=[], metavar="MODULE:FUNCTION", help="a rule of your own, too"
    )
    parser.add_argument("--all", action="store_true", help=f"all findings, where there are more than {MAX_FINDINGS}")
    parser.add_argument("--json", action="store_true", help="all findings as one JSON list, an object a run")
    options = parser.parse_args(arguments)
    own_rules = {target: custom_rule(target) for target in options.rule}
    examined = [examine(run, own_rules) for run in find_runs(options.runs)]
    if options.json:
        told = json.dumps([as_json(findings, tables) for findings, tables in examined], indent=1, ensure_ascii=False)
    else:
        most = sys.maxsize if options.all else MAX_FINDINGS
        told = "\n\n".join(as_text(findings, tables, most=most) for findings, tables in examined)
    sys.stdout.write(f"{told}\n")
    return int(any(each.level != "note" for findings, _ in examined for each in findings))


def _audit(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="skyrl-doctor audit",
        description="Computes log-probabilities, advantages and rewards again, from the checkpoints of RUN.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's output folder")
    parser.add_argument(
        "--step", type=int, action="append", default=[], metavar="N", help="this step alone; may come again"
    )
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: idle threads spin on busy cores
    from skyrl_train.runs import audit

    lines = list(audit.audit(options.run, options.step))
    sys.stdout.write(f"{audit.table(lines)}\n")
    return int(not all(line.holds for line in lines))


if __name__ == "__main__":
    sys.exit(main())
