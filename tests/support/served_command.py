"""`skyrl-serve` in a process of its own, and what programs of a client's environment need to speak to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLIENTS = Path(os.environ.get("SKYRL_TRAIN_CLIENT_ENVS", ROOT / ".venv-clients"))
COOKBOOK_PYTHON = os.environ.get("SKYRL_TRAIN_COOKBOOK_PYTHON") or str(CLIENTS / "cookbook" / "bin" / "python")
SERVED_AS = "Qwen/Qwen3-4B-Instruct-2507"
"""A name by which the cookbook chooses ChatML, which is the chat template of the bundled models, too."""
_START_TIMEOUT_S = 600.0


class Command:
    """`skyrl-serve` with its state in a folder, and what it prints in a file beside that."""

    def __init__(self, folder: Path, *words: str) -> None:
        command = [sys.executable, "-m", "skyrl_train.main_serve", "--folder", str(folder), "--port", "0", *words]
        self.log = folder.with_name(f"{folder.name}.log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder.parent,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        ends = time.monotonic() + _START_TIMEOUT_S
        while "optim_step" not in self.log.read_text() and self.process.poll() is None and time.monotonic() < ends:
            time.sleep(0.05)
        found = re.search(r"TINKER_BASE_URL=(\S+) TINKER_API_KEY=(\S+)", self.log.read_text())
        if found is None:
            self.process.kill()
            raise RuntimeError(self.log.read_text())
        self.variables = {"TINKER_BASE_URL": found[1], "TINKER_API_KEY": found[2]}

    def example(self) -> str:
        """The program that it printed."""
        found = re.search(r"import tinker\n.*optim_step[^\n]*", self.log.read_text(), re.DOTALL)
        assert found
        return found[0]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


def client_environment(command: Command) -> dict[str, str]:
    """The variables of a program that speaks to this server. Nothing of this repository is among them."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
    return {**kept, "HF_HUB_OFFLINE": "1", **command.variables}


def place_tokenizer(folder: Path, model: Path) -> None:
    """Make a model's folder what `SERVED_AS` means to programs that work in `folder`."""
    place = folder / SERVED_AS
    place.parent.mkdir()
    place.symlink_to(model)
