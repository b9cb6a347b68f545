"""kill -9 a training run at random moments, resume it, and compare with a run that was never killed.

    python -m tests.reliability.kill_and_resume --kills 20
    python -m tests.reliability.kill_and_resume --kills 20 --kind sft --kills-a-run 2 --jobs 2
    python -m tests.reliability.kill_and_resume --kills 60 --kind stream --kills-a-run 4
    python -m tests.reliability.kill_and_resume --kills 60 --kind stream --kills-a-run 4 --at-operations
    python -m tests.reliability.kill_and_resume --kills 40 --kind ray --one-process      # any one of its processes
    python -m tests.reliability.kill_and_resume --kills 3 --kind gpu     # where there are CUDA devices

Each trial starts the real command in a folder of its own and kills its whole process group at a random moment, once or
several times; with `--one-process` any one of its processes instead (the driver, an actor, one of Ray's own), after which
the run may go on by itself. Then the same command runs until it ends by itself. `metrics.jsonl` (timings aside) and the
exported weights are compared with those of the undisturbed run, byte for byte. On Ray what the killed run had started must
be gone before the next one. What a `stream` trains on depends on time, so that it is judged by its journal and its replay
(`stream_kills.py`). Exit status 1 and the differences where any trial differs.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.reliability import stream_kills
from tests.support import warm_python
from tests.support.process_trees import Family, command_line, cpu_seconds, descendants
from tests.support.warm_python import Started

DEADLINE_S = 900.0
LOOK_EVERY_S = 0.1
LEFT_TIMEOUT_S = 30.0
"""Processes that a killed run had started are gone by then."""
RAYS_AGENTS_S = 90.0
"""Ray's own, where one of them was killed and nothing could be closed any more: they look for their raylet five times."""


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
        "placement.start_timeout_s=600",
        "placement.call_timeout_s=600",
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
MEASURED = ("timing/", "memory/", "run/restarts")
"""Prefixes of metrics that are measured, or count what was disturbed, and differ from run to run."""


def command(folder: Path, words: Sequence[str]) -> list[str]:
    """`words`: the module, then overrides."""
    return [sys.executable, "-m", words[0], f"hydra.run.dir={folder}", *words[1:]]


def start(folder: Path, words: Sequence[str]) -> Started:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.log", "ab") as log:
        return warm_python.start(("-m", words[0], f"hydra.run.dir={folder}", *words[1:]), output=log.fileno())


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


def result(folder: Path) -> RunResult:
    lines = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        lines.append(json.dumps({k: v for k, v in record.items() if not k.startswith(MEASURED)}, sort_keys=True))
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


def trial(folder: Path, words: Sequence[str], points: Sequence[float]) -> list[str]:
    """Kills the run at each of the points, in seconds of processor time since its last start, finishes it, and says what had
    been reached at each kill. Raises RuntimeError where it does not end, or leaves processes behind."""
    reached = []
    for point_s in points:
        process = start(folder, words)
        family = Family(process.pid)
        cpu_s = follow(process, until=lambda used_s: used_s >= point_s)  # noqa: B023
        time.sleep(random.Random(point_s).uniform(0.0, LOOK_EVERY_S))
        was_running = process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=60)
        if left := family.left(within_s=LEFT_TIMEOUT_S):
            raise RuntimeError(f"processes of the killed run are left after {LEFT_TIMEOUT_S:.0f} s: {left}")
        if was_running:
            metrics = folder / "metrics.jsonl"
            steps = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            checkpoints = sorted(path.name for path in (folder / "checkpoints").glob("*"))
            reached.append(f"{cpu_s:.1f} s: {steps} metric lines, checkpoints {', '.join(checkpoints) or 'none'}")
    run_to_the_end(folder, words)
    return reached


def trial_of_one(folder: Path, words: Sequence[str], points: Sequence[float]) -> list[str]:
    """As `trial`, killing one process of the run at each point; where the run then ends well, no other point follows."""
    reached = []
    for point_s in points:
        process = start(folder, words)
        family = Family(process.pid)
        follow(process, until=lambda used_s: used_s >= point_s)  # noqa: B023
        if process.poll() is None:
            victim = random.Random(point_s).choice(descendants(process.pid))
            name = command_line(victim).rpartition("site-packages/")[2][:40]
            reached.append("the driver" if victim == process.pid else name)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        try:
            status = process.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise RuntimeError(f"{reached[-1]} was killed, and the run did not end in {DEADLINE_S:.0f} s") from None
        if left := family.left(within_s=RAYS_AGENTS_S):
            raise RuntimeError(f"processes are left {RAYS_AGENTS_S:.0f} s after {reached[-1:]} was killed: {left}")
        if status == 0:
            return reached
    run_to_the_end(folder, words)
    return reached


