"""kill -9 of runs whose rollouts are made while the learner updates, and what must be so of them in the end:

- started again until it ends, the run has each prompt in one batch, or dropped with a reason, and no turn, group or batch is
  in its journal twice;
- the replay of what it recorded gives its weights, byte for byte. Every other run records no rollouts, so that its journal
  stays whole and is replayed; in the others it is compacted behind each checkpoint.

Runs take turns among `VARIANTS`: without more, with updates in flight and older keys and values kept, with dynamic
sampling that fills up batches with copies, with a critic, with a curriculum, with capsules, whose last step is executed
again.

A run is killed at a random moment after its journal got another batch, or while it starts; with `--at-operations` before a
file operation, from the first of its start to those of its third step or so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from skyrl_train.errors import SkyrlTrainError
from skyrl_train.rollout import journal_lines
from skyrl_train.telemetry.records import read_rollouts
from tests.support import warm_python
from tests.support.process_trees import cpu_seconds
from tests.support.warm_python import Started

BATCH, STEPS = 4, 10
OVERRIDES = (
    "+experiment=gsm8k_multiturn",
    "platform=cpu",
    "data.validation=[]",
    f"trainer.total_steps={STEPS}",
    f"trainer.train_batch_size={BATCH}",
    f"trainer.policy_mini_batch_size={BATCH}",
    f"trainer.critic_mini_batch_size={BATCH}",
    "generator.n_samples_per_prompt=2",
    "trainer.ckpt_interval=1",
)
"""Of a small run."""
STREAM = ("trainer.max_staleness=2",)
OF_STREAMS = (
    *("trainer.max_staleness=", "trainer.stale_groups=", "trainer.take_groups=", "trainer.oversample="),
    *("trainer.in_flight_updates=", "trainer.in_flight_cache="),
    *("generator=", "generator.vllm.", "placement=", "data.curriculum."),
)
"""Begin overrides that a replay does not read."""
NO_ROLLOUTS = "trainer.dump_rollouts=false"
"""With it the journal stays whole."""
IN_FLIGHT = ("trainer.in_flight_updates=true", "trainer.in_flight_cache=keep", "generator.max_batch_size=2")
"""An engine that computes two responses at a time is slower than the learner, so that updates find some under way."""
REPLACE = (
    "trainer.algorithm.filters.dynamic_sampling=replace",
    "trainer.algorithm.filters.replace_min_share=0.5",
    "trainer.algorithm.filters.dynamic_sampling_max_batches=90",
)
PPO = ("algorithm=ppo",)
CURRICULUM = "data.curriculum.enabled=true"
CAPSULES = "trainer.capsules=2"
VARIANTS = (
    *((), (NO_ROLLOUTS,), IN_FLIGHT, (NO_ROLLOUTS, *REPLACE)),
    *(PPO, (CURRICULUM,), (CAPSULES,), (NO_ROLLOUTS, CURRICULUM, *PPO), (CAPSULES, *PPO, *IN_FLIGHT)),
)
"""What runs have of their own, in turn."""
EXPORT = Path("export", "model.safetensors")
DEADLINE_S = 900.0
STEP_S = 0.4
"""Processor time of a step, about; of a start some more."""
KILLED_WITHIN = 4
"""Of the steps of a run: so many have the file operations among which a kill is drawn, those of its start among them."""


def journal(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of the journal."""
    return [record for _, record in journal_lines(folder / "journal" / "journal.jsonl")]


