"""What benchmarks have in common: limits, sides that take turns, runs of the bundled experiment, tables, and the machine.

A benchmark ends with `harness.run(main)`, which runs `main(arguments)` in a process of its own and takes these, too:

    --memory-gb N     that the benchmark, with all that stems from it, may hold; 70 % of what is available unless given
    --deadline-s N    that it may take; six hours unless given
    --json FILE       each row of each table is added to this file as a line of JSON, behind one that tells the machine

Who holds or takes more is ended with all that stems from it, and said so. A side that is a process of its own (`apart`,
`trained`) has the same limit of memory and a deadline of its own, so that one that fails leaves the others.

This module imports neither torch nor numpy: what a process of its own is said to have held counts from its parent on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and of processes that stem from this one
FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
for place in (str(ROOT), str(FOLDER)):  # where modules of tests and those beside this one are found
    if place not in sys.path:
        sys.path.insert(0, place)

from skyrl_train.system import gpu_name, usable_cores  # noqa: E402
from skyrl_train.system.processes import adopt_orphans, end_with_parent, kill  # noqa: E402

T = TypeVar("T")
SIDE_DEADLINE_S = 3600.0
LOOK_EVERY_S = 0.1
SIDE = "SKYRL_TRAIN_BENCH_SIDE"
"""The variable that a side has in its environment."""
GAP_GB = 2.0
"""What a benchmark may hold beside a side that is at its limit, so that the side is what is ended."""
STEPS_ALONE = ("trainer.ckpt_interval=0", "trainer.export_hf=false", "trainer.dump_rollouts=false")
"""Settings of runs whose metrics are all that is read."""


class MeasurementError(Exception):
    """A measuring process failed or was ended; the text says why, or is the end of what it printed."""


def available_gb() -> float:
    """Memory that is free, or held by caches; infinite where the system does not say."""
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024 / 1e9
    return float("inf")


limits = argparse.Namespace(memory_gb=0.7 * available_gb(), deadline_s=21600.0, json=None)
"""Of this benchmark; `run` takes them from the command line."""


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with a module's docstring, which shows the options of all benchmarks as well."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[_common()]
    )


def _common() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--memory-gb", type=float, help="that may be held, in all and by one process; else it is ended")
    parser.add_argument("--deadline-s", type=float, help="seconds that may be taken; else the benchmark is ended")
    parser.add_argument("--json", metavar="FILE", help="add each row of each table to this file, as JSON")
    return parser


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a benchmark in a process of its own, watched, and end with its exit status, or with 1 where it was ended."""
    if SIDE in os.environ:  # what started it watches it
        sys.exit(main(sys.argv[1:]))
    _, rest = _common().parse_known_args(namespace=limits)
    if limits.json:
        with open(limits.json, "a", encoding="utf-8") as file:
            file.write(json.dumps({"command": sys.argv, "machine": machine()}) + "\n")
    print(f"on {machine()}", file=sys.stderr, flush=True)
    adopt_orphans()
    child = os.fork()
    if not child:
        end_with_parent(signal.SIGKILL)
        try:
            sys.exit(main(rest))
        except MeasurementError as error:
            sys.exit(str(error))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child answers it
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        # Of this process: what lost its parent is its child now.
        status = _watch(os.getpid(), _waited(child), memory_gb=limits.memory_gb + GAP_GB, deadline_s=limits.deadline_s)
    except MeasurementError as error:
        sys.exit(f"{Path(sys.argv[0]).name} was ended: {error}; --memory-gb and --deadline-s set the limits")
    finally:
        _end_all()
    sys.exit(status)


def _waited(child: int) -> Callable[[], int | None]:
    def poll() -> int | None:
        ended, status = os.waitpid(child, os.WNOHANG)
        return abs(os.waitstatus_to_exitcode(status)) if ended else None

    return poll


def _watch(process: int, poll: Callable[[], int | None], *, memory_gb: float, deadline_s: float) -> int:
    """Return the exit status. Raises MeasurementError of a process that holds more, with all that stems from it, or takes
    longer."""
    ends = time.monotonic() + deadline_s
    while (status := poll()) is None:
        if sum(map(_held_gb, family(process))) > memory_gb:
            raise MeasurementError(f"over {memory_gb:.1f} GB")
        if time.monotonic() > ends:
            raise MeasurementError(f"over {deadline_s:.0f} s")
        time.sleep(LOOK_EVERY_S)
    return status


def children(process: int | str) -> list[int]:
    """Return the processes that one is the parent of; none where it has ended, or elsewhere than on Linux."""
    found: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, file.read_text(encoding="ascii").split())
    return found


def family(process: int) -> list[int]:
    """Return a process and all that stem from it, parents first."""
    return [process, *(each for child in children(process) for each in family(child))]


