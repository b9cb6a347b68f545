"""Plants bugs, of the field's history and drawn by chance, in a copy of the code and shows which test notices each.

    python scripts/plant_bugs.py                          # all of scripts/planted_bugs.yaml; fails where one goes unseen
    python scripts/plant_bugs.py --only clip_higher_ignored one_epoch_only
    python scripts/plant_bugs.py --jobs 2 --write tests/planted_bugs.md
    python scripts/plant_bugs.py --only admission_off_by_one --write tests/planted_bugs.md     # the other rows stay

A bug is a piece of text that stands once in a file and what it becomes. The copy is a temporary folder: nothing here is
changed but the page that `--write` names. A test that noticed a bug before, by that page, is run first; only where it
passes are the bug's whole folders run. Tests marked slow, cluster or gpu are left out, as by default.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parent.parent
BUGS = ROOT / "scripts" / "planted_bugs.yaml"
PAGE = ROOT / "tests" / "planted_bugs.md"
TIMEOUT_S = 900.0
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
_RECORDED = re.compile(r"^\| `(\w+)` \|.*\| `(tests/[^`]+)` \|$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One change that makes the code wrong."""

    name: str
    story: str
    """What goes wrong, in a sentence."""
    file: str
    """Path of the changed file, from the repository's root."""
    old: str
    """Stands exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Folders or files of the default suite that must notice."""

    def problem(self, root: Path) -> str:
        """Why the bug cannot be planted below `root`; empty where it can."""
        path = root / self.file
        if not path.is_file():
            return f"{self.name}: {self.file} does not exist"
        count = path.read_text().count(self.old)
        if count != 1:
            return f"{self.name}: its old text stands {count} times in {self.file}, not once"
        missing = [test for test in self.tests if not (root / test).exists()]
        return f"{self.name}: {missing[0]} does not exist" if missing else ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the tests said of one planted bug."""

    bug: Bug
    test: str
    """The first test that failed; empty where none did."""
    note: str
    """Why there is no such test, where something else went wrong."""
    seconds: float


def read_bugs(path: Path = BUGS) -> list[Bug]:
    """The bugs of the list. Raises ValueError where two share a name."""
    entries = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(entries, list):
        raise ValueError(f"{path}: must be a list of bugs")
    bugs = [Bug(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    names = [bug.name for bug in bugs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: the name {twice[0]!r} is given twice")
    return bugs


def recorded_tests(page: Path = PAGE) -> dict[str, str]:
    """The test that noticed each bug when the page was written, by the bug's name."""
    return dict(_RECORDED.findall(page.read_text())) if page.is_file() else {}


def copy_of_the_code(target: Path) -> None:
    """Copies what git tracks, and new files that it does not ignore, into the empty folder `target`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True, timeout=60).stdout
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Exit status and output of pytest on `tests`, up to the first failure, with the code of `folder`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    environment.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # each run would compile the package, which takes longer than its test
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"no answer within {TIMEOUT_S:g} s"
    return done.returncode, done.stdout + done.stderr


def try_bug(bug: Bug, folder: Path, first: str) -> Outcome:
    """Plants one bug in the copy, runs the tests, takes it out again."""
    path = folder / bug.file
    original, times = path.read_text(), path.stat()
    began = time.monotonic()
    path.write_text(original.replace(bug.old, bug.new))
    try:
        status, output = run_tests(folder, [first]) if first else (0, "")
        if status in (0, 4, 5):  # it passed, or is not there any more
            status, output = run_tests(folder, bug.tests)
    finally:
        path.write_text(original)
        os.utime(
            path, ns=(times.st_atime_ns, times.st_mtime_ns)
        )  # bytecode of the bug is older or newer, never its age
    found = _FAILED.search(output)
    note = ""
    if status == 0:
        note = "every test passed"
    elif status != 1 or not found:
        note = f"pytest ended with status {status}: {output.strip().splitlines()[-1] if output.strip() else ''}"
    return Outcome(bug=bug, test=found[1] if found and not note else "", note=note, seconds=time.monotonic() - began)


def try_all(bugs: Sequence[Bug], recorded: Mapping[str, str], jobs: int) -> list[Outcome]:
    """All outcomes in the order of `bugs`; each of `jobs` threads has a copy of its own."""
    with tempfile.TemporaryDirectory(prefix="planted-bugs-") as temporary:
        folders: Queue[Path] = Queue()
        for number in range(jobs):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            copy_of_the_code(folder)
            folders.put(folder)

        def one(bug: Bug) -> Outcome:
            folder = folders.get(timeout=TIMEOUT_S)
            try:
                outcome = try_bug(bug, folder, recorded.get(bug.name, ""))
            finally:
                folders.put(folder)
            print(f"{bug.name}: {outcome.test or 'NOT CAUGHT: ' + outcome.note} ({outcome.seconds:.0f} s)", flush=True)
            return outcome

        with ThreadPoolExecutor(jobs) as executor:
            return list(executor.map(one, bugs))


def page_of(bugs: Sequence[Bug], outcomes: Sequence[Outcome], recorded: Mapping[str, str]) -> str:
    """The page tests/planted_bugs.md; a bug that was not tried now is shown as `recorded`."""
    tests = dict(recorded)
    notes: dict[str, str] = {}
    for outcome in outcomes:
        tests[outcome.bug.name], notes[outcome.bug.name] = outcome.test, outcome.note
    caught = sum(bool(tests[bug.name]) for bug in bugs)
    lines = [
        "# Planted bugs",
        "",
        "Bugs that trainers of language models have shipped, and at the end changes that were drawn by chance, planted in a",
        f"copy of this code one at a time, and the test of the default suite that notices each: {caught} of {len(bugs)}.",
        "Written by `python scripts/plant_bugs.py --write tests/planted_bugs.md`; the changes are in",
        "`scripts/planted_bugs.yaml`.",
        "",
        "| bug | what goes wrong | where | first test that fails |",
        "|---|---|---|---|",
    ]
    for bug in bugs:
        test = f"`{tests[bug.name]}`" if tests[bug.name] else f"none: {notes[bug.name]}"
        lines.append(f"| `{bug.name}` | {bug.story} | `{bug.file}` | {test} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these bugs alone")
    parser.add_argument("--jobs", type=int, default=1, help="bugs that are tried at once (default: 1)")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="where to write the table; with --only the other rows stay"
    )
    args = parser.parse_args(argv)
    bugs = read_bugs()
    names = {bug.name for bug in bugs}
    problems = [f"no bug is named {name!r}" for name in args.only or () if name not in names]
    problems += [problem for bug in bugs if (problem := bug.problem(ROOT))]
    if args.write and args.only:
        unknown = names - recorded_tests().keys() - set(args.only)
        problems += [f"--write has no row of {name!r} to keep: name it with --only too" for name in sorted(unknown)]
    if args.jobs < 1:
        problems.append(f"--jobs must be at least 1; got {args.jobs}")
    if problems:
        sys.stderr.write("\n".join(problems) + "\n")
        return 2
    chosen = [bug for bug in bugs if not args.only or bug.name in args.only]
    outcomes = try_all(chosen, recorded_tests(), args.jobs)
    missed = [outcome.bug.name for outcome in outcomes if not outcome.test]
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} bugs were caught" + (f"; not: {missed}" if missed else ""))
    if args.write:
        args.write.write_text(page_of(bugs, outcomes, recorded_tests()))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
