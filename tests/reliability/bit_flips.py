"""Single bits of a checkpoint folder turned over, one at a time.

    python -m tests.reliability.bit_flips                          # 10,000, and 60 of them through a whole resumed step
    python -m tests.reliability.bit_flips --flips 500 --resumed 10

They are drawn from the newest of three checkpoints of a PPO run (policy, critic, reference, optimizers, the trainer's
state, the manifest) and from `latest`; half of them by file, half by byte. What a flip may lead to:

    passed over   a warning, and an older checkpoint is used, whose bytes are as they were written
    harmless      the newest checkpoint is used, and all that is loaded of it is as it was written: the bit was in `latest`
                  or in the manifest and changed no name, size or sum

Anything else is a failure: a traceback, an error although there is a whole checkpoint, or a changed byte that is used.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from skyrl_train.trainers.checkpoints import CheckpointStore
from tests.reliability.crash_states import CrashState, Disk
from tests.reliability.recordings import build_model, prepare_to_fork
from tests.reliability.resume_crash_states import SCRATCH, Warm, run_cases, warm

NEWEST = 3
_UNSUMMED = ("manifest.json", "latest")


def disk_at_newest(reference: Path) -> Disk:
    """The reference run's folder as it would be after its step NEWEST, but for records that a resumed run cuts."""
    disk = Disk()
    for path in sorted(reference.rglob("*")):
        name = path.relative_to(reference).as_posix()
        is_later = any(f"step_{step:06d}" in name for step in range(NEWEST + 1, 10))
        if is_later or name.startswith("export") or name == "complete.json":
            continue
        if path.is_dir():
            disk.folders.add(name)
        else:
            disk.files[name] = path.read_bytes()
    disk.files["checkpoints/latest"] = f"step_{NEWEST:06d}\n".encode()
    return disk


def draw(disk: Disk, rng: random.Random) -> tuple[str, int]:
    """A file and the number of a bit in it."""
    chosen = (f"checkpoints/step_{NEWEST:06d}/", "checkpoints/latest")
    names = [name for name, content in disk.files.items() if name.startswith(chosen) and content]
    sizes = [len(disk.files[name]) for name in names]
    name = rng.choice(names) if rng.random() < 0.5 else rng.choices(names, sizes)[0]
    return name, rng.randrange(8 * len(disk.files[name]))


def flipped(content: bytes, bit: int) -> bytes:
    """`content` with one bit turned over."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def judge(folder: Path, disk: Disk, name: str, bit: int) -> tuple[str, str]:
    """How the flip ended, and what is wrong with that; `folder` is as it was afterwards."""
    path = folder / name
    path.write_bytes(flipped(disk.files[name], bit))
    try:
        used = CheckpointStore(folder / "checkpoints", keep=10).latest()
    except Exception as error:
        return type(error).__name__, f"{name}, bit {bit}: {type(error).__name__}: {error}"
    finally:
        path.write_bytes(disk.files[name])
    if used is None:
        return "none", f"{name}, bit {bit}: no checkpoint was found"
    inside = path.is_relative_to(used)
    if inside and path.name not in _UNSUMMED:
        return "used", f"{name}, bit {bit}: the changed file would be loaded"
    newest = used.name == f"step_{NEWEST:06d}"
    return ("harmless" if newest else "passed over"), ""


def run(*, flips: int, resumed: int, seed: int, jobs: int) -> dict[str, int]:
    """Prints the counts and a line for each failure."""
    rng = random.Random(seed)
    ends: Counter[str] = Counter()
    begun = time.monotonic()
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bit-flips-", dir=SCRATCH) as scratch:
        root = Path(scratch)
        warm_run = warm("ppo", build_model(root / "model"), root)
        disk = disk_at_newest(warm_run.reference)
        disk.lay_out(root / "flipped")
        logging.getLogger("skyrl_train.trainers.checkpoints").setLevel(logging.ERROR)
        for _ in range(flips):
            end, problem = judge(root / "flipped", disk, *draw(disk, rng))
            ends[end] += 1
            problems += [problem] if problem else []
        logging.getLogger("skyrl_train.trainers.checkpoints").setLevel(logging.NOTSET)
        ends_of_resumed = _resume(warm_run, disk, root, resumed, rng, jobs, problems)
    for problem in problems:
        print(f"FAILED {problem}")
    print(f"bit flips: {flips} read, {resumed} resumed; {_counts(ends)}; {_counts(ends_of_resumed)}; ", end="")
    print(f"{len(problems)} failures; {time.monotonic() - begun:.0f} s", flush=True)
    return {"cases": flips + resumed, "failures": len(problems)}


def _resume(
    warm_run: Warm, disk: Disk, root: Path, count: int, rng: random.Random, jobs: int, problems: list[str]
) -> Counter[str]:
    """The same in whole runs, which go on for a step and must then have the weights of the one that was not disturbed."""
    states = []
    for number in range(count):
        name, bit = draw(disk, rng)
        changed = disk.copy()
        changed.files[name] = flipped(disk.files[name], bit)
        states.append(CrashState(disk=changed, number=number, what=f"{name}, bit {bit}"))
    ends: Counter[str] = Counter()
    for state, outcome in run_cases(warm_run, states, root, jobs=jobs):
        ends[outcome.end] += 1
        if outcome.problem or outcome.end != "resumed":
            problems.append(f"{state.what}: {outcome.end}: {outcome.problem}")
    return ends


def _counts(ends: Counter[str]) -> str:
    return ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=10_000, help="bits, each read as a resuming run reads")
    parser.add_argument("--resumed", type=int, default=60, help="further bits, each resumed for a step")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="resumed cases at a time")
    args = parser.parse_args(argv)
    found = run(flips=args.flips, resumed=args.resumed, seed=args.seed, jobs=args.jobs)
    print(f"{found['cases']} cases, {found['failures']} failures")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    prepare_to_fork()
    sys.exit(main())
