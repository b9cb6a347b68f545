"""Run both commits on this machine, one thread each, and compare what they computed, bit for bit.

    python -m tests.recorded --against COMMIT            all runs, about six minutes
    python -m tests.recorded --against COMMIT --only grpo --only sft

Compared are values and not files: tensors of the checkpoints and of the export, token ids, log-probabilities and rewards of
the rollouts, metrics without what is measured. The first step and key that differ are named; exit status 1 where one does.
No hash of floats is kept anywhere, since processors differ: the other side is always run anew. An asynchronous run is
compared by the replay of its journal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
from safetensors.numpy import load_file

from tests.recorded.runs import RUNS, make_shared

ROOT = Path(__file__).resolve().parents[2]
PARTS = Path(__file__).resolve().parent / "parts"
MEASURED = ("timing/", "memory/", "throughput/", "host/", "stream/wait")
"""Beginnings of metrics that differ from run to run."""
TIMEOUT_S = 600.0


def main() -> int:
    """Print a line for each run; return 1 where one differs."""
    parser = argparse.ArgumentParser(prog="tests.recorded", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--against", required=True, metavar="COMMIT", help="what the working tree is compared with")
    parser.add_argument("--only", action="append", default=[], choices=list(RUNS), help="may be repeated")
    options = parser.parse_args()
    # Others read what this one leaves.
    names = [name for name in RUNS if not options.only or name in options.only or name == "grpo"]
    with tempfile.TemporaryDirectory(prefix="recorded-") as scratch, other_checkout(options.against) as other:
        shared = Path(scratch) / "shared"
        make_shared(shared)
        sides = [(ROOT, Path(scratch) / "here"), (other, Path(scratch) / "there")]
        found = [compared(name, sides, shared) for name in names]
    return 1 if any(found) else 0


@contextmanager
def other_checkout(commit: str) -> Iterator[Path]:
    """A worktree of the commit, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="recorded-") as scratch:
        folder = Path(scratch) / "checkout"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(folder), commit], cwd=ROOT, check=True)
        try:
            yield folder
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=ROOT, check=True)


def compared(name: str, sides: Sequence[tuple[Path, Path]], shared: Path) -> bool:
    """Run one on both sides, print how they compare, and return whether they differ."""
    if RUNS[name].made_once:
        run(RUNS[name].made_once, ROOT, shared / name, {})
    for checkout, folder in sides:
        run(RUNS[name].command, checkout, folder / name, {"shared": shared, **{each: folder / each for each in RUNS}})
    ours, theirs = (contents(folder / name) for _, folder in sides)
    difference = first_difference(ours, theirs)
    number = sum(len(each) for each in ours.values())
    sys.stdout.write(f"{name:<13} {difference or f'equal: {number} values and tensors of {len(ours)} files'}\n")
    sys.stdout.flush()
    return bool(difference)


def run(command: Sequence[str], checkout: Path, folder: Path, places: Mapping[str, Path]) -> None:
    """Run a command into `folder`, with the code of `checkout`. Raises SystemExit where it fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for place, path in places.items():
        command = [word.replace(f"{{{place}}}", str(path)) for word in command]
    done = subprocess.run(
        [sys.executable, "-m", *command, f"hydra.run.dir={folder}"],
        cwd=folder.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{checkout}{os.pathsep}{PARTS}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{folder.name} failed in {checkout}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def contents(folder: Path) -> dict[str, dict[str, Any]]:
    """By file, what the run computed by key, in the order of its steps."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.rglob("*.parquet")):
        table = parquet.read_table(file)
        found[str(file.relative_to(folder))] = {
            f"{column}[{row}]": value
            for column in table.column_names
            for row, value in enumerate(table.column(column).to_pylist())
        }
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found["metrics.jsonl"] = {
        f"step {record.get('step')}: {key}": value
        for record in map(json.loads, lines)
        for key, value in sorted(record.items())
        if not key.startswith(MEASURED)
    }
    for file in sorted(folder.rglob("*.safetensors")):
        found[str(file.relative_to(folder))] = dict(load_file(file))
    return found


def first_difference(ours: Mapping[str, Mapping[str, Any]], theirs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the first file and key that differ, with both values; empty where none does."""
    for file in [*ours, *(name for name in theirs if name not in ours)]:
        if file not in ours or file not in theirs:
            return f"{file}: only {'here' if file in ours else 'there'}"
        for key in [*ours[file], *(name for name in theirs[file] if name not in ours[file])]:
            if key not in ours[file] or key not in theirs[file]:
                return f"{file}: {key}: only {'here' if key in ours[file] else 'there'}"
            one, other = ours[file][key], theirs[file][key]
            if not _same(one, other):
                return f"{file}: {key}: {_shown(one)} here, {_shown(other)} there"
    return ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    return repr(one) == repr(other)  # NaN is NaN, and 1 is not 1.0


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)} {value.ravel()[:4].tolist()}"
    return repr(value)[:80]


if __name__ == "__main__":
    sys.exit(main())