def follow(process: Started, until: Callable[[float], bool]) -> float:
    """Seconds of processor time of the process and all that stem from it, which say how far a run is whatever else the
    machine does, when `until` is first true of them or the process has ended."""
    most_s, ends = 0.0, time.monotonic() + DEADLINE_S
    while process.poll() is None and not until(most_s) and time.monotonic() < ends:
        time.sleep(LOOK_EVERY_S)
        most_s = max(most_s, sum(map(cpu_seconds, descendants(process.pid))))
    return most_s


def measure(folder: Path, words: Sequence[str]) -> tuple[float, float]:
    """Seconds of processor time of an undisturbed run: until its folder is prepared, and in all."""
    process = start(folder, words)
    start_s = follow(process, until=lambda _: (folder / "config.yaml").exists())
    whole_s = follow(process, until=lambda _: False)
    if process.wait(timeout=60) != 0:
        raise RuntimeError((folder.parent / f"{folder.name}.log").read_text(errors="replace")[-3000:])
    return start_s, whole_s


def draw_points(rng: random.Random, count: int, *, start_s: float, whole_s: float) -> list[float]:
    """Nine of ten within the steps, before which a small run takes longest; the others while it starts."""
    return [rng.uniform(start_s, whole_s) if rng.random() < 0.9 else rng.uniform(0.0, start_s) for _ in range(count)]


def one(
    folder: Path,
    words: Sequence[str],
    killing: Callable[[Path, Sequence[str], Sequence[float]], list[str]],
    points: Sequence[float],
    expected: RunResult,
) -> tuple[int, bool]:
    """One trial, with its line: kills that met a running process, and whether the run ended as it should. The folder of one
    that did is removed."""
    reached: list[str] = []
    try:
        reached = killing(folder, words, points)
        found = differences(expected, result(folder))
    except (OSError, ValueError, RuntimeError) as error:
        found = [str(error)]
    print(
        f"{folder.name} killed after {'; after '.join(reached) or '?'}: {'; '.join(found) or 'identical'}", flush=True
    )
    if not found:
        shutil.rmtree(folder)
    return len(reached), not found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="number of kills in all")
    parser.add_argument("--kills-a-run", type=int, default=1, help="times that one run is killed before it may end")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--kind", choices=[*sorted(KINDS), "stream"], default="rl", help="what to train")
    parser.add_argument(
        "--at-operations", action="store_true", help="kill a stream before file operations, not at moments"
    )
    parser.add_argument("--one-process", action="store_true", help="kill any one process of the run, not all of them")
    parser.add_argument("--output", type=Path, help="folder for the runs; a temporary one unless given")
    parser.add_argument("overrides", nargs="*", help="further Hydra overrides")
    args = parser.parse_args(argv)
    if args.kind == "stream":
        return stream_kills.main(args)
    words, killing = [*KINDS[args.kind], *args.overrides], trial_of_one if args.one_process else trial
    with tempfile.TemporaryDirectory(prefix="kill-and-resume-") as scratch, ThreadPoolExecutor(args.jobs) as pool:
        root = args.output or Path(scratch)
        start_s, whole_s = measure(root / "undisturbed", words)
        expected = result(root / "undisturbed")
        print(
            f"undisturbed: {whole_s:.1f} s of processor time, {start_s:.1f} s of it before the folder is prepared, "
            f"{len(expected.metrics)} metric lines, {expected.weights_sha256[:12]}",
            flush=True,
        )
        rng = random.Random(args.seed)
        trials = []
        for first in range(0, args.kills, args.kills_a_run):
            points = draw_points(rng, min(args.kills_a_run, args.kills - first), start_s=start_s, whole_s=whole_s)
            trials.append(pool.submit(one, root / f"run_{first:03d}", words, killing, points, expected))
        ended = [trial.result() for trial in trials]
    failed = sum(not is_right for _, is_right in ended)
    print(f"{args.kind}: {len(ended)} runs, {len(ended) - failed} ended identical to the undisturbed one")
    print(f"{sum(kills for kills, _ in ended)} cases, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
