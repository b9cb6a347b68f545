"""Where the time goes from the command to the first rollout, and what short commands cost.

    python scripts/bench/startup.py                                              # the quickstart, in one process
    python scripts/bench/startup.py placement=cpu_2 strategy=fsdp2 generator=vllm
    python scripts/bench/startup.py --commands 3 --against main                  # CPU seconds, beside another commit's

`--commands N` prints CPU seconds of `--help`, of a plan, and of a whole run of one step, all of their processes counted:
medians of N rounds in which the trees take turns. Without it one step of `+experiment=gsm8k_multiturn` runs with these
overrides, and a row per stage is printed, in seconds since the command was typed. A stage ends where the function that it is
named after returns.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import harness

COMMANDS = {
    "--help": ("skyrl_train.main", "--help"),
    "plan": ("skyrl_train.plan", "+experiment=gsm8k_multiturn"),
    "one step": ("skyrl_train.main", "+experiment=gsm8k_multiturn", "data.validation=[]", "trainer.total_steps=1"),
}
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


def run_commands(rounds: int, against: str | None) -> None:
    """Print a row for each command, and a column of CPU seconds for each tree."""
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as scratch:
        trees = {"this tree": harness.ROOT}
        if against:
            trees[against] = Path(scratch) / "tree"
            git = ["git", "-C", str(harness.ROOT)]
            archive = subprocess.run([*git, "archive", against], capture_output=True, check=True, timeout=DEADLINE_S)
            trees[against].mkdir()
            subprocess.run(["tar", "-x"], cwd=trees[against], input=archive.stdout, check=True, timeout=DEADLINE_S)

        table = harness.Table("command", *(f"{name}, CPU s" for name in trees))
        for command, words in COMMANDS.items():

            def measure(tree: str, number: int, command: str = command, words: Sequence[str] = words) -> float:
                folder = Path(scratch) / f"{command}-{number}-{list(trees).index(tree)}"
                further = [f"hydra.run.dir={folder}"] if command == "one step" else []
                before = _children_s()
                harness.apart(["-m", *words, *further], packages=[str(trees[tree])], cwd=scratch, deadline_s=DEADLINE_S)
                return _children_s() - before

            harness.in_turns(trees, [-1], measure)  # which compiles each tree's modules
            found, failed = harness.in_turns(trees, range(rounds), measure)
            table.row(
                command,
                *(f"{statistics.median(found[name]):.2f}" if name in found else failed[name][:60] for name in trees),
            )


def _children_s() -> float:
    """CPU seconds of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(argv: Sequence[str]) -> None:
    if argv[:1] == ["--child"]:
        run_child(Path(argv[1]), argv[2:])
        return
    parser = harness.arguments(__doc__)
    parser.add_argument("--commands", type=int, metavar="ROUNDS", help="CPU seconds of short commands")
    parser.add_argument("--against", metavar="COMMIT", help="with --commands: measured beside this tree")
    args, _ = parser.parse_known_args(argv)  # what is left goes to the command
    if args.commands:
        run_commands(args.commands, args.against)
        return
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
