"""Modules that moved are found by their paths of before, with a warning that names today's."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from skyrl_train import MOVED

BELOW = {
    "skyrl_train.memory.fit": "skyrl_train.learner.memory.fit",
    "skyrl_train.cli.hydra_files": "skyrl_train.runs.cli.hydra_files",
}
"""Modules of packages that moved."""


@pytest.mark.parametrize(("before", "now"), [*MOVED.items(), *BELOW.items()])
def test_a_path_of_before_gives_the_module_of_today(before: str, now: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if now == "skyrl_train.inference.vllm.worker":
        pytest.importorskip("vllm")
    monkeypatch.delitem(sys.modules, before, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{before} is {now} now"):
        assert import_module(before) is import_module(now)


def test_a_command_of_before_runs() -> None:
    command = [sys.executable, "-m", "skyrl_train.capsules", "--help"]
    assert "usage: skyrl-capsule" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"skyrl_train\.memories"):
        import_module("skyrl_train.memories")