def _held_gb(process: int) -> float:
    """What a process holds, in 10^9 bytes, files that are mapped aside; 0 of one that has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) * 1024 / 1e9
    return 0.0


def _end_all() -> None:
    """End all that stems from this process; orphans become its children, and so are found in the next round."""
    while left := children("self"):
        for process in (each for child in left for each in reversed(family(child))):
            kill(process)
        with suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0]:
                pass


def side_environment(packages: Iterable[str] = (), **variables: str) -> dict[str, str]:
    """Return the environment of a side, with folders that come first where modules are looked for."""
    places = os.pathsep.join(filter(None, [*packages, os.environ.get("PYTHONPATH", ""), str(ROOT)]))
    common = {SIDE: "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": places}
    return {**os.environ, **common, **variables}


def apart(
    command: Sequence[str | Path],
    *,
    deadline_s: float = SIDE_DEADLINE_S,
    memory_gb: float | None = None,
    packages: Iterable[str] = (),
    cwd: str | None = None,
    **environment: str,
) -> str:
    """Run a side in a process of its own, with one thread, and return what it printed.

    Args:
        command: Words for the Python interpreter.
        deadline_s: Seconds that it may take.
        memory_gb: That it may hold with all that stems from it, in place of the benchmark's.
        packages: Folders that come first where modules are looked for.
        cwd: Where it works, in place of this process's folder.
        environment: Variables in addition to this process's.

    Raises:
        MeasurementError: It failed, with the end of what it printed; or it held or took too much and was ended.
    """
    words = [sys.executable, *map(str, command)]
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            words,
            env=side_environment(packages, **environment),
            stdout=printed,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            cwd=cwd,
        )
        limit = limits.memory_gb if memory_gb is None else memory_gb
        try:
            status = _watch(child.pid, child.poll, memory_gb=limit, deadline_s=deadline_s)
        finally:
            if child.poll() is None:
                for process in reversed(family(child.pid)):
                    kill(process)
                child.wait()
        printed.seek(0), errors.seek(0)
        said = printed.read()
        if status:
            raise MeasurementError((errors.read().strip() or said.strip())[-3000:] or f"exit status {status}")
        return said


def answer(said: str) -> Any:
    """Return what a side printed last, as JSON."""
    return json.loads(said.strip().splitlines()[-1])


def in_turns(
    sides: Iterable[str], rounds: Iterable[Any], measure: Callable[[str, Any], T]
) -> tuple[dict[str, list[T]], dict[str, str]]:
    """Measure each side in each round, one after the other, so that what else the machine does meets all of them.

    Returns:
        What was found of each side that never failed, and the last line of why each of the others did; these are left out
        of later rounds.
    """
    found: dict[str, list[T]] = {side: [] for side in sides}
    failed: dict[str, str] = {}
    for number in rounds:
        for side in [each for each in found if each not in failed]:
            try:
                found[side].append(measure(side, number))
            except MeasurementError as error:
                failed[side] = str(error).strip().splitlines()[-1].strip()
    return {side: each for side, each in found.items() if side not in failed}, failed


def trained(
    folder: Path,
    *overrides: str,
    experiment: str = "gsm8k_multiturn",
    deadline_s: float = SIDE_DEADLINE_S,
    packages: Iterable[str] = (),
    **environment: str,
) -> list[dict[str, Any]]:
    """Make a run in `folder`, unless a finished one is there; return its metrics.

    It is of the bundled experiment, unless `experiment` or an override names another, or `experiment` is empty. What it
    printed is in `printed.log` beside its metrics. Further options are those of `apart`. Raises MeasurementError.
    """
    if not (folder / "complete.json").is_file():
        is_named = not experiment or any(each.startswith("+experiment=") for each in overrides)
        words = ["-m", "skyrl_train.main", *([] if is_named else [f"+experiment={experiment}"]), *overrides]
        words.append(f"hydra.run.dir={folder}")
        said = apart(words, deadline_s=deadline_s, packages=packages, **environment)
        (folder / "printed.log").write_text(said, encoding="utf-8")
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def timed(work: Callable[[], T], repeats: int = 1, clock: Callable[[], float] = time.process_time) -> tuple[float, T]:
    """Return the least seconds of some repeats, of CPU time of this process unless `clock` is another, and the result."""
    seconds = []
    for _ in range(repeats):
        start = clock()
        result = work()
        seconds.append(clock() - start)
    return min(seconds), result


def peak_mib() -> float:
    """Return the most memory that this process ever held."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_mib(kind: str = "VmRSS") -> float:
    """Return what this process holds now, or another number of `/proc/self/status`; Linux alone."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def peak_of(work: Callable[[], object]) -> float:
    """Return the most MiB that this process held while it did this work; Linux alone."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    work()
    return resident_mib("VmHWM")


def spread(values: Sequence[float]) -> str:
    """Return `0.912 ± 0.013`: mean and standard deviation; the mean alone of one value."""
    return f"{statistics.fmean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")


def machine() -> str:
    """Return cores, processor, memory, GPU and torch in one line."""
    found = {"cpu": platform.machine(), "memory": "?"}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                found["cpu"] = value.strip()
    import importlib.metadata

    parts = [f"{usable_cores()} cores of {found['cpu']}", f"{available_gb():.0f} GB available", gpu_name()]
    with suppress(importlib.metadata.PackageNotFoundError):
        parts.append(f"torch {importlib.metadata.version('torch')}")
    return ", ".join(filter(None, parts))


class Table:
    """A table in Markdown. Its head is printed at once, and each row as it is found."""

    def __init__(self, *columns: str, title: str = "") -> None:
        self._columns, self._title = columns, title
        head = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        print(*([f"\n{title}\n"] if title else []), *head, sep="\n", flush=True)

    def row(self, *cells: object) -> None:
        """Print a row, and add it to the file of `--json`."""
        texts = list(map(str, cells))
        print(f"| {' | '.join(texts)} |", flush=True)
        log({"table": self._title, **dict(zip(self._columns, texts, strict=True))})


def log(record: Mapping[str, Any]) -> None:
    """Add a line to the file of `--json`, where there is one."""
    if limits.json:
        with open(limits.json, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
