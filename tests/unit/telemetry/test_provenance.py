"""What a run says of the code and the libraries that it was made with."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

from skyrl_train.telemetry.run_folder import environment_of_run

VERSIONS = {"python": "3.11", "torch": "2.13.0"}


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_the_commit_of_the_code_is_told_and_whether_it_was_changed(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-qm", "first")
    clean = environment_of_run(tmp_path, VERSIONS)
    assert (clean["git_commit"], clean["git_dirty"]) == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "code.py").write_text("a = 2\n")
    assert environment_of_run(tmp_path, VERSIONS)["git_dirty"] is True


def test_code_outside_of_a_repository_has_no_commit(tmp_path: Path) -> None:
    found = environment_of_run(tmp_path, VERSIONS)
    assert (found["git_commit"], found["git_dirty"]) == (None, None)
    assert (found["versions"], found["python"]) == ({"torch": "2.13.0"}, platform.python_version())


def test_the_command_is_told_without_secrets(tmp_path: Path) -> None:
    arguments = ["/usr/bin/skyrl-train", "seed=1", "tracker.wandb.api_key=hf_0123456789abcdef012345"]
    assert (
        environment_of_run(tmp_path, VERSIONS, arguments)["command"]
        == "skyrl-train seed=1 tracker.wandb.api_key=<redacted>"
    )
