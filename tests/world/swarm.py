"""Many worlds of one seed, what is found in them, and how it is told.

python -m tests.world.swarm --seed 7 --events 200000    # worlds that are drawn from 7, until a law is broken
python -m tests.world.swarm --world 8817203             # one of them again: its schedule, shrunk to few faults
python -m tests.world.swarm --events 1000000 --kills 10000 --jobs 2   # of the night
python -m tests.world.swarm --planted 20 --to FILE      # how many of 20 seeds find each planted bug; goes on with FILE
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import skyrl_train
from skyrl_train.system import derive_seed
from tests.world.machine import Killed, LawBroken, World
from tests.world.planted import ALL, FURTHER, LISTED, OURS, PUBLIC, Bug, planted
from tests.world.serving import ServingWorld
from tests.world.training import TrainingWorld

T = TypeVar("T")
R = TypeVar("R")
EVENTS = 200_000
NUM_TO_FIND = 0.9
"""Share of the seeds that must find a planted bug."""
_LAST_EVENTS = 25
_UNCHANGED = Bug(name="(none: the code as it is)", patches=())


@dataclass(kw_only=True)
class Found:
    """What one world did, or many."""

    worlds: int = 0
    events: int = 0
    kills: int = 0
    cpu_s: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    reached: frozenset[tuple[str, int]] = frozenset()
    """Failure branches, where they are watched."""
    broken: tuple[int, str] | None = None
    """The world that broke a law, and which."""

    def add(self, other: Found) -> None:
        """Take what another did."""
        self.worlds, self.events, self.kills = (
            self.worlds + other.worlds,
            self.events + other.events,
            self.kills + other.kills,
        )
        self.cpu_s += other.cpu_s
        self.kinds += other.kinds
        self.outcomes += other.outcomes
        self.reached |= other.reached
        self.broken = self.broken or other.broken


def worlds_of(seed: int) -> Iterator[int]:
    """Yield the numbers of the worlds that a seed stands for."""
    number = 0
    while True:
        yield derive_seed(seed, "world", number) % 10**9
        number += 1


def run_world(number: int, *, allowed: frozenset[int] | None = None, keeps_log: bool = False) -> tuple[Any, str]:
    """Return a world that has run, and the law that it broke; empty is none."""
    kind = ServingWorld if number % 3 == 0 else TrainingWorld
    world: Any = kind(number, keeps_log=keeps_log, allowed=allowed)
    try:
        world.run()
    except LawBroken as broken:
        return world, str(broken)
    except (Exception, SystemExit, Killed) as error:  # what a world looks at when it is over, or nothing goes on
        return world, f"the world ended by {type(error).__name__}: {error}"
    return world, ""


def seen_in(number: int, *, watches: bool = False) -> Found:
    """Return what a world did."""
    began, branches = time.process_time(), FailureBranches() if watches else None
    World.tracer = branches.trace if branches is not None else None
    world, broken = run_world(number)
    return Found(
        worlds=1,
        events=world.world.num_events,
        kills=world.num_kills,
        cpu_s=time.process_time() - began,
        kinds=world.world.kinds,
        outcomes=world.outcomes,
        reached=frozenset(branches.reached) if branches is not None else frozenset(),
        broken=(number, broken) if broken else None,
    )


def campaign(
    seed: int,
    *,
    events: int = EVENTS,
    kills: int = 0,
    seconds: float = float("inf"),
    jobs: int = 1,
    watches: bool = False,
) -> Found:
    """Run worlds until a law is broken, or so many events and kills, or seconds, are over. The same worlds are counted
    whatever the number of `jobs` is."""
    found, ends = Found(), time.monotonic() + seconds
    with closing(_each(partial(seen_in, watches=watches), worlds_of(seed), jobs)) as all_seen:
        for seen in all_seen:
            found.add(seen)
            if found.broken or (found.events >= events and found.kills >= kills) or time.monotonic() > ends:
                break
    return found


def _each(function: Callable[[T], R], items: Iterator[T], jobs: int) -> Iterator[R]:
    """Yield the function's results in the order of the items, computed by so many processes."""
    if jobs == 1:
        yield from map(function, items)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = deque(pool.submit(function, each) for each in islice(items, 2 * jobs))
        try:
            while pending:
                yield pending.popleft().result()
                pending.extend(pool.submit(function, each) for each in islice(items, 1))
        finally:
            pool.shutdown(cancel_futures=True)


