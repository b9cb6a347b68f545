"""Which runs there are, what made them, and which files hold their rollouts."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from skyrl_train.errors import SkyrlTrainError
from skyrl_train.system.files import parse_strict_json, read_json, whole_number
from skyrl_train.telemetry.logs.redaction import redact
from skyrl_train.telemetry.run_folder import RunFolder

Kind = Literal["skyrl", "trl", "verl"]
State = Literal["running", "finished", "stopped", "empty"]

_OWN_FILE = re.compile(r"(?P<purpose>train|eval|failed)_step_(?P<step>\d+)\.(parquet|jsonl)$")
_SAMPLE_FILE = re.compile(r"step_(?P<step>\d+)\.jsonl$")
_TRL_FILE = re.compile(r"completions_(?P<step>\d+)\.parquet$")
_VERL_FILE = re.compile(r"(?P<step>\d+)\.jsonl$")
_MARKS = ("metrics.jsonl", "config.yaml", "rollouts", "run.log", "samples")
_LONGEST_LINE = 2**20
"""Bytes of a line of metrics that are looked at."""
_MAX_RUNS = 64
"""Runs that are opened where a folder of runs is given."""


class RolloutFile(NamedTuple):
    """One file of one step's rollouts. A long run has tens of thousands, which are listed at each question."""

    where: str
    kind: Literal["parquet", "jsonl", "samples", "trl", "verl"]
    purpose: str
    step: int
    stamp: tuple[int, int, int]
    """Its inode, size and time of change, or those of its folder: another stamp is another content."""

    @property
    def path(self) -> Path:
        """Where it is."""
        return Path(self.where)

    @property
    def num_bytes(self) -> int:
        """Its size, or that of all parts of a folder."""
        with suppress(OSError):  # gone meanwhile
            return sum(each.stat().st_size for each in self.path.glob("part-*")) or self.stamp[1]
        return self.stamp[1]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run that is looked at."""

    id: str
    root: Path
    kind: Kind

    @property
    def folder(self) -> RunFolder:
        """The names of its files."""
        return RunFolder(self.root)

    def rollout_files(self) -> list[RolloutFile]:
        """Return the files there are now, by step. Of a step that has Parquet, its JSON lines are left out."""
        if self.kind == "skyrl":
            found = _files(self.folder.rollouts, _OWN_FILE, "") + _files(self.folder.samples, _SAMPLE_FILE, "sample")
        elif self.kind == "trl":
            found = _files(_trl_folder(self.root), _TRL_FILE, "train")
        else:
            found = _files(self.root, _VERL_FILE, "train")
        by_step: dict[tuple[int, str], RolloutFile] = {}
        for each in found:
            if each.kind == "parquet" or (each.step, each.purpose) not in by_step:
                by_step[each.step, each.purpose] = each
        return [by_step[key] for key in sorted(by_step)]

    def state(self) -> State:
        """Return whether it is going on: the process that holds the folder lives. Nothing is locked to find out."""
        if self.kind != "skyrl":
            return "finished" if self.rollout_files() else "empty"
        if self.folder.complete_file.exists():
            return "finished"
        if not self.folder.holds_a_run() and not self.folder.config_file.exists():
            return "empty"
        try:
            owner = (self.root / ".lock").read_text().strip()
        except (OSError, ValueError):
            owner = ""
        return "running" if owner.isdigit() and Path(f"/proc/{owner}").exists() else "stopped"

    def describe(self, files: Sequence[RolloutFile] | None = None) -> dict[str, Any]:
        """Return what a list of runs says of it. `files`: of its rollouts, where they are known already."""
        files = self.rollout_files() if files is None else files
        times = [each.stamp[2] / 1e9 for each in files]
        for path in (self.folder.metrics_file, self.root / "run.log"):
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        planned = read_object(self.folder.plan_file, []).get("total_steps")
        steps = [each.step for each in files if each.purpose != "failed"]
        steps += [] if (last := _last_step(self.folder.metrics_file)) is None else [last]
        return {
            "id": self.id,
            "name": self.root.name,
            "path": str(self.root),
            "kind": self.kind,
            "state": self.state(),
            "last_step": max(steps, default=None),
            "total_steps": planned if type(planned) is int else None,
            "updated": max(times, default=None),
            "num_rollout_files": len(files),
        }


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Return the runs at these paths; of a folder that is none but has some, all those.

    A file among folders is passed over: `sweep/*` names what Hydra leaves beside the runs of a sweep, too.

    Raises SkyrlTrainError naming a path that is no folder, or that more runs are in it than can be opened.
    """
    roots: list[Path] = []
    has_folder = any(path.is_dir() for path in paths)
    for path in paths:
        if has_folder and path.is_file():
            continue
        if not path.is_dir():
            raise SkyrlTrainError(f"RUN={path} is no folder. Give the output_dir of a run.")
        root = path.resolve()
        inside = [] if _kind_of(root) and not is_server(root) else _runs_in(root)
        roots += inside or [root]
    roots = list(dict.fromkeys(roots))
    if len(roots) > _MAX_RUNS:
        raise SkyrlTrainError(f"{len(roots)} runs are more than the {_MAX_RUNS} that can be shown at once. Name some.")
    runs: list[Run] = []
    for root in roots:
        name = re.sub(r"[^\w.-]+", "-", root.name).strip("-") or "run"
        same = sum(re.sub(r"~\d+$", "", each.id) == name for each in runs)
        runs.append(Run(id=f"{name}~{same + 1}" if same else name, root=root, kind=_kind_of(root) or "skyrl"))
    return runs


