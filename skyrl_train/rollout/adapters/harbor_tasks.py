"""Task folders of Harbor, in which terminal and software tasks are shared, played in the sandbox of this machine:

    data.reader=harbor data.train=[FOLDER]    FOLDER is a task, or has tasks in it
    environment.env_class=harbor              the model's tool `bash` works in the task's folder; its answer ends the task

    instruction.md            the prompt
    environment/Dockerfile    WORKDIR, COPY and ENV are done; what a container would have to be built for is refused
    tests/test.sh             runs after the answer, in `/tests`; writes `/logs/verifier/reward.txt` or `reward.json`
    task.toml                 `[verifier] timeout_sec`, `[environment] memory_mb`

Each command is in a sandbox of its own: files stay, processes do not, and there is no network. Tests that write no reward
fail the trajectory. The format is described at harborframework.com/docs/tasks.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import io
import json
import math
import shlex
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from skyrl_train.errors import DataError, Violation
from skyrl_train.system.sandbox import Limits, run, violations as sandbox_violations
from skyrl_train.types import ChatMessage

COLUMN = "harbor"
REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
_NOT_BUILT = ("FROM", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE")
"""Instructions of a Dockerfile without which a task is the same here."""
_OF_THE_SYSTEM = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "root", "run", "sbin", "sys", "tmp", "usr", "var"}
)
_START_AND_END_S = 10.0
_SHOWN = 20_000
"""Characters of a command's output."""


def read_tasks(location: str) -> Iterator[dict[str, Any]]:
    """The reader `harbor`: a row for each task folder, sorted by name. Raises DataError, FileNotFoundError."""
    if importlib.util.find_spec("tomllib") is None:
        raise DataError(f"{location}: task.toml needs Python 3.11 or later to be read")
    place = Path(location).expanduser()
    folders = [place] if (place / "task.toml").is_file() else sorted(each.parent for each in place.glob("*/task.toml"))
    if not folders:
        raise DataError(f"{location}: is no task of Harbor and has none in it: no task.toml is there")
    for folder in folders:
        settings = importlib.import_module("tomllib").loads((folder / "task.toml").read_text(encoding="utf-8"))
        if not (folder / "tests/test.sh").is_file():
            raise DataError(f"{folder}: has no tests/test.sh, which scores it")
        text = (folder / "instruction.md").read_text(encoding="utf-8")
        task = {
            "folder": str(folder.resolve()),
            "timeout_s": float(settings.get("verifier", {}).get("timeout_sec", 600.0)),
            "memory_mb": int(settings.get("environment", {}).get("memory_mb", 2048)),
            **_built(folder / "environment"),
        }
        yield {"uid": folder.name, "prompt": [{"role": "user", "content": text}], COLUMN: task}


def _built(context: Path) -> dict[str, Any]:
    """Return what the Dockerfile says that needs no container: where the task is, what is copied there, and variables."""
    workdir, copies, variables = PurePosixPath("/app"), list[tuple[str, str]](), dict[str, str]()
    path = context / "Dockerfile"
    lines = path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines() if path.is_file() else []
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        if not word or word.startswith("#") or word.upper() in _NOT_BUILT:
            continue
        if word.upper() == "WORKDIR":
            workdir = workdir / rest.strip()
        elif word.upper() == "ENV":
            name, _, value = rest.strip().partition(" ")  # the older form: a name, and all that follows it
            given = shlex.split(rest) if "=" in name else [f"{name}={value.strip()}"]
            variables |= dict(each.split("=", 1) for each in given if "=" in each)
        elif word.upper() == "COPY" and not rest.startswith(("--", "[")):
            *sources, target = rest.split()
            is_folder = target.endswith(("/", ".")) or len(sources) > 1
            copies += [(each, f"{workdir / target}{'/' if is_folder else ''}") for each in sources]
        else:
            raise DataError(
                f"{path}: `{line.strip()[:80]}` needs a container; an agent that has one can play the task (docs/agents.md)"
            )
    for place in (str(workdir), *(target for _, target in copies)):
        if PurePosixPath(place).parts[1:2] == () or PurePosixPath(place).parts[1] in _OF_THE_SYSTEM:
            raise DataError(f"{path}: {place} is a place of the system, which a sandbox does not write; use /app")
    return {"workdir": str(workdir), "copies": copies, "variables": variables}


