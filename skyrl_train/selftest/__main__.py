"""The command `python -m skyrl_train.selftest` (console script `skyrl-selftest`).

    python -m skyrl_train.selftest                              all cases on what is there
    python -m skyrl_train.selftest --device cpu --only kernels  some of them, on the CPU
    python -m skyrl_train.selftest --json report.json           a file to attach to a report
    python -m skyrl_train.selftest --measure --budget 600       how fast the device is, into the folder measured

Exit status: 0 all cases passed or were skipped; 1 a case failed; 2 nothing could be run as asked; 130 Ctrl-C, after the
report of what had run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

from skyrl_train.selftest import measure
from skyrl_train.selftest.cases import CASES, Case, chosen_cases
from skyrl_train.selftest.machine import Machine
from skyrl_train.selftest.processes import CaseResult, SharedProcess, run_body, run_case, work, work_on
from skyrl_train.system.processes import answer

STATUS_FAILED, STATUS_UNUSABLE, STATUS_INTERRUPTED = 1, 2, 130
_DETECT_DEADLINE_S = 180.0
_LEAST_S = 5.0
"""With less time left no piece is begun."""
_NAME_WIDTH = max(len(case.name) for case in CASES) + 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that the arguments choose; the exit status."""
    parser = argparse.ArgumentParser(
        prog="skyrl-selftest",
        description="Check what this machine computes, case by case. Meant for 7 minutes on one GPU; 5 on a CPU.",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the cases compute")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a case, or all below NAME/; may be repeated"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    parser.add_argument("--measure", action="store_true", help="measure how fast the device is, in place of the cases")
    parser.add_argument(
        "--budget", type=float, default=600.0, metavar="S", help="seconds, with --measure (default 600)"
    )
    parser.add_argument("--tiny", action="store_true", help="with --measure: tiny sizes on a GPU, too, to rehearse it")
    parser.add_argument("--output", type=Path, default=Path("measured"), metavar="FOLDER", help="with --measure")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="with --measure: a page whose table is written, too")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker is not None:
        return _worker(options.worker)
    try:
        cases = [] if options.measure else chosen_cases(options.only)
        page = "" if options.docs is None else options.docs.read_text(encoding="utf-8")
        if options.docs is not None and measure.END not in page.partition(measure.BEGIN)[2]:
            raise ValueError(f"--docs {options.docs}: has no line {measure.BEGIN}, or no {measure.END} behind it")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if options.list:
        _say(case.name for case in cases)
        return 0
    try:
        _write_report(options.json, None, [], 0.0)
    except OSError as error:
        parser.error(f"--json {options.json}: {error.strerror}; name a file that can be written")
    found = run_body(
        "machine",
        "machine:detect_machine",
        {"device": options.device},
        deadline_s=_DETECT_DEADLINE_S,
        devices=["cpu"],
        hide_cuda=options.device == "cpu",
    )
    if found.outcome != "pass":
        sys.stderr.write(f"{found.traceback or found.log_tail}\n{found.detail}\n")
        _write_report(options.json, None, [found], found.seconds)
        return STATUS_UNUSABLE
    machine = Machine(**found.value)
    _say(machine.lines())
    if options.measure:
        try:
            cases = chosen_cases(options.only, measure.pieces(machine, options.output, tiny=options.tiny))
        except ValueError as error:
            parser.error(str(error))
    started = time.monotonic()
    results: list[CaseResult] = []
    interrupted = _run(cases, machine, options, results)
    seconds = time.monotonic() - started
    _say(summary(machine, results, seconds))
    if options.json is not None:
        _say([f"report    {options.json}"])
    if options.measure:
        _say([f"rates     {options.output}/rates.json, rates.md", f"measured  {len(results)} of {len(cases)} pieces"])
    if interrupted:
        return STATUS_INTERRUPTED
    return STATUS_FAILED if any(result.outcome == "fail" for result in results) else 0


def _run(cases: Sequence[Case], machine: Machine, options: argparse.Namespace, results: list[CaseResult]) -> bool:
    """Run the cases one after the other, and write the `results` so far after each; whether a signal ended that."""
    started, shared = time.monotonic(), SharedProcess()
    ends = started + (options.budget if options.measure else math.inf)
    before = answer(
        signal.default_int_handler
    )  # SIGTERM of `timeout` and of schedulers, too: no process is left behind
    try:
        for case in cases:
            left_s = ends - time.monotonic()
            if left_s < _LEAST_S:
                break
            result = run_case(replace(case, deadline_s=min(case.deadline_s, left_s)), machine, shared)
            if result.outcome == "fail" and result.seconds >= left_s:  # nothing is wrong with what began late
                result = replace(result, outcome="skip", detail="no more time")
            results.append(result)
            _say([row(result)])
            _write_report(options.json, machine, results, time.monotonic() - started)
            if options.measure:
                measure.write(cases, results, machine, options.output, options.docs)
    except KeyboardInterrupt:
        return True
    finally:
        shared.close()
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return False


def row(result: CaseResult) -> str:
    """One line of the table."""
    return f"{result.outcome:<5} {result.name:<{_NAME_WIDTH}} {result.seconds:6.1f} s  {result.detail}"


def summary(machine: Machine, results: Sequence[CaseResult], seconds: float) -> list[str]:
    """The last lines: counts, what failed cases said, and whether the report is about supported versions."""
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in ("pass", "fail", "skip")}
    lines = [f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped in {seconds:.0f} s"]
    for result in results:
        if result.outcome == "fail":
            lines += [f"--- {result.name}: {result.detail}", result.traceback, result.log_tail]
    if machine.unsupported:
        lines.append("The versions are not those that this release supports: the report says nothing about it.")
    return lines


def _write_report(path: Path | None, machine: Machine | None, results: Sequence[CaseResult], seconds: float) -> None:
    """JSON: when, what machine, whether its versions are supported, and a row for each case so far."""
    if path is None:
        return
    report = {
        "format": 1,
        "written_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "seconds": round(seconds, 1),
        "supported_versions": machine is not None and not machine.unsupported,
        "machine": None if machine is None else asdict(machine),
        "cases": [{name: value for name, value in asdict(result).items() if name != "value"} for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _worker(order: Path) -> int:
    status = work_on(iter(sys.stdin.readline, "")) if str(order) == "-" else work(order)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo, NCCL or vLLM that outlive the body would abort an interpreter that is torn down.
    os._exit(status)


def _say(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
