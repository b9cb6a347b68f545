"""The trainer, one of whose workers is struck by a signal in the middle of an update.

    python -m tests.cluster.struck_run SIGNAL STEP OVERRIDE...

The second rank of the policy gets the signal once, after the ranks were handed the gradients to compute of that step and
before any has answered. `tests/cluster/test_restarts.py` runs it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl_train.cluster.calls import RemoteActor, Watch
from skyrl_train.main import main


def strike(name: str, step: int, folder: Path) -> None:
    """Has the signal sent when the driver begins to wait for that step's gradients."""
    original, seen = Watch.wait, 0

    def wait(watch: Watch, actors: Sequence[RemoteActor], refs: Sequence[Any]) -> list[Any]:
        nonlocal seen
        seen += watch._what == "forward_backward"
        if seen == step and not (folder / "struck").exists():
            pid = json.loads((folder / "actors.json").read_text(encoding="utf-8"))["policy"][1]["pid"]
            os.kill(pid, getattr(signal, name))
            (folder / "struck").write_text(str(pid), encoding="utf-8")
        return original(watch, actors, refs)

    Watch.wait = wait  # type: ignore[method-assign]


if __name__ == "__main__":
    (where,) = [argument.partition("=")[2] for argument in sys.argv if argument.startswith("hydra.run.dir=")]
    strike(sys.argv[1], int(sys.argv[2]), Path(where))
    sys.argv[1:] = sys.argv[3:]
    main()
