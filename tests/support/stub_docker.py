"""Stands in for the program `docker` where there is no daemon: keeps "containers" as files, and runs what enters one here.

    python stub_docker.py STATE WORDS ...      appends WORDS to STATE/calls.jsonl

As of docker's own: what enters gets the variables that are named and no others; it does not end with the client that
started it, only with its container; a container ends by `rm` alone; an image is known by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

state, words = Path(sys.argv[1]), sys.argv[2:]
IMAGE = "agents:1"
WITH_VALUE = (
    "--env",
    "--workdir",
    "--user",
    "--name",
    "--label",
    "--volume",
    "--network",
    "--security-opt",
    "--cap-drop",
)
WITH_VALUE += (
    "--tmpfs",
    "--memory",
    "--memory-swap",
    "--cpus",
    "--pids-limit",
    "--stop-timeout",
    "--entrypoint",
    "--filter",
    "--format",
)


def options(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Options with their values, and what follows them."""
    found = []
    while words and words[0].startswith("--"):
        if words[0] in WITH_VALUE:
            found.append((words[0], words[1]))
            words = words[2:]
        else:
            found.append((words[0], ""))
            words = words[1:]
    return found, words


def values(found: list[tuple[str, str]], name: str) -> list[str]:
    return [value for option, value in found if option == name]


with open(state / "calls.jsonl", "a") as calls:
    calls.write(json.dumps({"words": words, "process": os.getpid()}) + "\n")
containers = state / "containers"
containers.mkdir(exist_ok=True)
command, found, rest = words[0], *options(words[1:])
if (state / "down").exists():
    sys.exit("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?")
if command == "image":
    sys.exit(0 if words[-1] == IMAGE else f"Error response from daemon: No such image: {words[-1]}")
elif command == "run":
    assert rest == [IMAGE, "infinity"], rest
    (name,) = values(found, "--name")
    with open(containers / name, "x"):
        print("0123456789abcdef")
elif command == "exec":
    name, *program = rest
    if not (containers / name).exists():
        sys.exit(f"Error response from daemon: No such container: {name}")
    pairs = [(word.partition("=")[0], word.partition("=")[2] or os.environ[word]) for word in values(found, "--env")]
    (folder,) = values(found, "--workdir")
    inside = {"PATH": os.environ["PATH"], **dict(pairs)}
    process = subprocess.Popen(program, env=inside, cwd=folder, start_new_session=True)
    with open(containers / name, "a") as processes:
        processes.write(f"{process.pid}\n")
    sys.exit(process.wait())
elif command == "rm":
    for name in rest:
        for process in (containers / name).read_text().split() if (containers / name).exists() else ():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(process), signal.SIGKILL)
        (containers / name).unlink(missing_ok=True)
elif command == "ps":
    if (state / "forgets").exists():  # a daemon that is slow to tell
        time.sleep(30)
    print("\n".join(path.name for path in containers.iterdir()))
else:
    sys.exit(f"unknown command: docker {command}")
