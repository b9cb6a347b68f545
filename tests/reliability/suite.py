"""Every fault that the project withstands, tried by one command.

    python -m tests.reliability.suite                  # all of it: hours on two cores
    python -m tests.reliability.suite --sample         # under eight minutes; CI runs bit_flips of it
    python -m tests.reliability.suite crash_states kills

Prints what each part prints, then a table: fault, cases, failures, seconds, command. Exit status 1 where there is a
failure. A part is a program that ends with a line such as `12 cases, 0 failures`, or a run of pytest, of which each test is
a case. docs/reliability.md says of each part what is tried and what counts as a failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_COUNTS = re.compile(r"(\d+) cases, (\d+) failures")
_PYTEST = re.compile(r"(?:(\d+) failed)?(?:, )?(?:(\d+) passed)?[^\n]* in [\d.]+s")
_ERRORS = re.compile(r"(\d+) errors? ")
_TEST = "pytest -q -p no:cacheprovider -m"
_FAST = "'not slow and not cluster and not gpu'"
_ALL = "'not cluster and not gpu'"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One kind of fault."""

    name: str
    fault: str
    whole: str
    """Arguments of `python -m`."""
    sample: str = ""
    """The same for CI; empty where the ordinary suites run it there already."""
    timeout_s: float = 4 * 3600.0
    """By which a part that hangs is ended: the longest takes an hour and a half beside another."""


_SMALL = (
    "data.max_validation_prompts=32 trainer.train_batch_size=8 trainer.policy_mini_batch_size=4 "
    "trainer.critic_mini_batch_size=4"
)
_APART = (
    "placement.rollouts=engines generator.backend=examples.plugins.engines:Apart generator.n_samples_per_prompt=4 "
    "generator.sampling.max_generate_length=8 trainer.train_batch_size=4 trainer.policy_mini_batch_size=4 "
    "trainer.critic_mini_batch_size=4 data.validation=[]"
)
"""An engine in an actor, which puts its rollouts itself, and answers one request at a time: of one that batches them the
last bit of a log-probability depends on what it computes together, which depends on time."""
_KILLS = "tests.reliability.kill_and_resume"
PARTS = (
    Part(
        name="crash_states",
        fault="killed, or without power, after any file operation; torn, lost and reordered writes",
        whole="tests.reliability.resume_crash_states",
        sample="tests.reliability.resume_crash_states --cases 8",
    ),
    Part(
        name="worlds",
        fault="at drawn moments on a simulated machine: kills, losses of power, full disks, lost answers, hangs",
        whole="tests.world.swarm --events 1000000 --kills 10000 --jobs 2",
    ),
    Part(
        name="bit_flips",
        fault="one bit of a checkpoint folder turned over",
        whole="tests.reliability.bit_flips",
        sample="tests.reliability.bit_flips --flips 1000 --resumed 3",
    ),
    Part(
        name="kills_rl",
        fault="SIGKILL of the process group, RL",
        whole=f"{_KILLS} --kind rl --kills 64 --jobs 2 --kills-a-run 2 {_SMALL}",
        sample=f"{_KILLS} --kind rl --kills 2 --kills-a-run 2 {_SMALL}",
    ),
    Part(
        name="kills_ppo",
        fault="SIGKILL of the process group, PPO with a critic",
        whole=f"{_KILLS} --kind ppo --kills 44 --jobs 2 --kills-a-run 2 {_SMALL}",
    ),
    Part(
        name="kills_sft",
        fault="SIGKILL of the process group, supervised",
        whole=f"{_KILLS} --kind sft --kills 70 --jobs 2 --kills-a-run 2",
        sample=f"{_KILLS} --kind sft --kills 2 --kills-a-run 2",
    ),
    Part(
        name="kills_ray",
        fault="SIGKILL of the process group, RL on Ray",
        whole=f"{_KILLS} --kind ray --kills 26 --kills-a-run 2 --jobs 1 {_SMALL}",
    ),
    Part(
        name="kills_one",
        fault="SIGKILL of any one process of an RL run on Ray whose rows are passed by reference",
        whole=f"{_KILLS} --kind ray --one-process --kills 60 --kills-a-run 2 {_APART}",
    ),
    Part(
        name="kills_stream",
        fault="SIGKILL of the process group, RL with rollouts made while the learner updates",
        whole=f"{_KILLS} --kind stream --kills 64 --jobs 2 --kills-a-run 4",
    ),
    Part(
        name="kills_operations",
        fault="the same, before file operations",
        whole=f"{_KILLS} --kind stream --at-operations --kills 54 --jobs 2 --kills-a-run 6",
    ),
    Part(
        name="saves",
        fault="disks of 12 sizes, folders that vanish, resealed checkpoints, cut manifests",
        whole=f"{_TEST} {_ALL} tests/trainers/test_saving.py tests/trainers/test_resealed.py "
        "tests/trainers/test_checkpoints.py tests/trainers/test_background_checkpoints.py "
        "tests/unit/learner/test_policy_state.py tests/unit/learner/test_state_files.py tests/unit/learner/test_shards.py",
    ),
    Part(
        name="store",
        fault="an object store that is cut off after any operation, fails, hangs or lags",
        whole=f"{_TEST} {_ALL} tests/trainers/test_checkpoint_url.py",
    ),
    Part(
        name="malformed_inputs",
        fault="malformed data rows, answers of engines and servers, replay records",
        whole=f"{_TEST} slow -s tests/reliability/test_malformed_inputs.py",
    ),
    Part(
        name="environments",
        fault="environments that hang, crash, fork, fill the memory or answer nonsense, in worker processes",
        whole=f"{_TEST} {_ALL} tests/reliability/test_hostile_environments.py",
    ),
    Part(
        name="processes",
        fault="what is started hangs, holds the interpreter, forks, stops its parent; whoever started it is killed",
        whole=f"{_TEST} {_ALL} tests/reliability/test_process_hosts.py",
    ),
    Part(
        name="services",
        fault="dead wandb servers, signals, secrets in configurations and logs",
        whole=f"{_TEST} {_ALL} tests/unit/telemetry tests/reliability/test_signals.py",
    ),
    Part(
        name="cluster",
        fault="a policy rank or a node that dies or freezes, an engine that does, /dev/shm full",
        whole=f"{_TEST} cluster tests/cluster/test_restarts.py tests/cluster/test_vllm_engine.py "
        "tests/unit/cluster/test_object_store.py",
    ),
    Part(
        name="nodes",
        fault="of two nodes of a cluster one is lost, stands still, or loses its raylet or the owner of its objects",
        whole="tests.reliability.node_failures",
    ),
    Part(
        name="cluster_faults",
        fault="a frozen policy rank, a frozen engine, a full /dev/shm, in the middle of a step on Ray with vLLM",
        whole="tests.reliability.cluster_failures - --restart policy-STOP-update engine-STOP-sync engine-STOP-generate "
        "shm-FULL-update",
    ),
    Part(
        name="source",
        fault="a call without a deadline, code in data, a listener open to other machines",
        whole=f"{_TEST} {_FAST} tests/unit/test_blocking_calls.py tests/unit/test_foreign_code.py",
    ),
)


