"""Where the time goes from the command to the first rollout.

    python scripts/bench/startup.py                                              # the quickstart, in one process
    python scripts/bench/startup.py placement=cpu_2 strategy=fsdp2 generator=vllm

Runs one step of `+experiment=gsm8k_multiturn` with these overrides and prints a row per stage, in seconds since the
command was typed. A stage ends where the function that it is named after returns.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import harness

OVERRIDES = ("+experiment=gsm8k_multiturn", "data.validation=[]", "trainer.total_steps=1")
DEADLINE_S = 600.0


def run_child(folder: Path, overrides: Sequence[str]) -> None:
    """The trainer, with the time noted at the end of each stage."""
    marks: list[tuple[str, float]] = []

    def mark(name: str) -> None:
        if name not in {known for known, _ in marks}:
            marks.append((name, time.time()))
            (folder / "marks.json").write_text(json.dumps(marks), encoding="utf-8")

    mark("Python started")
    from skyrl_train import main as entry

    mark("imports of the command")
    drive = import_module("skyrl_train.runs.drive")  # whose own names are replaced: it calls them by these

    def note_end(owner: Any, name: str, stage: str, then: Callable[[], object] = lambda: None) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            mark(stage)
            then()
            return result

        setattr(owner, name, wrapped)

    def note_rest() -> None:
        """What is imported by now, as it imports torch."""
        run = import_module("skyrl_train.runs.rl")
        mark("torch imported")
        note_end(run, "load_data", "prompts measured")
        note_end(run, "build_host", "Ray up, room reserved")
        note_end(run, "build_rollouts", "engines begin to load")
        note_end(run, "build_learners", "models and engines loaded")
        trainers = import_module("skyrl_train.trainers")
        note_end(trainers.steps, "sync", "first weight sync")
        note_end(import_module("skyrl_train.telemetry.logs").RunConsole, "on_progress", "first rollout")
        note_end(trainers.steps, "generate", "all rollouts of the first step")

    note_end(drive, "resolve", "command line checked, configuration composed")
    note_end(drive, "read_all_rows", "prompts read", note_rest)
    sys.argv = ["skyrl-train", *OVERRIDES, *overrides, f"hydra.run.dir={folder / 'run'}"]
    entry.main()


def main(argv: Sequence[str]) -> None:
    if argv[:1] == ["--child"]:
        run_child(Path(argv[1]), argv[2:])
        return
    harness.arguments(__doc__).parse_known_args(argv)  # for --help: what is left goes to the command
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as scratch:
        started = time.time()
        harness.apart([__file__, "--child", scratch, *argv], deadline_s=DEADLINE_S)
        marks = json.loads((Path(scratch) / "marks.json").read_text(encoding="utf-8"))
    table = harness.Table("stage", "seconds", "since the command")
    before = started
    for name, at in marks:
        table.row(name, f"{at - before:.1f}", f"{at - started:.1f}")
        before = at


if __name__ == "__main__":
    harness.run(main)
