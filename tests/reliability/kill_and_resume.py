"""kill -9 a training run at random moments, resume it, and compare with a run that was never killed.

    python tests/reliability/kill_and_resume.py --kills 20
    python tests/reliability/kill_and_resume.py --kills 20 --kind sft
    python tests/reliability/kill_and_resume.py --kills 3 --kind gpu     # where there are CUDA devices

Each trial starts the real command in a folder of its own, kills its whole process group after a random delay, starts the
same command again until it ends by itself, and compares `metrics.jsonl` (timings aside) and the exported weights with
those of the undisturbed run, byte for byte. Exit status 1 and the differences where any trial differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 600.0


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
    """Seconds it took. Raises CalledProcessError with the log's tail."""
    begun = time.monotonic()
    process = start(folder, words)
    status = process.wait(timeout=DEADLINE_S)
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


def trial(folder: Path, words: Sequence[str], delay_s: float) -> str:
    """Kills the run after `delay_s`, resumes it, and says what had been reached when it was killed."""
    process = start(folder, words)
    time.sleep(delay_s)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    metrics = folder / "metrics.jsonl"
    steps = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    checkpoints = sorted(path.name for path in (folder / "checkpoints").glob("*")) if folder.exists() else []
    run_to_the_end(folder, words)
    return f"{steps} metric lines, checkpoints {', '.join(checkpoints) or 'none'}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="number of kill points")
    parser.add_argument("--seed", type=int, default=0, help="of the delays")
    parser.add_argument("--kind", choices=sorted(KINDS), default="rl", help="what to train")
    parser.add_argument("--output", type=Path, help="folder for the runs; a temporary one unless given")
    parser.add_argument("overrides", nargs="*", help="further Hydra overrides")
    args = parser.parse_args(argv)
    words = [*KINDS[args.kind], *args.overrides]
    with tempfile.TemporaryDirectory(prefix="kill-and-resume-") as scratch:
        root = args.output or Path(scratch)
        duration_s = run_to_the_end(root / "undisturbed", words)
        expected = result(root / "undisturbed", args.kind)
        print(f"undisturbed: {duration_s:.1f} s, {len(expected.metrics)} metric lines, {expected.weights_sha256[:12]}")
        rng = random.Random(args.seed)
        failed = 0
        for index in range(args.kills):
            delay_s = rng.uniform(0.0, duration_s)
            folder = root / f"killed_{index:02d}"
            reached = trial(folder, words, delay_s)
            found = differences(expected, result(folder, args.kind))
            failed += bool(found)
            print(f"killed after {delay_s:5.1f} s ({reached}): {'; '.join(found) or 'identical'}", flush=True)
    print(f"{args.kills - failed} of {args.kills} killed runs ended identical to the undisturbed one")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
