"""The trainer, one of whose workers, or nodes, is struck in the middle of an update.

    python -m tests.cluster.struck_run SIGKILL@2,SIGSTOP@4 OVERRIDE...
    python -m tests.cluster.struck_run NODE@3 OVERRIDE...

In the update of that number the ranks are handed the gradients to compute; before any has answered, and once the
checkpoints of all steps before are there, the policy's last rank gets the signal. With NODE the run is on a cluster of two
nodes on this machine, and all processes of the one without the trainer are killed. `tests/cluster/test_restarts.py` runs it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.cluster.calls import RemoteActor, Watch
from skyrl_train.main import main

CHECKPOINT_TIMEOUT_S = 60.0


def strike(folder: Path, blows: dict[int, Callable[[], None]]) -> None:
    """Has these called when the driver begins to wait for gradients, by the number of the wait."""
    original, seen = Watch.wait, 0

    def strike_now(blow: Callable[[], None]) -> None:
        wait_for_checkpoint(folder)
        blow()

    def wait(watch: Watch, actors: Sequence[RemoteActor], refs: Sequence[Any]) -> list[Any]:
        nonlocal seen
        if watch._what == "forward_backward":
            seen += 1
            if seen in blows:
                strike_now(blows.pop(seen))
        return original(watch, actors, refs)

    Watch.wait = wait  # type: ignore[method-assign]


def wait_for_checkpoint(folder: Path) -> None:
    """Returns once the checkpoint of the last step is whole: a rank that dies earlier leaves it unwritten, as it should."""
    last_step = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["step"]
    deadline = time.monotonic() + CHECKPOINT_TIMEOUT_S
    while not (folder / "checkpoints" / f"step_{last_step:06d}").is_dir():
        assert time.monotonic() < deadline, f"no checkpoint of step {last_step}"
        time.sleep(0.01)


def signalling(name: str, folder: Path) -> Callable[[], None]:
    def blow() -> None:
        actors = json.loads((folder / "actors.json").read_text(encoding="utf-8"))
        os.kill(actors["policy"][-1]["pid"], getattr(signal, name))

    return blow


def on_two_nodes(folder: Path, number: int, overrides: list[str]) -> None:
    from ray.cluster_utils import Cluster

    os.environ["RAY_prestart_worker_first_driver"] = os.environ["RAY_enable_worker_prestart"] = "0"  # noqa: SIM112
    cluster = Cluster()
    sizes = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster.add_node(**sizes)
    other = cluster.add_node(**sizes)
    strike(folder, {number: lambda: cluster.remove_node(other, allow_graceful=False)})
    sys.argv[1:] = [*overrides, f"placement.ray_address={cluster.address}"]
    try:
        main()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    blows, overrides = [each.split("@") for each in sys.argv[1].split(",")], sys.argv[2:]
    (where,) = [Path(each.partition("=")[2]) for each in overrides if each.startswith("hydra.run.dir=")]
    if blows[0][0] == "NODE":
        on_two_nodes(where, int(blows[0][1]), overrides)
    else:
        strike(where, {int(number): signalling(name, where) for name, number in blows})
        sys.argv[1:] = overrides
        main()