def shrunk(number: int) -> tuple[Any, str]:
    """Return the world with as few of its faults as still break a law."""
    world, broken = run_world(number, keeps_log=True)
    if not broken:
        return world, broken
    kept = [int(fault[1:].split()[0]) for fault in world.world.faults]
    size = max(1, len(kept) // 2)
    while kept:
        for start in range(0, len(kept), size):
            fewer = [*kept[:start], *kept[start + size :]]
            tried, law = run_world(number, allowed=frozenset(fewer), keeps_log=True)
            if law:
                world, broken, kept = tried, law, fewer
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
    return world, broken


def schedule(number: int, world: Any, broken: str) -> str:
    """Return what happened, for a person."""
    lines = [f"world {number}: {broken or 'no law is broken'}", f"settings: {world.swarm}", "faults:"]
    lines += [f"  {fault}" for fault in world.world.faults] or ["  none"]
    lines += ["its last events:", *(f"  {line.rstrip()}" for line in world.world.log[-_LAST_EVENTS:])]
    return "\n".join(lines)


_WITH_FAILURES = [
    "rollout/stream/stream.py",
    "rollout/admission.py",
    "rollout/journal.py",
    "rollout/agent_loop.py",
    "rollout/checked_engine.py",
    "rollout/boundary/session.py",
    "rollout/hosts/threads.py",
    "rollout/loop_thread.py",
    "system/threads.py",
    "system/files/append_log.py",
    "system/files/files.py",
    "trainers/checkpoints/folder.py",
    "trainers/checkpoints/store.py",
    "trainers/checkpoints/writer.py",
    "trainers/resume.py",
    "trainers/loop.py",
    "trainers/ppo.py",
    "telemetry/run_folder.py",
    "telemetry/metrics_log.py",
    "serve/service.py",
    "serve/ledger.py",
    "serve/scheduler.py",
    "serve/verbs.py",
    "serve/sampling.py",
    "serve/models.py",
]


@cache
def _failure_lines() -> dict[str, set[int]]:
    """By file, the first lines of what handles an exception, and those that raise one."""
    lines = {}
    for name in _WITH_FAILURES:
        path = Path(skyrl_train.__path__[0]) / name
        nodes = list(ast.walk(ast.parse(path.read_text())))
        found = {node.body[0].lineno for node in nodes if isinstance(node, ast.ExceptHandler)}
        lines[str(path)] = found | {node.lineno for node in nodes if isinstance(node, ast.Raise)}
    return lines


class FailureBranches:
    """Lines of the product behind an `except`, and those that raise, and which of them worlds have reached."""

    def __init__(self, reached: frozenset[tuple[str, int]] = frozenset()) -> None:
        self.lines = _failure_lines()
        self.reached = set(reached)

    def trace(self, frame: Any, event: str, _: object) -> Any:
        """For `sys.settrace`."""
        path = frame.f_code.co_filename
        lines = self.lines.get(path)
        if lines is None:
            return None
        if event == "line" and frame.f_lineno in lines:
            self.reached.add((path, frame.f_lineno))
        return self.trace

    def report(self) -> str:
        """Return how many of each file were reached."""
        rows = []
        for path, lines in self.lines.items():
            missed = sorted(line for line in lines if (path, line) not in self.reached)
            rows.append(
                f"  {path.partition('skyrl_train/')[2]}: {len(lines) - len(missed)} of {len(lines)}; not {missed}"
            )
        total = sum(map(len, self.lines.values()))
        return "\n".join([f"failure branches: {len(self.reached)} of {total}", *rows])


def main(arguments: argparse.Namespace) -> int:
    """Print what was found; 1 where a law was broken, or a planted bug was not found."""
    if arguments.world is not None:
        world, broken = shrunk(arguments.world)
        print(schedule(arguments.world, world, broken))
        return int(bool(broken))
    if arguments.planted:
        prove(arguments)
        return table(_tries(arguments.to), arguments.planted)
    began = time.monotonic()
    found = campaign(
        arguments.seed,
        events=arguments.events,
        kills=arguments.kills,
        seconds=arguments.seconds,
        jobs=arguments.jobs,
        watches=arguments.branches,
    )
    print(
        f"{found.worlds} worlds, {found.events} events ({dict(found.kinds)}), {found.kills} kills in {found.cpu_s:.0f} s of "
        f"CPU, {time.monotonic() - began:.0f} s: {found.events / found.cpu_s:.0f} events a second of CPU; processes ended: "
        f"{dict(found.outcomes)}"
    )
    if arguments.branches:
        print(FailureBranches(found.reached).report())
    if found.broken:
        world, broken = shrunk(found.broken[0])
        print(schedule(found.broken[0], world, broken))
    print(f"{found.worlds} cases, {int(found.broken is not None)} failures")
    return int(found.broken is not None)


def prove(arguments: argparse.Namespace) -> None:
    """Search for each planted bug with each seed until a law is broken, and run the code without any as long, unless the
    file has that try; each is a line of it."""
    known = {(each["bug"], each["seed"]) for each in _tries(arguments.to)}
    seeds = range(arguments.seed, arguments.seed + arguments.planted)
    tries = (
        (bug.name, seed, arguments.events)
        for bugs in (LISTED, PUBLIC, FURTHER, OURS, (_UNCHANGED,))
        for seed, bug in itertools.product(seeds, bugs)
        if arguments.only in bug.name and (bug.name, seed) not in known
    )
    ends = time.monotonic() + arguments.seconds
    with closing(_each(_tried, tries, arguments.jobs)) as all_tried:
        for tried in all_tried:
            with arguments.to.open("a") as file:
                file.write(json.dumps(tried) + "\n")
            if time.monotonic() > ends:
                break


def _tried(each: tuple[str, int, int]) -> dict[str, Any]:
    name, seed, events = each
    with planted(next(bug for bug in (*ALL, _UNCHANGED) if bug.name == name)):
        found = campaign(seed, events=events)
    world, law = found.broken or (None, "")
    counts = {"events": found.events, "kills": found.kills, "cpu_s": round(found.cpu_s, 1)}
    return {"bug": name, "seed": seed, **counts, "world": world, "law": law}


def table(tries: Sequence[Any], num_seeds: int) -> int:
    """Print how many seeds found each bug, after how many events; 1 where few did, or the code as it is broke a law."""
    num_missed = 0
    print(f"{'bug':70} {'found':>9} {'median':>8} {'most':>8}  the law that most of them broke")
    for bug in dict.fromkeys(each["bug"] for each in tries):
        of_bug = [each for each in tries if each["bug"] == bug]
        events = [each["events"] for each in of_bug if each["law"]]
        laws = Counter(each["law"][:50] for each in of_bug if each["law"]).most_common(1)
        print(
            f"{bug:70} {f'{len(events)} of {len(of_bug)}':>9} {statistics.median(events or [0]):8.0f} "
            f"{max(events, default=0):8}  {laws[0][0] if laws else ''}"
        )
        is_found = len(events) >= NUM_TO_FIND * num_seeds
        num_missed += bool(events) if bug == _UNCHANGED.name else not is_found
    of_unchanged = [each for each in tries if each["bug"] == _UNCHANGED.name]
    print(
        f"the code as it is: {sum(each['events'] for each in of_unchanged)} events, "
        f"{sum(each['kills'] for each in of_unchanged)} kills; {sum(each['cpu_s'] for each in tries):.0f} s of CPU in all"
    )
    print(f"{len(tries)} cases, {num_missed} failures")
    return int(num_missed > 0)


def _tries(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--kills", type=int, default=0, help="go on until there were so many, too")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--world", type=int)
    parser.add_argument("--planted", type=int, default=0, help="seeds to look for each planted bug with")
    parser.add_argument("--to", type=Path, default=Path("planted_bugs.jsonl"), help="file of what --planted has tried")
    parser.add_argument("--only", default="", help="planted bugs with this in their names")
    parser.add_argument(
        "--branches", action="store_true", help="tell which failure branches of the product were reached"
    )
    sys.exit(main(parser.parse_args()))
