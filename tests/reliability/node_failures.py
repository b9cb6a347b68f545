"""What becomes of a run on several nodes when one of them is lost, slow, or loses the process that keeps its objects.

    python -m tests.reliability.node_failures [--output FOLDER] [CASE ...]

Runs the trainer on a Ray cluster of two nodes on this machine (two raylets): policy and reference sharded over both, and
an engine that puts its rollouts into the object store itself. A case is BLOW-PHASE, e.g. `node-update`; the blow falls in
the second step, a moment after the phase began:

    raylet   the raylet of the trainer's own node is killed
    node     all processes of the other node are killed, and another node joins
    owner    the engine, which owns the arrays of the rollouts, is killed
    slow     all processes of the other node stand still for six seconds

The run may go on by itself or end with an error that says why (without its raylet Ray itself may end the process, with
status 1). Then the same command is given once more on a cluster of its own, if it has not ended well. Metrics (timings
aside) and exported weights have to be those of a run that nothing disturbed, byte for byte, and nothing may be left of the
processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.reliability.cluster_failures import says, strike_in
from tests.reliability.kill_and_resume import RAYS_AGENTS_S, RunResult, differences, result
from tests.support.process_trees import Family, descendants

BLOWS = ("raylet", "node", "owner", "slow")
PHASES = {"generate": 0.3, "assemble": 0.0, "score": 0.1, "estimate": 0.0, "update": 0.3, "sync": 0.0}
"""Seconds after its begin."""
CASES = tuple(f"{blow}-{phase}" for phase, blow in itertools.product(PHASES, BLOWS))
OVERRIDES = (
    "+experiment=gsm8k_multiturn",
    "platform=cpu",
    "placement.backend=ray",
    "placement.rollouts=engines",
    "generator.backend=examples.plugins.engines:Apart",
    "generator.n_samples_per_prompt=4",
    "generator.sampling.max_generate_length=8",
    "placement.policy_num_workers=2",
    "placement.policy_num_nodes=2",
    "placement.ref_num_workers=2",
    "placement.ref_num_nodes=2",
    "placement.start_timeout_s=400",
    "placement.call_timeout_s=180",
    "placement.silence_timeout_s=30",
    "strategy=fsdp2",
    "trainer.algorithm.kl_loss_coef=0.01",
    "trainer.total_steps=3",
    "trainer.ckpt_interval=1",
    "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=4",
    "data.validation=[]",
)
STANDS_STILL_S = 6.0
CASE_TIMEOUT_S = 900.0
NODE = {"num_cpus": 4, "object_store_memory": 100 * 2**20}


def run_case(case: str, folder: Path) -> None:
    """Inside the child: a cluster of its own, and the trainer on it. `none`: undisturbed."""
    os.environ["RAY_prestart_worker_first_driver"] = os.environ["RAY_enable_worker_prestart"] = "0"  # noqa: SIM112
    from ray.cluster_utils import Cluster

    from skyrl_train.cluster import RayPlane
    from skyrl_train.main import main
    from skyrl_train.trainers import steps

    cluster = Cluster()
    own, other = cluster.add_node(**NODE), cluster.add_node(**NODE)
    blow, _, phase = case.partition("-")
    if phase:
        owner, name = {"assemble": (RayPlane, "make_rows"), "estimate": (RayPlane, "add_columns")}.get(
            phase, (steps, phase)
        )
        blows: dict[str, Callable[[], None]] = {
            "raylet": lambda: os.kill(_raylet(own), signal.SIGKILL),
            "node": lambda: _replace(cluster, other),
            "owner": lambda: os.kill(_engine(folder), signal.SIGKILL),
            "slow": lambda: _stop_for_a_while(_raylet(other)),
        }

        def strike() -> None:
            (folder / "struck").write_text(str(time.time()), encoding="utf-8")
            blows[blow]()

        # The first sync is the one before the first step; a step calls each method of the plane once.
        strike_in(owner, name, strike, call=3 if phase == "sync" else 2, delay_s=PHASES[phase])
    sys.argv = ["skyrl-train", *OVERRIDES, f"placement.ray_address={cluster.address}", f"hydra.run.dir={folder}"]
    try:
        main()
    finally:
        cluster.shutdown()


def _raylet(node: Any) -> int:
    (raylet,) = node.all_processes["raylet"]
    return int(raylet.process.pid)


def _engine(folder: Path) -> int:
    return int(json.loads((folder / "actors.json").read_text(encoding="utf-8"))["engine"][0]["pid"])


def _replace(cluster: Any, node: Any) -> None:
    cluster.remove_node(node, allow_graceful=False)
    threading.Thread(target=_join, args=(cluster,), daemon=True).start()


def _join(cluster: Any) -> None:
    """Start a node, on a thread that does not end: the kernel ends Ray's processes with the thread that started them."""
    import ray._private.utils as utils

    utils.set_sigterm_handler = lambda handler: None  # the main thread alone may have one
    cluster.add_node(**NODE)
    threading.Event().wait()


def _stop_for_a_while(raylet: int) -> None:
    pids = descendants(raylet)

    def send(signum: int) -> None:
        for pid in pids:
            os.kill(pid, signum)

    send(signal.SIGSTOP)
    threading.Timer(STANDS_STILL_S, send, args=(signal.SIGCONT,)).start()


def run(case: str, folder: Path) -> tuple[str, float, list[str]]:
    """Exit status, seconds, and the command lines of what is left when Ray's agents have had their time."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with (folder.parent / f"{folder.name}.log").open("w", encoding="utf-8") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.reliability.node_failures", "--child", case, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        family = Family(child.pid)
        try:
            status = str(child.wait(CASE_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            status = "HUNG"
    return status, time.monotonic() - began, family.left(within_s=RAYS_AGENTS_S)


def judge(case: str, folder: Path, expected: RunResult) -> tuple[list[str], bool]:
    """One line of the table, and whether all is as it should be."""
    status, seconds, left = run(case, folder)
    said = says(folder.parent / f"{folder.name}.log")
    if not (folder / "struck").exists():
        return [case, status, f"{seconds:.0f}", "the phase was not reached", said], False
    ends, again = ("0", "1", "2") if case.startswith("raylet") else ("0", "2"), ""
    if status in ends[1:]:
        again, _, also = run("none", folder)
        left += also
    found = differences(expected, result(folder)) if "0" in (status, again) else ["it does not go on"]
    is_right = status in ends and not left and not found
    return [
        case,
        " then ".join(filter(None, (status, again))),
        f"{seconds:.0f}",
        said,
        "; ".join(found + left),
    ], is_right


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for the runs; a temporary one unless given")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    args = parser.parse_args(argv)
    if args.child:
        run_case(args.child[0], Path(args.child[1]))
        return 0
    root, failed, cases = args.output or Path(tempfile.mkdtemp(prefix="node-failures-")), 0, args.cases or CASES
    status, seconds, left = run("none", root / "none")
    if status != "0" or left:
        raise SystemExit(f"the undisturbed run ended with {status}, see {root / 'none.log'}; left: {left}")
    expected = result(root / "none")
    print(f"undisturbed: {seconds:.0f} s")
    print("| case | exit status | seconds | what the user reads | wrong |\n|---|---|---|---|---|", flush=True)
    for case in cases:
        row, is_right = judge(case, root / case, expected)
        failed += not is_right
        print("| " + " | ".join(row) + " |", flush=True)
    print(f"{len(cases)} cases, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
