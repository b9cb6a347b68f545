"""kill -9 a training run at random moments, resume it, and compare with a run that was never killed.

    python -m tests.reliability.kill_and_resume --kills 20
    python -m tests.reliability.kill_and_resume --kills 20 --kind sft --kills-a-run 2 --jobs 2
    python -m tests.reliability.kill_and_resume --kills 3 --kind gpu     # where there are CUDA devices

Each trial starts the real command in a folder of its own and kills its whole process group after a random delay, once or
several times; then the same command runs until it ends by itself. `metrics.jsonl` (timings aside) and the exported weights
are compared with those of the undisturbed run, byte for byte. On Ray what the killed run had started must be gone before
the next one. Exit status 1 and the differences where any trial differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.process_trees import Family

DEADLINE_S = 900.0
LEFT_TIMEOUT_S = 30.0
"""Processes that a killed run had started are gone by then."""


@dataclass(frozen=True)
class RunResult:
    metrics: tuple[str, ...]
    """One canonical JSON text per step, timings removed."""
    weights_sha256: str


KINDS = {
    "rl": (
        "skyrl_train.main",
        "+experiment=gsm8k_multiturn",
        "platform=cpu",
        "trainer.total_steps=3",
        "trainer.ckpt_interval=1",
    ),
    "sft": (
        "skyrl_train.main_sft",
        "+experiment=sft_gsm8k",
        "sft_platform=cpu",
        "data.max_train_rows=72",
        "data.max_validation_rows=16",
        "trainer.batch_size=16",
        "trainer.num_steps=10",
        "trainer.ckpt_interval=2",
        "trainer.eval_interval=3",
        "trainer.keep_best=true",
    ),
    "ppo": (
        "skyrl_train.main",
        "+experiment=gsm8k_multiturn",
        "platform=cpu",
        "algorithm=ppo",
        "trainer.total_steps=3",
        "trainer.ckpt_interval=1",
    ),
    "ray": (
        "skyrl_train.main",
        "+experiment=gsm8k_multiturn",
        "platform=cpu",
        "placement.backend=ray",
        "placement.start_timeout_s=300",
        "placement.call_timeout_s=300",
        "placement.silence_timeout_s=60",
        "trainer.total_steps=3",
        "trainer.ckpt_interval=1",
    ),
    "gpu": (
        "skyrl_train.main",
        "+experiment=gsm8k_multiturn",
        "platform=gpu",
        "deterministic=true",
        "model=tiny_qwen2",
        "data=word_problems",
        "environment=word_problems",
        "data.max_validation_prompts=32",
        "trainer.train_batch_size=32",
        "trainer.policy_mini_batch_size=16",
        "trainer.critic_mini_batch_size=16",
        "trainer.total_steps=3",
        "trainer.ckpt_interval=1",
    ),
}
"""The module and the overrides of each kind of run. Supervised: batches made ahead, two ends of an epoch. On GPUs: engines
and ranks on all that there are."""
MEASURED = {"gpu": ("timing/", "memory/")}
"""Prefixes of metrics that are measured, and differ from run to run; timings alone where a kind is not named."""


def command(folder: Path, words: Sequence[str]) -> list[str]:
    """`words`: the module, then overrides."""
    return [sys.executable, "-m", words[0], f"hydra.run.dir={folder}", *words[1:]]


def start(folder: Path, words: Sequence[str]) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.log", "ab") as log:
        return subprocess.Popen(
            command(folder, words),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def run_to_the_end(folder: Path, words: Sequence[str]) -> float:
    """Seconds it took. Raises RuntimeError with the log's tail."""
    begun = time.monotonic()
    process = start(folder, words)
    try:
        status = process.wait(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        status = process.wait(timeout=60)
    if status != 0:
        tail = (folder.parent / f"{folder.name}.log").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"exit status {status}\n{tail}")
    return time.monotonic() - begun


def result(folder: Path, kind: str) -> RunResult:
    lines = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        measured = MEASURED.get(kind, ("timing/",))
        lines.append(json.dumps({k: v for k, v in record.items() if not k.startswith(measured)}, sort_keys=True))
    weights = (folder / "export" / "model.safetensors").read_bytes()
    return RunResult(tuple(lines), hashlib.sha256(weights).hexdigest())


