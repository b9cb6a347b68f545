"""skyrl-gym's environments that run what the model wrote, with that in a sandbox (`sandbox.py`).

searchcode   the Python tool runs in a sandbox
text2sql     queries run in a sandbox that reads the database and cannot write it
lcb          tests run in the program's own interpreter, which no sandbox mends: refused where one is required
"""

from __future__ import annotations

import importlib
import json
import sqlite3
import time
from collections.abc import Callable
from typing import Any

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.environment import MODEL_CODE, runs_model_code
from skyrl_train.errors import Violation
from skyrl_train.registry import part_name
from skyrl_train.system.sandbox import Level, Limits, SandboxUnavailable, missing, run, violations as sandbox_violations

_MEMORY_MB = 1024
_OF_LCB = "has its tests run in the program's own interpreter, where no sandbox keeps them apart"
_QUERIES_WITHIN_S = {"skyrl_gym.tools.sql": 5.0, "skyrl_gym.envs.sql.utils": 30.0}
"""Where skyrl-gym runs queries, and when it interrupts one."""


def violations(environment: EnvironmentConfig) -> list[Violation]:
    """Return why the configured environment cannot run the model's code as `environment.sandbox` says."""
    name, level = part_name(environment.env_class or "").partition("(")[0], environment.sandbox
    if name == "lcb" and level == "required":
        remedy = (
            "score with environment.reward=code, or set environment.sandbox=off where you trust the model's programs"
        )
        return [Violation.of("environment.sandbox", level, f"cannot be kept by lcb, which {_OF_LCB}", remedy)]
    return sandbox_violations(level, f"environment.env_class={name}") if name in MODEL_CODE else []


def sandbox_lines(environment: EnvironmentConfig) -> list[str]:
    """Return what the model's code is kept in and what that lacks on this machine, where some is run."""
    if not runs_model_code(environment):
        return []
    if part_name(environment.env_class or "").partition("(")[0] == "lcb":
        return [f"{environment.sandbox}, but none for lcb, which {_OF_LCB}"]
    lacks = "" if environment.sandbox == "required" else missing(environment.sandbox)
    return [f"{environment.sandbox}, which lacks here: {lacks}" if lacks else f"{environment.sandbox}: namespaces"]


def in_sandbox(environment: Any, name: str, level: Level) -> Any:
    """Return an environment of skyrl-gym's that runs the model's code in a sandbox of that level.

    Raises SandboxUnavailable where that cannot be.
    """
    if name == "lcb" and level == "required":
        raise SandboxUnavailable(f"lcb {_OF_LCB}")
    if name == "searchcode":
        for group in environment.tool_groups:
            if "python" in group.get_tool_names():
                group._tool_registry["python"] = _Python(level, group.timeout)
    if name == "text2sql":
        for module, within_s in _QUERIES_WITHIN_S.items():
            importlib.import_module(module).sqlite3 = _Sqlite(level, within_s)  # type: ignore[attr-defined]
        environment.step = _failing_with_its_sandbox(environment.step)
    return environment


_last_refusal: tuple[float, OSError] | None = None
"""When a sandbox last could not be started for a query here, and why: skyrl-gym turns whatever a query raises into a wrong
answer, whose reward is 0."""


def _failing_with_its_sandbox(step: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return `step`, which raises OSError where a sandbox could not be started meanwhile."""

    def checked(action: str) -> Any:
        began = time.monotonic()
        answer = step(action)
        if _last_refusal is not None and _last_refusal[0] >= began:
            raise _last_refusal[1]
        return answer

    return checked


class _Python:
    """In place of the tool `python`, with its words."""

    def __init__(self, level: Level, timeout_s: float) -> None:
        self._level, self._timeout_s = level, timeout_s

    def __call__(self, code: str) -> str:
        limits = Limits(timeout_s=self._timeout_s, memory_mb=_MEMORY_MB)
        clean = code.encode("utf-8", "replace").decode()
        ran = run("script", {"code": clean}, level=self._level, limits=limits)
        if ran.status is None:
            return f"Error executing Python code: Execution timed out after {self._timeout_s} seconds."
        if errors := ran.errors.decode(errors="replace").strip():
            return f"Error executing Python code: {errors}"
        return ran.output.decode(errors="replace").strip()


class _Sqlite:
    """In place of the module `sqlite3`, as far as skyrl-gym uses it: each query is a process of its own, and nothing that it
    writes stays."""

    def __init__(self, level: Level, within_s: float) -> None:
        self._level, self._within_s = level, within_s

    def connect(self, database: str, **_: Any) -> _Connection:
        return _Connection(self._level, self._within_s, database)


class _Connection:
    def __init__(self, level: Level, within_s: float, database: str) -> None:
        self._level, self._within_s, self._database = level, within_s, database
        self._rows: list[tuple[Any, ...]] = []

    def cursor(self) -> _Connection:
        return self

    def execute(self, query: str) -> None:
        """Raises sqlite3.OperationalError as the database says, and where the query takes too long."""
        if query == "BEGIN TRANSACTION;":
            return
        clean = {"database": self._database, "query": query.encode("utf-8", "replace").decode()}
        limits = Limits(timeout_s=self._within_s, memory_mb=_MEMORY_MB)
        try:
            ran = run("sql", clean, level=self._level, limits=limits, reads=[self._database])
        except OSError as error:
            global _last_refusal
            _last_refusal = (time.monotonic(), error)
            raise
        if ran.status != 0:
            raise sqlite3.OperationalError("interrupted")
        kind, said = json.loads(ran.output)
        if kind == "error":
            raise sqlite3.OperationalError(said)
        self._rows = [
            tuple(bytes.fromhex(value[1]) if isinstance(value, list) else value for value in row) for row in said
        ]

    def fetchall(self) -> list[tuple[Any, ...]]:
        return self._rows

    def rollback(self) -> None:
        """Nothing was written."""

    def close(self) -> None:
        """Nothing is held."""

    def interrupt(self) -> None:
        """The query ends by its own deadline."""
