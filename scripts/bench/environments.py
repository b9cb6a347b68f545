"""Measures what an environment call costs on threads and in worker processes, and how many asynchronous ones go on at once.

    python scripts/bench/environments.py                                   # 100,000 calls each way
    python scripts/bench/environments.py --calls 20000 --sleepers 0        # seconds
    python scripts/bench/environments.py --env-class gsm8k_multi_turn      # start and memory of an environment of skyrl-gym

The calls are steps of the bundled environment, which take a few microseconds: what is left is the way there and back.
As many trajectories are under way as there are workers. Start-up is from nothing to the first answer, with the imports
of the supervisor; memory is each process's proportional share (PSS), since workers share what was imported.

Then 1,000 asynchronous environments (`--sleepers`) take four steps each, every one of which sleeps for 0.5 s, as one that
asks a server does: one at a time they would take 2,000 s, and 2 s if waiting were all.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import harness
from harness import children

from skyrl_train.rollout.boundary import Environments, EnvironmentSession
from skyrl_train.rollout.hosts import LocalWorkers, ProcessEnvironments, ThreadEnvironments

ROW = {"reward_spec": {"method": "rule", "ground_truth": "4"}, "max_turns": 1 << 30}
MESSAGES = [{"role": "user", "content": "2 + 2?"}]

SLEEP_S, SLEEPS = 0.5, 4


class Sleeping:
    """An asynchronous environment that does nothing but wait."""

    def __init__(self, env_config: object, extras: object) -> None:
        del env_config, extras
        self._steps = 0

    async def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, object]]:
        return prompt, {}

    async def step(self, action: str) -> dict[str, object]:
        del action
        await asyncio.sleep(SLEEP_S)
        self._steps += 1
        return {"observations": MESSAGES, "reward": 0.0, "done": self._steps == SLEEPS}


async def one_trajectory(environments: Environments, env_class: str, num_steps: int) -> None:
    session = EnvironmentSession(environments, env_class, ROW, env_class)
    await session.start(MESSAGES)
    for _ in range(num_steps):
        await session.step("I do not know.")
    await session.close()


async def measure(
    environments: Environments, env_class: str, *, num_calls: int, num_workers: int
) -> tuple[float, float]:
    """Return seconds from nothing to the first answer, and calls a second from then on."""
    started = time.perf_counter()
    await one_trajectory(environments, env_class, 1)
    start_s = time.perf_counter() - started
    # All workers are there before the clock starts.
    await asyncio.gather(*(one_trajectory(environments, env_class, 1) for _ in range(num_workers)))
    started = time.perf_counter()
    steps = num_calls // num_workers
    await asyncio.gather(*(one_trajectory(environments, env_class, steps) for _ in range(num_workers)))
    return start_s, num_workers * steps / (time.perf_counter() - started)


def memory_mb(process: int) -> float:
    """Proportional share of memory, in MB; Linux only."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000


async def compare(env_class: str, num_calls: int, num_workers: int, timeout_s: float) -> None:
    threads = ThreadEnvironments(num_workers=num_workers, timeout_s=timeout_s)
    start_s, thread_rate = await measure(threads, env_class, num_calls=num_calls, num_workers=num_workers)
    await threads.aclose()
    print(f"threads    first answer after {start_s:.2f} s, {thread_rate:,.0f} calls/s")
    workers = LocalWorkers((env_class,), worker_memory_gb=4.0)
    processes = ProcessEnvironments(workers, num_workers=num_workers, timeout_s=timeout_s)
    start_s, rate = await measure(processes, env_class, num_calls=num_calls, num_workers=num_workers)
    (supervisor,) = children("self")
    workers = sorted(memory_mb(worker) for worker in children(supervisor))
    print(f"processes  first answer after {start_s:.2f} s, {rate:,.0f} calls/s: {rate / thread_rate:.2f} of threads")
    print(
        f"           {1e6 / rate:,.0f} microseconds a call, {1e6 / rate - 1e6 / thread_rate:,.0f} more than a thread's"
    )
    shares = f"{len(workers)} workers of {workers[0]:.1f} to {workers[-1]:.1f} MB"
    print(f"           {shares}, supervisor {memory_mb(supervisor):.1f} MB")
    started = time.perf_counter()
    await processes.aclose()
    print(f"           ended in {time.perf_counter() - started:.2f} s")


async def sleep_together(num_environments: int) -> None:
    """Measure all of them from the first call to the last, with the workers started before."""
    spec = f"{Path(__file__).stem}:{Sleeping.__name__}"
    processes = ProcessEnvironments(LocalWorkers((spec,), worker_memory_gb=4.0), num_workers=None, timeout_s=60.0)
    await asyncio.gather(*(one_trajectory(processes, spec, 1) for _ in range(os.cpu_count() or 1)))
    (supervisor,) = (each for each in children("self") if children(each))
    num_workers = len(children(supervisor))
    started = time.perf_counter()
    await asyncio.gather(*(one_trajectory(processes, spec, SLEEPS) for _ in range(num_environments)))
    took_s = time.perf_counter() - started
    await processes.aclose()
    print(
        f"sleeping   {num_environments:,} environments of {SLEEPS} steps, {SLEEP_S} s each, in {num_workers} processes: "
        f"{took_s:.2f} s, of which {took_s - SLEEPS * SLEEP_S:.2f} s are not sleep"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--calls", type=int, default=100_000, help="steps each way")
    parser.add_argument("--sleepers", type=int, default=1000, help="asynchronous environments at once; 0 for none")
    parser.add_argument("--workers", type=int, default=16, help="threads, or processes, and trajectories under way")
    parser.add_argument("--env-class", default="word_problems")
    parser.add_argument("--timeout-s", type=float, default=60.0)
    arguments = parser.parse_args(argv)
    asyncio.run(compare(arguments.env_class, arguments.calls, arguments.workers, arguments.timeout_s))
    if arguments.sleepers:
        asyncio.run(sleep_together(arguments.sleepers))


if __name__ == "__main__":
    harness.run(main)
