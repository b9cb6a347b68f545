"""`environment.json`: what a run was made with, for whoever reads it later. Nothing of a run depends on it.

{"command": "skyrl-train +experiment=gsm8k", "git_commit": "1f0c...", "git_dirty": false, "platform": "Linux-6.1 ...",
 "python": "3.11.2", "versions": {"torch": "2.13.0", "transformers": "5.16.1"}}
"""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.telemetry.redaction import redact_text

_GIT_TIMEOUT_S = 5.0


def environment_of_run(code: Path, versions: Mapping[str, str], arguments: Sequence[str] = sys.argv) -> dict[str, Any]:
    """Return the content of `environment.json` for the code in a folder and the versions of its libraries; null for what is
    not known, such as the commit of code that is in no repository."""
    commit, dirty, _ = git_commit(code).partition("-dirty")
    return {
        "command": redact_text(shlex.join([Path(arguments[0]).name, *arguments[1:]])) if arguments else None,
        "git_commit": commit or None,
        "git_dirty": bool(dirty) if commit else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if name != "python"},
    }


def git_commit(code: Path) -> str:
    """Return the commit of the code in a folder, with `-dirty` where files differ from it; empty where git knows none, is
    not there or does not answer."""
    command = ["git", "-C", str(code), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