def differences(expected: RunResult, actual: RunResult) -> list[str]:
    found = []
    if len(expected.metrics) != len(actual.metrics):
        found.append(f"{len(actual.metrics)} metric lines instead of {len(expected.metrics)}")
    for index, (a, b) in enumerate(zip(expected.metrics, actual.metrics)):
        if a != b:
            first, second = json.loads(a), json.loads(b)
            keys = [key for key in sorted({*first, *second}) if first.get(key) != second.get(key)]
            found.append(f"line {index + 1} differs in {', '.join(keys[:5])}")
    if expected.weights_sha256 != actual.weights_sha256:
        found.append("exported weights differ")
    return found


def trial(folder: Path, words: Sequence[str], delays_s: Sequence[float]) -> str:
    """Kills the run after each of the delays, counted from its last start, finishes it, and says what had been reached at
    each kill. Raises RuntimeError where it does not end, or leaves processes behind."""
    reached = []
    for delay_s in delays_s:
        process = start(folder, words)
        family = Family(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=delay_s)
        with contextlib.suppress(ProcessLookupError):  # it was done
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=60)
        if left := family.left(within_s=LEFT_TIMEOUT_S):
            raise RuntimeError(f"processes of the killed run are left after {LEFT_TIMEOUT_S:.0f} s: {left}")
        metrics = folder / "metrics.jsonl"
        steps = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        checkpoints = sorted(path.name for path in (folder / "checkpoints").glob("*"))
        reached.append(f"{delay_s:.1f} s: {steps} metric lines, checkpoints {', '.join(checkpoints) or 'none'}")
    run_to_the_end(folder, words)
    return "; ".join(reached)


def draw_delays(rng: random.Random, count: int, *, start_s: float, duration_s: float) -> list[float]:
    """Nine of ten within the steps, of which the start takes longer than a small run's; the others at the start."""
    return [rng.uniform(start_s, duration_s) if rng.random() < 0.9 else rng.uniform(0.0, start_s) for _ in range(count)]


def one(folder: Path, words: Sequence[str], kind: str, delays_s: Sequence[float], expected: RunResult) -> bool:
    """One trial, with its line; whether it ended as it should. The folder of one that did is removed."""
    try:
        reached = trial(folder, words, delays_s)
        found = differences(expected, result(folder, kind))
    except (OSError, ValueError, RuntimeError) as error:
        reached, found = "?", [str(error)]
    print(f"{folder.name} killed after {reached}: {'; '.join(found) or 'identical'}", flush=True)
    if not found:
        shutil.rmtree(folder)
    return not found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="number of kills in all")
    parser.add_argument("--kills-a-run", type=int, default=1, help="times that one run is killed before it may end")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the delays")
    parser.add_argument("--kind", choices=sorted(KINDS), default="rl", help="what to train")
    parser.add_argument("--output", type=Path, help="folder for the runs; a temporary one unless given")
    parser.add_argument("overrides", nargs="*", help="further Hydra overrides")
    args = parser.parse_args(argv)
    words = [*KINDS[args.kind], *args.overrides]
    with tempfile.TemporaryDirectory(prefix="kill-and-resume-") as scratch, ThreadPoolExecutor(args.jobs) as pool:
        root = args.output or Path(scratch)
        begun = time.time()
        duration_s = run_to_the_end(root / "undisturbed", words)
        start_s = (root / "undisturbed" / "config.yaml").stat().st_mtime - begun
        expected = result(root / "undisturbed", args.kind)
        print(f"undisturbed: {duration_s:.1f} s, {len(expected.metrics)} metric lines, {expected.weights_sha256[:12]}")
        rng = random.Random(args.seed)
        # Runs beside each other are slower than one alone.
        pace = {"start_s": start_s * args.jobs, "duration_s": duration_s * args.jobs}
        trials = []
        for first in range(0, args.kills, args.kills_a_run):
            delays_s = draw_delays(rng, min(args.kills_a_run, args.kills - first), **pace)
            trials.append(pool.submit(one, root / f"run_{first:03d}", words, args.kind, delays_s, expected))
        failed = sum(not trial.result() for trial in trials)
    print(f"{args.kind}: {len(trials)} runs, {len(trials) - failed} ended identical to the undisturbed one")
    print(f"{args.kills} cases, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