def problems(folder: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with a run that has ended: a prompt that was not trained on once, anything that was made twice, a
    journal that is not as it should be."""
    lines = journal(folder)
    for kind in ("start", "turn", "group", "batch"):
        for name, count in Counter(str(line[kind]) for line in lines if kind in line).items():
            if count > 1:
                yield f"{kind} {name} is in the journal {count} times"
    first, batches = lines[0]["from"], [line for line in lines if "batch" in line]
    if [line["batch"] for line in batches] != list(range(first, STEPS)):
        yield f"the journal begins with batch {first} and has {[line['batch'] for line in batches]}"
    if any(len(line["groups"]) != BATCH for line in batches):
        yield f"batches have {[len(line['groups']) for line in batches]} groups"
    settled = [ordinal for line in batches for ordinal in (*sorted({*line["groups"]}), *map(int, line["dropped"]))]
    if len(set(settled)) != len(settled):
        yield f"a prompt is in two batches, or dropped as well: {sorted(settled)}"
    if NO_ROLLOUTS in overrides:
        # Some that began may still have been in flight where more begin than batches have room for.
        has_dropped = any(line["dropped"] for line in batches)
        if not has_dropped and sorted(settled) != list(range(STEPS * BATCH)):
            yield f"batches and what they dropped are {sorted(settled)}"
        return
    # Two checkpoints are kept, and the last is written behind the last batch, or still beside it. Killed after that, a run
    # has no batch left behind which its journal would be compacted once more.
    if first not in (STEPS - 4, STEPS - 3, STEPS - 2):
        yield f"the journal begins at {first}"
    files = sorted((folder / "rollouts").glob("train_step_*.parquet"))
    # A curriculum takes prompts again.
    trained = Counter(
        (file.name if CURRICULUM in overrides else "", prompt.uid)
        for file in files
        for one in read_rollouts(file).values()
        for prompt in one.prompts
    )
    if len(trained) != STEPS * BATCH or set(trained.values()) != {1}:
        yield f"{len(trained)} prompts were trained on, {max(trained.values(), default=0)} times at most"


def replay_overrides(folder: Path, overrides: Sequence[str]) -> tuple[str, ...]:
    """What replays the run in `folder`: its journal where that is whole, else its rollouts."""
    recording = folder / ("journal" if NO_ROLLOUTS in overrides else "rollouts")
    others = tuple(each for each in overrides if not each.startswith(OF_STREAMS))
    return (*others, "generator=replay", f"generator.replay_path={recording}")


def total_counts(folder: Path) -> dict[str, float]:
    """What became of environments in all, by the metrics of the steps."""
    total: Counter[str] = Counter()
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        total.update(
            {k: v for k, v in json.loads(line).items() if k.startswith(("stream/resumed", "stream/restarted"))}
        )
    return dict(total)


def versions_of_turns(folder: Path) -> tuple[int, int]:
    """How many turns are of several versions, since weights came while they were sampled, and of how many; of those that
    were trained on, or of all in the journal where that is the record."""
    files = sorted((folder / "rollouts").glob("train_step_*.parquet"))
    batches = [batch for file in files for batch in read_rollouts(file).values()]
    found = [len(turn.weight_versions) for batch in batches for each in batch.trajectories for turn in each.turns]
    found = found or [len(line["versions"]) for line in journal(folder) if "turn" in line]
    return sum(count > 1 for count in found), len(found)


def main(args: argparse.Namespace) -> int:
    """Does what `kill_and_resume` does with these arguments."""
    with tempfile.TemporaryDirectory(prefix="stream-kills-") as scratch, ThreadPoolExecutor(args.jobs) as pool:
        root: Path = args.output or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        overrides = (*OVERRIDES, *args.overrides)
        began = time.monotonic()
        undisturbed = root / "undisturbed"
        run_to_the_end(start(undisturbed, (*overrides, *STREAM)), undisturbed)
        operations = int(undisturbed.with_suffix(".count").read_text())
        print(f"undisturbed: {time.monotonic() - began:.1f} s, {operations} file operations", flush=True)
        last = operations * KILLED_WITHIN // STEPS if args.at_operations else 0
        draw = random.Random(args.seed)
        trials = []
        for first in range(0, args.kills, args.kills_a_run):
            moments = [draw.random() for _ in range(min(args.kills_a_run, args.kills - first))]
            own = VARIANTS[len(trials) % len(VARIANTS)]
            trials.append(pool.submit(one, root / f"run_{first:03d}", (*overrides, *STREAM, *own), moments, last))
        ended = [trial.result() for trial in trials]
    failed = sum(not is_right for _, is_right in ended)
    print(f"stream: {len(ended)} runs, {len(ended) - failed} ended as they should")
    print(f"{sum(kills for kills, _ in ended)} cases, {failed} failures")
    return 1 if failed else 0


def one(folder: Path, overrides: Sequence[str], moments: Sequence[float], operations: int) -> tuple[int, bool]:
    """One run, with its line: kills that met a running process, and whether it ended as it should. `operations`: as of
    `kill`."""
    reached: list[str] = []
    replayed = folder.with_name(f"{folder.name}_replayed")
    try:
        for moment in moments:
            if (met := kill(folder, overrides, moment, operations)) is not None:
                reached.append(met)
        run_to_the_end(start(folder, overrides), folder)
        found = list(problems(folder, overrides))
        run_to_the_end(start(replayed, replay_overrides(folder, overrides)), replayed)
        if (replayed / EXPORT).read_bytes() != (folder / EXPORT).read_bytes():
            found.append("the replay gives other weights")
        if CAPSULES in overrides:
            found.extend(capsule_problems(folder))
        counts = ", ".join(f"{name} {count:g}" for name, count in total_counts(folder).items()) or "none brought back"
        several, turns = versions_of_turns(folder)
        counts += f"; {several} of {turns} turns of several versions"
    except (OSError, ValueError, RuntimeError, SkyrlTrainError) as error:
        found, counts = [f"{type(error).__name__}: {error}"], "?"
    said = "; ".join(found) or "as it should be"
    print(f"{folder.name} killed {'; '.join(reached) or 'never'}; environments: {counts}: {said}", flush=True)
    if not found:
        shutil.rmtree(folder)
        shutil.rmtree(replayed)
    return len(reached), not found


def capsule_problems(folder: Path) -> Iterator[str]:
    """Yield what is wrong with the capsules: the last two steps have one, and the last is the same when executed again."""
    kept = sorted(path.name for path in (folder / "capsules").glob("step_*"))
    if kept != [f"step_{step:06d}" for step in (STEPS - 1, STEPS)]:
        yield f"capsules are {', '.join(kept) or 'none'}"
        return
    words = ("-m", "skyrl_train.main_capsule", "run", str(folder), "--step", str(STEPS))
    done = warm_python.run(*words, timeout_s=DEADLINE_S)
    if done.returncode != 0:
        yield f"the capsule of step {STEPS}: {done.stdout[-2000:]}"


def kill(folder: Path, overrides: Sequence[str], moment: float, operations: int) -> str | None:
    """Starts the run and kills its process group: before its file operation at `moment`, from 0 to 1, of `operations`.
    Without them, where `moment` is below a tenth, while it starts, else once its journal has another batch, and up to about
    a step later. Returns what it had reached; None where it had ended."""
    before = num_batches(folder)
    process = start(folder, overrides, killed_at=1 + int(moment * operations) if operations else 0)
    ends, since = time.monotonic() + DEADLINE_S, 0.0 if moment < 0.1 else None
    while process.poll() is None and time.monotonic() < ends:
        if operations:
            time.sleep(0.02)
            continue
        used_s = cpu_seconds(process.pid)
        if since is None and num_batches(folder) > before:
            since = used_s
        if since is not None and used_s >= since + moment * STEP_S:
            break
        time.sleep(0.01)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    status = process.wait(timeout=60)
    if status != -signal.SIGKILL:
        if status != 0:
            raise RuntimeError(log_of(folder))
        return None
    checkpoints = sorted(path.name for path in (folder / "checkpoints").glob("step_*"))
    return f"with {num_batches(folder)} batches and {', '.join(checkpoints) or 'no checkpoint'}"


def num_batches(folder: Path) -> int:
    """How many batches the run has made, by its journal."""
    path = folder / "journal" / "journal.jsonl"
    found = re.findall(rb'^\{"batch": (\d+)', path.read_bytes(), re.MULTILINE) if path.exists() else []
    return max((int(number) + 1 for number in found), default=0)


def start(folder: Path, overrides: Sequence[str], *, killed_at: int = 0) -> Started:
    """Starts `skyrl_train.main` into the folder, with its file operations counted (`file_operations.py`)."""
    folder.mkdir(parents=True, exist_ok=True)
    counted = ("-m", "tests.reliability.file_operations", str(killed_at), str(folder.with_suffix(".count")))
    with open(folder.parent / f"{folder.name}.log", "ab") as log:
        return warm_python.start((*counted, *overrides, f"hydra.run.dir={folder}"), output=log.fileno())


def run_to_the_end(process: Started, folder: Path) -> None:
    """Raises RuntimeError with what it printed where it does not end with status 0."""
    try:
        status = process.wait(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        status = process.wait(timeout=60)
    if status != 0:
        raise RuntimeError(f"exit status {status}\n{log_of(folder)}")


def log_of(folder: Path) -> str:
    """The end of what the run printed."""
    log = folder.parent / f"{folder.name}.log"
    return log.read_text(errors="replace")[-3000:] if log.exists() else "it printed nothing"
