"""Every state that a crash of a training run may leave on the disk, resumed and compared with the run that was not stopped.

    python -m tests.reliability.resume_crash_states                   # all: RL, PPO with a critic, supervised
    python -m tests.reliability.resume_crash_states --kind rl --cases 100 --seed 1

One run of each kind is recorded (`recordings.py`), its crash states are enumerated (`crash_states.py`), and each is laid out
as a folder in which a process that has imported everything starts the same run again and takes one step. What a case may
end with:

    resumed       the checkpoint of that step, its metrics, rollouts and evaluations are those of the undisturbed run
    afresh        the same, from the first step on, and the user is told what became of the files that were there
    complete      the run had nothing left to do; its export and metrics are those of the undisturbed run

Anything else is a failure: a traceback, an error, a hang, or one byte that differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from skyrl_train.config import Config, SFTConfig
from skyrl_train.errors import SkyrlTrainError, StopRequested
from skyrl_train.runs.cli import HYDRA_VERSION_BASE, conf_dir, load_node, register_resolvers
from tests.reliability import recordings
from tests.reliability.crash_states import CrashState, Disk, crash_states
from tests.reliability.recordings import KINDS, Kind, build_model, overrides, prepare_to_fork, record

CASE_TIMEOUT_S = 300.0
NUM_KEPT = 2
"""Checkpoints that the recorded runs keep."""
_NOT_COMPARED = ("timing/", "memory/")
SCRATCH = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one case ended."""

    end: str
    """resumed, afresh, complete, or what went wrong."""
    problem: str = ""
    """Empty where the outcome is one of the three that are right."""


@dataclass(frozen=True, kw_only=True)
class Warm:
    """A run of one kind, ready to be started in forks of this process."""

    kind: Kind
    config: Config | SFTConfig
    reference: Path
    """The folder of the run that was not stopped, with a checkpoint of every step."""


def warm(kind: Kind, model: Path, scratch: Path) -> Warm:
    """Runs the kind once in this process, so that everything is imported, and keeps what it wrote as the reference."""
    config = load_config(kind, model)
    reference = scratch / f"{kind}_reference"
    settings = {"ckpt_interval": 1, "max_ckpts_to_keep": 100}
    whole = replace(config, output_dir=str(reference), trainer=replace(config.trainer, **settings))  # type: ignore[arg-type]
    with quiet(scratch / f"{kind}_reference.log"):
        train(whole)
    return Warm(kind=kind, config=config, reference=reference)


def load_config(kind: Kind, model: Path) -> Config | SFTConfig:
    """The configuration of the recorded command line."""
    register_resolvers()
    GlobalHydra.instance().clear()
    is_sft = kind == "sft"
    with initialize_config_dir(str(conf_dir()), version_base=HYDRA_VERSION_BASE):
        words = [*overrides(kind, model), "output_dir=to_be_set"]
        node = compose("sft" if is_sft else "config", words)
    return load_node(node, SFTConfig if is_sft else Config)


def train(config: Config | SFTConfig) -> None:
    """What the entry points call."""
    from skyrl_train.runs import train as train_rl, train_sft

    if isinstance(config, SFTConfig):
        train_sft(config)
    else:
        train_rl(config)


@contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Sends what is printed to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
            os.close(saved[0])
            os.close(saved[1])


def check_replay(operations: Sequence[recordings.Operation], root: Path) -> None:
    """Raises RuntimeError unless the operations give the folder that the recorded run left."""
    disk = Disk()
    for operation in operations:
        disk.apply(operation)
    there = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    differing = [path for path in there.keys() | disk.files.keys() if there.get(path) != disk.files.get(path)]
    if differing:
        raise RuntimeError(f"the recording is not whole: {sorted(differing)} are not what the operations make of them")


