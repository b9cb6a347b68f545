"""What is left of a run on Ray with a vLLM engine once it is over: after success, an error, Ctrl-C, SIGTERM and kill -9.

    python tests/reliability/cluster_teardown.py OUTPUT_FOLDER [CASE ...]

Prints a table: exit status, seconds from the signal to the end, processes that were seen, seconds from then on until the
last of them was gone, and how many are left. Where nothing could be closed any more, Ray's agents look for their raylet
five times before they end themselves. A signal goes to the trainer as a terminal (INT: the whole process group) or a
scheduler (TERM: the trainer alone) sends it, once in a step and once while actors start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.process_trees import Family

OVERRIDES = (
    "+experiment=gsm8k_multiturn",
    "platform=cpu",
    "placement.backend=ray",
    "strategy=fsdp2",
    "placement.policy_num_workers=2",
    "generator=vllm",
    "data.validation=[]",
    "trainer.train_batch_size=16",
    "trainer.policy_mini_batch_size=16",
    "trainer.critic_mini_batch_size=16",
)
TIMEOUT_S = 900.0
GONE_WITHIN_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way for a run to end."""

    overrides: tuple[str, ...] = ("trainer.total_steps=100",)
    signals: tuple[signal.Signals, ...] = ()
    """Sent one second apart."""
    when_starting: bool = False
    """While actors start; else after the first step."""
    status: int = 0


CASES = {
    "success": Case(overrides=("trainer.total_steps=2",)),
    "error": Case(overrides=("generator.verify_weight_sync=true", "generator.weight_sync_tolerance=1e-12"), status=2),
    "ctrl-c": Case(signals=(signal.SIGINT,), status=130),
    "ctrl-c twice": Case(signals=(signal.SIGINT, signal.SIGINT), status=130),
    "sigterm": Case(signals=(signal.SIGTERM,), status=143),
    "kill -9": Case(signals=(signal.SIGKILL,), status=-9),
    "ctrl-c while starting": Case(signals=(signal.SIGINT,), when_starting=True, status=130),
    "sigterm while starting": Case(signals=(signal.SIGTERM,), when_starting=True, status=143),
}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended."""

    status: int | None
    """None where it did not end."""
    seconds: float
    """From the first signal, or from the start."""
    num_seen: int
    gone_s: float
    """From the end until the last process was gone, or until the looking ended."""
    left: list[str]
    """Command lines of processes that still run."""
    log: str


def run_case(case: Case, folder: Path) -> Ending:
    """Runs the trainer, sends what the case says, and waits for the end and a little longer."""
    folder.mkdir(parents=True)
    log = folder / "child.log"
    command = [sys.executable, "-m", "skyrl_train.main", *OVERRIDES, *case.overrides, f"hydra.run.dir={folder / 'run'}"]
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    family = Family(child.pid)
    started = time.monotonic()
    if case.signals:
        metrics = folder / "run" / "metrics.jsonl"
        reached: Callable[[], bool] = lambda: _has_workers(family) if case.when_starting else metrics.exists()  # noqa: E731
        _wait_until(reached, child)
        started = time.monotonic()
        for number, sent in enumerate(case.signals):
            time.sleep(1.0 if number else 0.0)
            if child.poll() is None:
                (os.killpg if sent == signal.SIGINT else os.kill)(child.pid, sent)
    status = _wait_until(lambda: False, child)
    seconds = time.monotonic() - started
    if status is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    ended = time.monotonic()
    left = family.left(within_s=GONE_WITHIN_S)
    return Ending(
        status=status,
        seconds=seconds,
        num_seen=len(family),
        gone_s=time.monotonic() - ended,
        left=left,
        log=log.read_text(encoding="utf-8"),
    )


def _has_workers(family: Family) -> bool:
    """Ray is up, and the first of its workers loads what it needs."""
    return any(command.startswith("ray::") and "Agent" not in command for command in family.commands())


def _wait_until(reached: Callable[[], bool], child: subprocess.Popen[bytes]) -> int | None:
    """The exit status where the child ended first; None once `reached`, or where neither came within TIMEOUT_S."""
    deadline = time.monotonic() + TIMEOUT_S
    while child.poll() is None and not reached() and time.monotonic() < deadline:
        time.sleep(0.1)
    return child.poll()


def main() -> int:
    root = Path(sys.argv[1])
    # A shell has what it starts in the background ignore SIGINT, and what that starts in turn.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wrong = 0
    print(
        "| run | exit status | seconds to the end | processes seen | gone after, s | left |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for name in sys.argv[2:] or CASES:
        ending = run_case(CASES[name], root / name.replace(" ", "_"))
        wrong += ending.status != CASES[name].status or bool(ending.left)
        seconds = f"{ending.seconds:.1f} | {ending.num_seen} | {ending.gone_s:.1f}"
        print(f"| {name} | {ending.status} | {seconds} | {len(ending.left)} |", flush=True)
        for line in ending.left:
            print(f"left by {name}: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
