"""Draws small changes of the package at random and counts how many the default suite notices: its kill rate.

    pip install coverage pytest-cov                                          # for the first command alone
    python -m scripts.studies.mutants cover /tmp/cover.sqlite                # which test runs which line: a whole suite
    python -m scripts.studies.mutants run /tmp/cover.sqlite --count 500 --seed 4301 --jobs 2 --write /tmp/mutants.jsonl

The draw is a function of the code, the seed and the count, and no package has fewer than its share of lines. A change
is one of: a comparison turned, `and` and `or` exchanged, a `not` left out, an arithmetic operator exchanged, a number or
a truth value changed, a call whose value nobody reads left out, a `raise` left out. Each runs in a copy of the code: the
tests that run its line, those that run the fewest lines first, up to the first that fails. A change that only tests in
processes of their own reach counts as unseen here. What a written file holds already is not run again.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import accumulate
from pathlib import Path

from scripts.plant_bugs import ROOT, copy_of_the_code

PACKAGE = "skyrl_train"
TIMEOUT_S = 180
MOST_TESTS = 120
"""Of one change: the most specific of those that run its line."""
_COMPARISONS: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
_HEAVY = ("torch", "transformers", "numpy", "pyarrow", "hydra", "omegaconf", "hypothesis", "pytest", "rich")
"""Imported once, before the processes of the changes are forked."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change: `old`, which begins at a line and column (in bytes) of a file, becomes `new`."""

    file: str
    line: int
    column: int
    old: str
    new: str

    def planted(self, text: str) -> str:
        """Return the file's text with the change."""
        lines = text.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        whole = b"".join(lines)
        assert whole[start:].startswith(self.old.encode()), f"{self.file}:{self.line} is not what was drawn from"
        return (whole[:start] + self.new.encode() + whole[start + len(self.old.encode()) :]).decode()


def changes_of(node: ast.AST) -> Iterator[str]:
    """Yield what one node of a program may become, as source."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        yield ast.unparse(ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])](), *node.ops[1:]], node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield ast.unparse(ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right))
    elif isinstance(node, ast.BoolOp):
        yield ast.unparse(ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield ast.unparse(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield repr(node.value + 1)
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "pass"


def sites(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a program that run: neither annotations nor decorators nor blocks for type checkers."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            yield child
            yield from sites(child)


def mutants_of(file: str) -> list[Mutant]:
    """Return every change of one file."""
    whole = (ROOT / file).read_bytes()
    starts = list(accumulate(map(len, whole.splitlines(keepends=True)), initial=0))
    found = []
    for node in sites(ast.parse(whole)):
        if not isinstance(node, (ast.expr, ast.stmt)):
            continue
        for new in changes_of(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            written = new if new == "pass" else f"({new})"
            found.append(
                Mutant(
                    file=file,
                    line=node.lineno,
                    column=node.col_offset,
                    old=whole[start:end].decode(),
                    new=written,
                )
            )
    return found


def draw(count: int, seed: int) -> list[Mutant]:
    """Return `count` changes, of each folder of the package as many as it has of all lines."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE).rglob("*.py"))
    folders: dict[str, list[str]] = defaultdict(list)
    for file in files:
        folders["/".join(file.split("/")[1:-1][:1])].append(file)
    lines = {name: sum(len((ROOT / file).read_text().splitlines()) for file in own) for name, own in folders.items()}
    generator = random.Random(seed)
    drawn: list[Mutant] = []
    for name, own in sorted(folders.items()):
        candidates = [mutant for file in own for mutant in mutants_of(file)]
        share = max(1, round(count * lines[name] / sum(lines.values())))
        drawn += generator.sample(candidates, min(share, len(candidates)))
    generator.shuffle(drawn)
    return drawn[:count]


def cover(path: Path) -> int:
    """Run the default suite with a context for each test; the data is left at `path`."""
    options = ["-q", "-n", "2", "--dist", "worksteal", f"--cov={PACKAGE}", "--cov-context=test", "--cov-report=term"]
    environment = {**os.environ, "COVERAGE_FILE": str(path), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, env=environment, check=False).returncode