class HarborTask:
    """One task. The reward is the number that its tests write."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any], *, command_timeout_s: float = 30.0) -> None:
        """`command_timeout_s` is what one command of the model may take."""
        del env_config
        self._task: Mapping[str, Any] = extras[COLUMN]
        self._timeout_s = command_timeout_s
        self._metrics: dict[str, float] = {"commands": 0.0}
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for source, target in self._task["copies"]:
                found = Path(self._task["folder"], "environment", source)
                is_file_into = target.endswith("/") and found.is_file()
                tar.add(found, arcname=target.strip("/") + (f"/{found.name}" if is_file_into else ""))
        self._files = base64.b64encode(archive.getvalue()).decode()

    @staticmethod
    def violations(**_: Any) -> Iterator[Violation]:
        """Whether a sandbox can be made here."""
        yield from sandbox_violations("required", "environment.env_class=harbor")

    def tools(self) -> list[Any]:
        """What the model works with."""
        return [self.bash]

    def bash(self, command: str) -> str:
        """Runs a command in the task's folder. Files stay, processes end with it, and there is no network.

        Args:
            command: Lines for bash.
        """
        self._metrics["commands"] += 1
        said = self._run(command, self._timeout_s)
        self._files = said["archive"]
        ended = "" if said["status"] is not None else f"\n(ended after {self._timeout_s:g} s)"
        return f"{said['output']}{ended}" or f"(no output, status {said['status']})"

    def init(self, prompt: list[ChatMessage]) -> tuple[list[ChatMessage], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        """Run the tests. Raises ValueError where they write no reward."""
        del action
        tests = io.BytesIO()
        with tarfile.open(fileobj=tests, mode="w") as tar:
            tar.add(Path(self._task["folder"], "tests"), arcname="tests")
        more = base64.b64encode(tests.getvalue()).decode()
        said = self._run("bash /tests/test.sh", float(self._task["timeout_s"]), more=more)
        reward, others = _reward_of(said)
        self._metrics |= others
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}

    def close(self) -> None:
        """Nothing is held."""

    def get_metrics(self) -> dict[str, float]:
        return dict(self._metrics)

    def _run(self, command: str, within_s: float, *, more: str = "") -> dict[str, Any]:
        tops = dict.fromkeys(["tests", "logs", PurePosixPath(self._task["workdir"]).parts[1]])
        tops |= dict.fromkeys(PurePosixPath(target).parts[1] for _, target in self._task["copies"])
        settings = {
            "command": command.encode("utf-8", "replace").decode(),
            "within_s": within_s,
            "archives": [self._files, *([more] if more else [])],
            "tops": [*tops],
            "kept": [each for each in tops if each not in ("tests", "logs")],
            "places": ["logs/verifier", "logs/agent", self._task["workdir"].strip("/")],
            "workdir": self._task["workdir"].strip("/"),
            "variables": dict(self._task["variables"]),
            "told": [each.strip("/") for each in REWARDS],
            "shown": _SHOWN,
        }
        limits = Limits(timeout_s=within_s + _START_AND_END_S, memory_mb=int(self._task["memory_mb"]))
        ran = run("shell", settings, level="required", limits=limits, links=[*tops])
        if ran.status != 0:
            said = ran.errors.decode(errors="replace").strip()[-300:]
            raise ValueError(f"a command's sandbox did not end well, or has more than 3 MB of files: {said}")
        found: dict[str, Any] = json.loads(ran.output)
        return found


def _reward_of(said: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """Return the reward, and numbers that were written beside it. Raises ValueError."""
    of_json, of_text = (said["told"].get(each.strip("/")) for each in REWARDS)
    if of_json is None and of_text is None:
        raise ValueError(f"tests/test.sh wrote no reward: {said['output'][-300:]}")
    found = json.loads(of_json) if of_json is not None else {"reward": float(of_text)}
    numbers = {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}
    reward = numbers.pop("reward", None) if len(numbers) != 1 else numbers.popitem()[1]
    if reward is None or not math.isfinite(reward):
        raise ValueError(f"reward.json needs `reward`, or one number alone; it has {sorted(found)}")
    return reward, numbers