def is_server(root: Path) -> bool:
    """Whether `skyrl-serve` works in this folder: its models' runs are one level below `runs`."""
    return (root / "runs").is_dir() and (root / "journal.jsonl").exists()


def _runs_in(folder: Path) -> list[Path]:
    """Return the runs of a folder; where none is, those one level below, as in `outputs/NAME/DATE_TIME`."""
    folders = sorted((each for each in folder.iterdir() if each.is_dir()), key=_by_number)
    if here := [each for each in folders if _holds_a_run(each)]:
        return here
    return [run for each in folders for run in sorted(filter(_holds_a_run, each.iterdir()), key=_by_number)]


def _holds_a_run(folder: Path) -> bool:
    return folder.is_dir() and _kind_of(folder) is not None


def _by_number(folder: Path) -> tuple[int, str]:
    """The runs of a sweep are called 0, 1, ... 10."""
    return (int(folder.name) if folder.name.isdecimal() else -1, folder.name)


def _kind_of(root: Path) -> Kind | None:
    """Return what made the run, None for a folder that has nothing of one."""
    if any((root / name).exists() for name in _MARKS):
        return "skyrl"
    if _files(_trl_folder(root), _TRL_FILE, "train"):
        return "trl"
    return "verl" if _files(root, _VERL_FILE, "train") else None


def _trl_folder(root: Path) -> Path:
    return root / "completions" if (root / "completions").is_dir() else root


def _files(folder: Path, pattern: re.Pattern[str], purpose: str) -> list[RolloutFile]:
    found: list[RolloutFile] = []
    try:
        entries = list(os.scandir(folder))
    except OSError:  # none yet, or gone
        return found
    kinds = {_SAMPLE_FILE: "samples", _TRL_FILE: "trl", _VERL_FILE: "verl"}
    for entry in entries:
        match = pattern.match(entry.name)
        try:
            status = entry.stat() if match else None
        except OSError:
            continue
        is_folder = status is not None and stat.S_ISDIR(status.st_mode)
        if match and status and (stat.S_ISREG(status.st_mode) or (is_folder and pattern is _OWN_FILE)):
            kind: Any = kinds.get(pattern, entry.name.rpartition(".")[2])
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            own = purpose or match["purpose"]
            found.append(RolloutFile(entry.path, kind, own, int(match["step"]), stamp))
    return found


def _last_step(path: Path) -> int | None:
    """Return the step of the last whole line of `metrics.jsonl`."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LONGEST_LINE))
            lines = file.read().split(b"\n")
        return whole_number(parse_strict_json(lines[-2]), "step")
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return None


def read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """Return a JSON object from a file; an empty one where there is none."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path} cannot be read: {first_line(error)}")
        return {}
    return content if isinstance(content, dict) else {}


def settings_of(run: Run, problems: list[str]) -> dict[str, Any]:
    """Return the settings by their dotted names, without secrets."""
    path = run.folder.config_file
    try:
        return dict(_settings_of(path, path.stat().st_mtime_ns))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        problems.append(f"{path} cannot be read: {first_line(error)}")
        return {}


@lru_cache(maxsize=64)  # the parser takes tens of milliseconds
def _settings_of(path: Path, changed: int) -> dict[str, Any]:
    del changed
    flat: dict[str, Any] = {}
    pending: list[tuple[str, Any]] = [("", redact(yaml.safe_load(path.read_text(encoding="utf-8"))))]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict) and value:
            pending += [(f"{name}.{key}" if name else str(key), each) for key, each in value.items()]
        elif name:
            flat[name] = value
    return dict(sorted(flat.items()))


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