def resume(warm_run: Warm, folder: Path, *, log: Path) -> Outcome:
    """In a forked child: goes on in `folder` for one step and compares."""
    recordings.stops_after_a_step = True
    had = sorted(path.name for path in folder.glob("*"))
    had_results = any((folder / name).exists() for name in ("metrics.jsonl", "evaluation.json"))
    end = "complete"
    with quiet(log):
        try:
            train(replace(warm_run.config, output_dir=str(folder)))
        except StopRequested:
            end = "resumed"
        except SkyrlTrainError as error:
            return Outcome(end="refused", problem=f"{type(error).__name__}: {error}")
        except BaseException as error:
            traceback.print_exc()
            return Outcome(end="traceback", problem=f"{type(error).__name__}: {error}")
    said = log.read_text(errors="replace")
    problems = differences(warm_run, folder)
    if end == "resumed" and "resuming from" not in said:
        end = "afresh"
        if had_results and "files of the run" not in said:
            problems.append(f"started afresh without a word in a folder with {had}")
    return Outcome(end=end, problem="; ".join(problems))


def differences(warm_run: Warm, folder: Path) -> list[str]:
    """What of a run's folder is not as in the reference, up to the newest step that the folder has."""
    newest = (folder / "checkpoints" / "latest").read_text().strip()
    step, found = int(newest.removeprefix("step_")), []
    checkpoint, expected = folder / "checkpoints" / newest, warm_run.reference / "checkpoints" / newest
    found += [f"checkpoint: {text}" for text in differing_files(checkpoint, expected)]
    lines = records(warm_run.reference / "metrics.jsonl", up_to=step)
    if records(folder / "metrics.jsonl", up_to=1 << 60) != lines:
        found.append(f"metrics.jsonl differs up to step {step}")
    for part in ("rollouts", "samples"):
        for path in sorted((warm_run.reference / part).glob("*_step_*")):
            if int(path.stem.rpartition("_")[2]) == step and not same(folder / part / path.name, path):
                found.append(f"{part}/{path.name} differs")
    if (warm_run.reference / "evaluation.json").exists():
        evaluations = [json.loads((each / "evaluation.json").read_text()) for each in (folder, warm_run.reference)]
        if evaluations[0]["evaluations"] != [
            each for each in evaluations[1]["evaluations"] if each["global_step"] <= step
        ]:
            found.append("evaluation.json differs")
    if (folder / "complete.json").exists():
        found += [f"export: {text}" for text in differing_files(folder / "export", warm_run.reference / "export")]
    found += [f"left behind: {path.name}" for path in (folder / "checkpoints").glob(".tmp*")]
    kept = sorted(path.name for path in (folder / "checkpoints").glob("step_*"))
    if len(kept) > NUM_KEPT:
        found.append(f"more than {NUM_KEPT} checkpoints: {', '.join(kept)}")
    return found