class Tests:
    """Which tests run a line, the most specific first."""

    def __init__(self, path: Path) -> None:
        from coverage import CoverageData  # type: ignore[import-not-found, unused-ignore]

        self._data = CoverageData(basename=str(path))
        self._data.read()
        self._root = next(file for file in self._data.measured_files() if f"/{PACKAGE}/" in file).split(f"/{PACKAGE}/")[
            0
        ]
        self._lines_run: Counter[str] = Counter()
        self._tests: dict[str, Mapping[int, list[str]]] = {}
        for file in self._data.measured_files():
            by_line = self._data.contexts_by_lineno(file)
            self._tests[file] = by_line
            for contexts in by_line.values():
                self._lines_run.update(contexts)

    def of(self, file: str, line: int) -> list[str]:
        """Return ids of tests for pytest; none where no test of this process runs the line."""
        contexts = self._tests.get(f"{self._root}/{file}", {}).get(line, [])
        tests = {context.rpartition("|")[0] for context in contexts if context}
        return sorted(tests, key=lambda test: self._lines_run[f"{test}|run"])[:MOST_TESTS]


def first_failure(folder: Path, tests: Sequence[str]) -> str:
    """Return the first test that fails in `folder`, `deadline` or `import`; empty where all pass. Forks a process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        os.close(reading)
        _run_tests(folder, tests, writing)
    os.close(writing)
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "deadline"
            time.sleep(0.05)
        with os.fdopen(reading, closefd=False) as stream:
            answer = json.loads(stream.readline() or "null")
    finally:
        os.close(reading)
        subprocess.run(["pkill", "-9", "-s", str(child)], check=False)
    return "import" if answer is None else str(answer)


def _run_tests(folder: Path, tests: Sequence[str], writing: int) -> None:
    """In a process of its own, which ends here."""
    import pytest

    class First:
        name = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and not self.name:
                self.name = report.nodeid

    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silent, descriptor)
    os.chdir(folder)
    os.environ.update(PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    sys.dont_write_bytecode = True
    sys.path[:] = [str(folder), *(each for each in sys.path if Path(each or ".").resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("scripts", PACKAGE, "tests", "examples")]:
        del sys.modules[name]
    first = First()
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *tests], plugins=[first])
    answer = "" if status == 0 else first.name or f"pytest ended with status {int(status)}"
    os.write(writing, json.dumps(answer).encode() + b"\n")
    os._exit(0)


def run(mutants: Sequence[Mutant], tests: Tests, folder: Path, write: Path) -> None:
    """Try changes one after the other in `folder`, a copy of the code; a line of JSON for each is added to `write`."""
    for mutant in mutants:
        chosen = tests.of(mutant.file, mutant.line)
        path = folder / mutant.file
        original, began = path.read_text(), time.monotonic()
        path.write_text(mutant.planted(original))
        try:
            killer = first_failure(folder, chosen) if chosen else ""
        finally:
            path.write_text(original)
        told = {**asdict(mutant), "tests": len(chosen), "killer": killer, "seconds": round(time.monotonic() - began, 1)}
        with write.open("a") as stream:
            stream.write(json.dumps(told) + "\n")
        print(f"{mutant.file}:{mutant.line}: {killer or 'NOT NOTICED'} ({told['seconds']} s)", flush=True)


def report(told: Sequence[Mapping[str, object]]) -> str:
    """Return a table of packages: changes, those whose line a test runs, those noticed."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for each in told:
        for name in (str(each["file"]).split("/")[1], "all"):
            rows[name].update(drawn=1, run=bool(each["tests"]), noticed=bool(each["killer"]))
    lines = ["| package | changes | line is run | noticed |", "|---|---|---|---|"]
    for name, counts in sorted(rows.items(), key=lambda row: (row[0] == "all", row[0])):
        share = counts["noticed"] / counts["drawn"]
        lines.append(f"| {name} | {counts['drawn']} | {counts['run']} | {counts['noticed']} ({share:.1%}) |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("cover", "run", "draw"))
    parser.add_argument("data", type=Path, help="what `cover` leaves and `run` reads")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=4301)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", type=Path, default=Path("mutants.jsonl"), help="a line of JSON for each change")
    args = parser.parse_args()
    if args.command == "cover":
        return cover(args.data)
    mutants = draw(args.count, args.seed)
    if args.command == "draw":
        print("\n".join(json.dumps(asdict(mutant)) for mutant in mutants))
        return 0
    done = [json.loads(line) for line in args.write.read_text().splitlines()] if args.write.exists() else []
    known = {Mutant(**{name: each[name] for name in Mutant.__dataclass_fields__}) for each in done}
    left = [mutant for mutant in mutants if mutant not in known]
    for name in _HEAVY:
        import_module(name)
    tests = Tests(args.data)
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        workers = []
        for number in range(args.jobs):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            copy_of_the_code(folder)
            worker = os.fork()
            if not worker:
                run(left[number :: args.jobs], tests, folder, args.write)
                os._exit(0)
            workers.append(worker)
        failed = [worker for worker in workers if os.waitpid(worker, 0)[1]]
    print(report([json.loads(line) for line in args.write.read_text().splitlines()]))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
