"""`skyrl-doctor RUN [RUN2]`: what is wrong with a run, worst first, since which step, and which rows prove it.

RUN is the output_dir of a run that is going on or over, or what TRL and verl dump of completions. It is read and never
written to. Exit status 1 where something worse than a note is found, 2 where RUN cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_train.doctor.findings import MAX_FINDINGS, custom_rule
from skyrl_train.doctor.report import as_json, as_text, examine
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.telemetry.reading import find_runs


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `skyrl-doctor`; returns the exit status."""
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
    args = parser.parse_args(argv)
    try:
        own_rules = {target: custom_rule(target) for target in args.rule}
        examined = [examine(run, own_rules) for run in find_runs(args.runs)]
    except SkyrlTrainError as error:
        print(f"skyrl-doctor: {error}", file=sys.stderr)  # noqa: T201
        return 2
    if args.json:
        told = json.dumps([as_json(findings, tables) for findings, tables in examined], indent=1, ensure_ascii=False)
    else:
        most = 10**6 if args.all else MAX_FINDINGS
        told = "\n\n".join(as_text(findings, tables, most=most) for findings, tables in examined)
    print(told)  # noqa: T201
    return int(any(each.level != "note" for findings, _ in examined for each in findings))


if __name__ == "__main__":
    sys.exit(main())
