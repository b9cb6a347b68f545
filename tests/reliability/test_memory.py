"""The memory of a run does not grow with its steps."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_runs import TIMEOUT_S, start_command, wait_for

STEPS = 1000
TOY = (
    *("+experiment=gsm8k_multiturn", "platform=cpu", f"trainer.total_steps={STEPS}", "trainer.ckpt_interval=20"),
    *("trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2", "trainer.critic_mini_batch_size=2"),
    *("generator.n_samples_per_prompt=2", "generator.sampling.max_generate_length=6", "generator.max_turns=1"),
    *("data.max_validation_prompts=4", "trainer.eval_interval=10"),
)


@pytest.mark.nightly
@pytest.mark.parametrize("own", [(), ("trainer.max_staleness=2",)], ids=["serial", "asynchronous"])
def test_a_run_of_a_thousand_steps_holds_no_more_than_after_fifty(tmp_path: Path, own: tuple[str, ...]) -> None:
    running = start_command(tmp_path / "run", *TOY, *own)
    seen = megabytes_by_step(running.process.pid, tmp_path / "run" / "metrics.jsonl", running.process.poll)
    status, said = wait_for(running)
    assert status == 0, said[-3000:]
    early = [held for step, held in seen.items() if 50 <= step <= 150]
    late = [held for step, held in seen.items() if step >= STEPS - 100]
    assert sum(late) / len(late) <= 1.01 * sum(early) / len(early)


def megabytes_by_step(pid: int, metrics: Path, poll: Callable[[], int | None]) -> dict[int, float]:
    """Memory of the process in MB (resident) at the first look after each step's record."""
    seen: dict[int, float] = {}
    ends = time.monotonic() + TIMEOUT_S
    while poll() is None and time.monotonic() < ends:
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if step not in seen:
            status = Path(f"/proc/{pid}/status").read_text()
            if held := re.search(r"VmRSS:\s+(\d+) kB", status):  # a process that ended is still listed, without
                seen[step] = int(held[1]) / 1024
        time.sleep(0.05)
    return seen
