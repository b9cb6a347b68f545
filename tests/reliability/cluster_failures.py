"""What a user sees when a process of a distributed run is killed or stops answering.

    python tests/reliability/cluster_failures.py OUTPUT_FOLDER [--apart] [--restart] [CASE ...]

Runs the trainer on Ray with a policy worker, a reference worker and a vLLM engine, once per case; sends the signal in the
second step, a moment after the phase began; prints a table: how the run ended, after how many seconds, what it said last,
and which of its processes were left five seconds later. A case is ROLE-SIGNAL-PHASE, e.g. `policy-KILL-update`. Runs end
with the error that is met; with `--restart` they go on by themselves (`trainer.max_restarts`), and one that does not end
with status 0 is counted as wrong. In `shm-FULL-PHASE` the shared memory fills up instead, that of a mount of the run's own.
The folder `-` is a temporary one.

With `--apart` vLLM's core and its worker are processes of their own, as on a GPU, and the cases are about the engine alone:
its actor (`engine`), its `core` and its `worker`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.process_trees import Family, command_line, descendants

CASES = (
    *(
        f"{role}-{name}-{phase}"
        for role in ("policy", "reference", "engine")
        for name in ("KILL", "STOP")
        for phase in ("generate", "score", "update", "sync")
    ),
    "shm-FULL-generate",
    "shm-FULL-update",
)
CASES_APART = tuple(
    f"{role}-{name}-{phase}"
    for role in ("engine", "core", "worker")
    for name in ("KILL", "STOP")
    for phase in ("generate", "update", "sync")
)
TITLES = {"core": "VLLM::EngineCore", "worker": "VLLM::Worker"}
OVERRIDES = (
    "+experiment=gsm8k_multiturn",
    "placement.backend=ray",
    "strategy=fsdp2",
    "generator=vllm",
    "trainer.algorithm.kl_loss_coef=0.01",
    "trainer.total_steps=3",
    "trainer.train_batch_size=16",
    "trainer.policy_mini_batch_size=16",
    "trainer.critic_mini_batch_size=16",
    "data.validation=[]",
    "trainer.export_hf=false",
    "placement.silence_timeout_s=5",
)
CASE_TIMEOUT_S = 900.0
IN_OWN_MOUNT = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1100m tmpfs /dev/shm && exec "$@"', "sh")
"""Gives a command a /dev/shm of its own, little more than Ray's object store takes. Wants the right to mount."""
_TELLING = ("warning: restart", "WARNING skyrl_train.cluster")
DELAY_S = {"generate": 0.3, "score": 0.1, "update": 0.3, "sync": 0.0}


def fill_shared_memory() -> None:
    """Leaves no page of it."""
    file, length, block = os.open("/dev/shm/filler", os.O_CREAT | os.O_WRONLY), 0, 1 << 24
    while block >= 4096:
        try:
            os.posix_fallocate(file, length, block)
            length += block
        except OSError:
            block //= 4
    os.close(file)


def strike_in(owner: Any, name: str, strike: Callable[[], None], *, call: int, delay_s: float) -> None:
    """Have `strike` called when the function of that name is called for the `call`th time, or so many seconds later."""
    original, calls = getattr(owner, name), 0

    def wrapped(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            if delay_s:
                threading.Timer(delay_s, strike).start()
            else:
                strike()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def run_case(case: str, folder: Path, *overrides: str) -> None:
    """Inside the child: the trainer, with the signal sent when the phase of the second step begins."""
    role, name, phase = case.split("-")

    def strike() -> None:
        (folder / "struck").write_text(str(time.time()), encoding="utf-8")
        if role == "shm":
            fill_shared_memory()
            return
        actors = json.loads((folder / "actors.json").read_text(encoding="utf-8"))
        pid = actors["engine" if role in TITLES else role][0]["pid"]
        if role in TITLES:
            (pid,) = [each for each in descendants(pid) if command_line(each).startswith(TITLES[role])]
        os.kill(pid, getattr(signal, f"SIG{name}"))

    from skyrl_train.trainers import steps

    # The first sync is the one before the first step.
    strike_in(steps, phase, strike, call=3 if phase == "sync" else 2, delay_s=DELAY_S[phase])
    sys.argv = ["skyrl-train", *OVERRIDES, *overrides, f"hydra.run.dir={folder}"]
    from skyrl_train.main import main

    main()


def judge(case: str, folder: Path, *overrides: str) -> list[str]:
    """One line of the table."""
    folder.mkdir(parents=True)
    log = folder / "child.log"
    command = [sys.executable, str(Path(__file__).resolve()), "--child", case, str(folder), *overrides]
    if case.startswith("shm"):
        command = [*IN_OWN_MOUNT, *command]
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        family = Family(child.pid)
        try:
            status = str(child.wait(CASE_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            status = "HUNG"
    ended = time.time()
    left = family.left(within_s=5.0)
    if not (folder / "struck").exists():
        return [case, status, "-", "the phase was not reached", "-"]
    seconds = ended - float((folder / "struck").read_text(encoding="utf-8"))
    return [case, status, f"{seconds:.1f}", says(log), ", ".join([str(len(left)), *left])]


def says(log: Path) -> str:
    """The line that tells the user what happened."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    telling = [line for line in lines if "Error: " in line or line.startswith(_TELLING)]
    return (telling[0] if telling else lines[-1] if lines else "")[:160]


def main() -> int:
    if sys.argv[1] == "--child":
        run_case(sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
        return 0
    root, *given = sys.argv[1:]
    cases = CASES
    if "--apart" in given:
        given.remove("--apart")
        cases = CASES_APART
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    restarts = "--restart" in given
    if restarts:
        given.remove("--restart")
    overrides = () if restarts else ("trainer.max_restarts=0",)
    folder, wrong = Path(tempfile.mkdtemp(prefix="cluster-failures-") if root == "-" else root), 0
    print("| case | exit status | seconds | what the user reads | processes left |\n|---|---|---|---|---|", flush=True)
    for case in given or cases:
        row = judge(case, folder / case, *overrides)
        expected = ("0",) if restarts else ("0", "2")
        wrong += row[1] not in expected or row[4].partition(",")[0] != "0"
        print("| " + " | ".join(row) + " |", flush=True)
    print(f"{len(given or cases)} cases, {wrong} failures")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