@dataclass(frozen=True)
class Result:
    """What became of one part."""

    part: Part
    command: str
    cases: int
    failures: int
    seconds: float

    def row(self) -> str:
        """A line of the table."""
        outcome = f"{self.failures} failures" if self.failures else "as documented"
        cells = (self.part.fault, str(self.cases), outcome, f"{self.seconds:.0f} s", f"`python -m {self.command}`")
        return f"| {' | '.join(cells)} |"


def run_part(part: Part, command: str) -> Result:
    """Runs the part, shows what it says, and counts. One that dies without a count is a failure."""
    print(f"\n{part.name}: python -m {command}", flush=True)
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=part.timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said = process.communicate(timeout=60)[0] + f"\nnot done after {part.timeout_s:.0f} s"
    cases, failures = counts(said)
    if process.returncode != 0 and failures == 0:
        failures = 1
    shown = said.rstrip().splitlines()
    print("\n".join(shown if failures else shown[-6:]), flush=True)
    return Result(part, command, cases, failures, time.monotonic() - begun)


def counts(said: str) -> tuple[int, int]:
    """Cases and failures, by the last line that states them; none and one where nothing does."""
    if found := _COUNTS.findall(said):
        return int(found[-1][0]), int(found[-1][1])
    for line in reversed(said.splitlines()):
        if (match := _PYTEST.search(line)) and (match[1] or match[2]):
            errors = _ERRORS.search(line)
            failed = int(match[1] or 0) + int(errors[1] if errors else 0)
            return int(match[2] or 0) + failed, failed
    return 0, 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", action="store_true", help="a sample of each part, of which CI runs bit_flips")
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="all unless given: " + ", ".join(p.name for p in PARTS)
    )
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - {part.name for part in PARTS}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose from {', '.join(p.name for p in PARTS)}")
    chosen = [part for part in PARTS if part.name in args.parts or not args.parts]
    commands = [(part, part.sample if args.sample else part.whole) for part in chosen]
    begun = time.monotonic()
    results = [run_part(part, command) for part, command in commands if command]
    print("\n| fault | cases | outcome | time | command |\n|---|---|---|---|---|")
    print("\n".join(result.row() for result in results))
    cases, failures = (sum(getattr(result, name) for result in results) for name in ("cases", "failures"))
    print(f"\n{cases} cases, {failures} failures, {(time.monotonic() - begun) / 60:.0f} minutes", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