def records(path: Path, *, up_to: int) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` without what is measured."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith(_NOT_COMPARED)}
        for line in lines
        if line["step"] <= up_to
    ]


def differing_files(folder: Path, expected: Path) -> list[str]:
    """Files of a checkpoint or an export that are missing, new or of other bytes; of a trainer's state the settings aside,
    which name the folder, and so of the manifest."""
    names = {path.relative_to(each) for each in (folder, expected) for path in each.rglob("*") if path.is_file()}
    return [str(name) for name in sorted(names) if not same(folder / name, expected / name)]


def same(path: Path, expected: Path) -> bool:
    """Whether both files exist and hold the same."""
    if not path.is_file() or not expected.is_file():
        return False
    if path.name == "trainer_state.json":
        states = [json.loads(each.read_text()) for each in (path, expected)]
        return {**states[0], "config": None} == {**states[1], "config": None}
    return path.name == "manifest.json" or path.read_bytes() == expected.read_bytes()


def in_fork(warm_run: Warm, state: CrashState, folder: Path) -> int:
    """Starts the case in a forked child, which writes its outcome beside the folder; returns its process number."""
    pid = os.fork()
    if pid == 0:
        _child(warm_run, state, folder)
    return pid


def _child(warm_run: Warm, state: CrashState, folder: Path) -> NoReturn:
    try:
        state.disk.lay_out(folder)
        outcome = resume(warm_run, folder, log=folder.with_suffix(".log"))
    except BaseException as error:
        outcome = Outcome(
            end="not comparable", problem=f"{type(error).__name__}: {error} {traceback.format_exc()[-800:]}"
        )
    folder.with_suffix(".json").write_text(json.dumps(asdict(outcome)))
    os._exit(0)


def run_cases(
    warm_run: Warm, states: Sequence[CrashState], scratch: Path, *, jobs: int
) -> Iterator[tuple[CrashState, Outcome]]:
    """All cases, `jobs` at a time, each in a process of its own that is killed at its deadline."""
    waiting = list(enumerate(states))[::-1]
    running: dict[int, tuple[int, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            index, state = waiting.pop()
            running[in_fork(warm_run, state, scratch / f"case_{index}")] = index, time.monotonic()
        for pid, (index, begun) in list(running.items()):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() - begun < CASE_TIMEOUT_S:
                    continue
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            del running[pid]
            folder = scratch / f"case_{index}"
            try:
                outcome = Outcome(**json.loads(folder.with_suffix(".json").read_text()))
            except (OSError, ValueError):
                outcome = Outcome(end="hang or death", problem=f"no outcome within {CASE_TIMEOUT_S:.0f} s")
            if outcome.problem:
                tail = folder.with_suffix(".log")
                said = tail.read_text(errors="replace")[-1500:] if tail.exists() else ""
                outcome = replace(
                    outcome, problem=f"{outcome.problem}\n{said}" if outcome.end == "traceback" else outcome.problem
                )
            shutil.rmtree(folder, ignore_errors=True)
            for suffix in (".json", ".log"):
                folder.with_suffix(suffix).unlink(missing_ok=True)
            yield states[index], outcome
        time.sleep(0.005)


def run(kinds: Sequence[Kind], *, cases: int | None, seed: int, jobs: int) -> dict[str, int]:
    """Prints a line per kind and one for each failure; returns cases, failures and how they ended."""
    totals: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="crash-states-", dir=SCRATCH) as name:
        scratch = Path(name)
        model = build_model(scratch / "model")
        for kind in kinds:
            begun = time.monotonic()
            warm_run = warm(kind, model, scratch)
            operations = record(kind, model, scratch)
            check_replay(operations, scratch / f"{kind}_recorded")
            states = list(crash_states(operations))
            recorded_s = time.monotonic() - begun
            chosen = states
            if cases is not None and cases < len(states):
                chosen = random.Random(seed).sample(states, cases)
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_before_s = used.ru_utime + used.ru_stime
            ends: Counter[str] = Counter()
            failures = 0
            for state, outcome in run_cases(warm_run, chosen, scratch, jobs=jobs):
                ends[outcome.end] += 1
                if outcome.problem:
                    failures += 1
                    print(
                        f"FAILED {kind} after {state.number} operations ({state.what}): {outcome.end}: {outcome.problem}"
                    )
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = used.ru_utime + used.ru_stime - cpu_before_s
            resumed_s = time.monotonic() - begun - recorded_s
            print(
                f"{kind}: {len(operations)} operations, {len(states)} distinct states, {len(chosen)} resumed: "
                f"{_counts(ends)}; {failures} failures; {recorded_s:.0f} s to record, "
                f"{resumed_s / max(1, len(chosen)):.2f} s a case, {cpu_s / max(1, len(chosen)):.2f} s of it on a core",
                flush=True,
            )
            totals += Counter({"operations": len(operations), "cases": len(chosen), "failures": failures}) + ends
    return dict(totals)


def _counts(ends: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(KINDS), action="append", help="what to train; all unless given")
    parser.add_argument("--cases", type=int, help="so many states of each kind, drawn at random; all unless given")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="cases at a time")
    args = parser.parse_args(argv)
    found = run(args.kind or list(KINDS), cases=args.cases, seed=args.seed, jobs=args.jobs)
    print(f"crash states: {_counts(found)}")
    print(f"{found['cases']} cases, {found.get('failures', 0)} failures")
    return 1 if found.get("failures") else 0


if __name__ == "__main__":
    prepare_to_fork()
    sys.exit(main())
