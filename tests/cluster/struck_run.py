"""The trainer, one of whose workers, or nodes, is struck in the middle of an update.

    python -m tests.cluster.struck_run SIGKILL@2,SIGSTOP@4 OVERRIDE...
    python -m tests.cluster.struck_run NODE@3 OVERRIDE...

In the update of that number the ranks are handed the gradients to compute; before any has answered the policy's last rank
gets the signal. With NODE the run is on a cluster of two nodes on this machine, and all processes of the one without the
trainer are killed. `tests/cluster/test_restarts.py` runs it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.cluster.calls import RemoteActor, Watch
from skyrl_train.main import main


def strike(blows: dict[int, Callable[[], None]]) -> None:
    """Has these called when the driver begins to wait for gradients, by the number of the wait."""
    original, seen = Watch.wait, 0

    def wait(watch: Watch, actors: Sequence[RemoteActor], refs: Sequence[Any]) -> list[Any]:
        nonlocal seen
        if watch._what == "forward_backward":
            seen += 1
            blows.pop(seen, lambda: None)()
        return original(watch, actors, refs)

    Watch.wait = wait  # type: ignore[method-assign]


def signalling(name: str, folder: Path) -> Callable[[], None]:
    def blow() -> None:
        actors = json.loads((folder / "actors.json").read_text(encoding="utf-8"))
        os.kill(actors["policy"][-1]["pid"], getattr(signal, name))

    return blow


def on_two_nodes(number: int, overrides: list[str]) -> None:
    from ray.cluster_utils import Cluster

    os.environ["RAY_prestart_worker_first_driver"] = os.environ["RAY_enable_worker_prestart"] = "0"  # noqa: SIM112
    cluster = Cluster()
    sizes = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster.add_node(**sizes)
    other = cluster.add_node(**sizes)
    strike({number: lambda: cluster.remove_node(other, allow_graceful=False)})
    sys.argv[1:] = [*overrides, f"placement.ray_address={cluster.address}"]
    try:
        main()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    blows, overrides = [each.split("@") for each in sys.argv[1].split(",")], sys.argv[2:]
    if blows[0][0] == "NODE":
        on_two_nodes(int(blows[0][1]), overrides)
    else:
        (where,) = [each.partition("=")[2] for each in overrides if each.startswith("hydra.run.dir=")]
        strike({int(number): signalling(name, Path(where)) for name, number in blows})
        sys.argv[1:] = overrides
        main()
