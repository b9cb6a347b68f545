"""Whether every extra of pyproject.toml can be installed: alone, beside the CPU build of vLLM, and beside vLLM for GPUs.

    python scripts/check_extras.py                     every extra, a line for each pair
    python scripts/check_extras.py mcp quantization    these

pip resolves, with the package index that it is set up with, and installs nothing. First the project alone, with `cpu`, and
with `vllm`; then each extra among the versions found there, which takes seconds; where none fits, from nothing; then all of
them at once, as `uv lock` does. A pair that cannot be resolved must stand in `tool.uv` `conflicts` of pyproject.toml, and
one of an extra and an engine that stands there must not be resolvable. Exits with 1 where that is not so, and with 75 where
the index cannot be reached.

It needs pip 23.3 or later, which reads what a package requires without fetching all of it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ENGINES = ("", "cpu", "vllm")
"""Extras that each other one may be installed beside; the first is none."""
NOT_FOR_USERS = ("dev", "bench", "docs")
UNREACHABLE = 75
OLDEST_PIP = (23, 3)
"""Older ones download whole packages in order to resolve: gigabytes of CUDA."""


@dataclass(frozen=True, kw_only=True)
class Extras:
    """What pyproject.toml says."""

    core: Sequence[str]
    extras: Mapping[str, Sequence[str]]
    conflicts: frozenset[frozenset[str]]

    @classmethod
    def of(cls, pyproject: Mapping[str, Any]) -> Extras:
        """Of a parsed pyproject.toml."""
        pairs = pyproject.get("tool", {}).get("uv", {}).get("conflicts", [])
        return cls(
            core=pyproject["project"]["dependencies"],
            extras=pyproject["project"].get("optional-dependencies", {}),
            conflicts=frozenset(frozenset(each["extra"] for each in pair) for pair in pairs),
        )


@dataclass(kw_only=True)
class Resolver:
    """pip, asked and not obeyed."""

    arguments: Sequence[str] = ()
    """E.g. `--no-index --find-links FOLDER`."""
    timeout_s: float = 1800.0
    said: str = field(default="", init=False)
    """What pip last printed."""

    def versions(
        self, requirements: Sequence[str], constraints: Mapping[str, str] | None = None
    ) -> dict[str, str] | None:
        """Name to version of all that would be installed; None where nothing satisfies all requirements."""
        with tempfile.TemporaryDirectory() as place:
            report, limits = Path(place) / "report.json", Path(place) / "constraints.txt"
            limits.write_text("".join(f"{name}=={version}\n" for name, version in (constraints or {}).items()))
            command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
            command += ["--report", str(report), "--constraint", str(limits), *self.arguments, *requirements]
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout_s, check=False)
            self.said = done.stdout + done.stderr
            if done.returncode:
                return None
            found = json.loads(report.read_text(encoding="utf-8"))["install"]
            return {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in found}


def check(extras: Extras, names: Sequence[str], resolver: Resolver) -> list[str]:
    """Prints a line for each pair and returns what is wrong."""
    wrong: list[str] = []
    for engine in ENGINES:
        base = [*extras.core, *extras.extras.get(engine, ())]
        versions = resolver.versions(base)
        if versions is None:
            wrong.append(f"{engine or 'the project alone'} cannot be resolved: {_reason(resolver.said)}")
            continue
        print(f"{engine or 'alone':8} {len(versions)} packages", flush=True)
        for name in names:
            if name == engine:
                continue
            found = resolver.versions(extras.extras[name], versions) or resolver.versions([*base, *extras.extras[name]])
            declared = frozenset((name, engine)) in extras.conflicts
            reason = "" if found else _reason(resolver.said)
            moved = {each: new for each, new in (found or {}).items() if versions.get(each, new) != new}
            told = f"conflict: {reason}" if reason else f"moves {moved}" if moved else "fits"
            print(f"{engine or 'alone':8} {name:14} {told}", flush=True)
            if reason and not declared:
                wrong.append(
                    f"{name} beside {engine or 'nothing'}: {reason}. State it in tool.uv conflicts, or change its pin"
                )
            if declared and not reason:
                wrong.append(f"{name} beside {engine} can be resolved: take the pair out of tool.uv conflicts")
        wrong += _at_once(extras, engine, names, resolver)
    return wrong


def _at_once(extras: Extras, engine: str, names: Sequence[str], resolver: Resolver) -> list[str]:
    """What is wrong with all extras together, but for those that are stated to conflict with the engine or one before."""
    chosen: list[str] = [engine] if engine else []
    for name in names:
        if name not in chosen and not any(frozenset((name, each)) in extras.conflicts for each in chosen):
            chosen.append(name)
    requirements = [*extras.core, *(each for name in chosen for each in extras.extras[name])]
    reason = "" if resolver.versions(requirements) else _reason(resolver.said)
    print(f"{engine or 'alone':8} {'all at once':14} {f'conflict: {reason}' if reason else 'fits'}", flush=True)
    if not reason:
        return []
    return [f"{', '.join(chosen)} at once: {reason}. State the pair in tool.uv conflicts, or change a pin"]


def _reason(said: str) -> str:
    """The lines of pip's that say which requirements exclude each other."""
    lines = [line.strip() for line in said.splitlines() if "depends on" in line or line.startswith("ERROR")]
    return "; ".join(lines[:4]) or "unknown"


def _pip_version() -> tuple[int, ...]:
    """Its first two numbers; (0, 0) where there is none, as in an environment of uv's."""
    try:
        major, minor = re.findall(r"\d+", metadata.version("pip"))[:2]
    except metadata.PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


def main(names: Sequence[str]) -> int:
    """Check the extras of these names, or all for users."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        sys.stderr.write("Python 3.11 or later is needed here\n")
        return UNREACHABLE
    extras = Extras.of(tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")))
    if unknown := [name for name in names if name not in extras.extras]:
        sys.stderr.write(f"no extra {', '.join(unknown)}; there are {', '.join(extras.extras)}\n")
        return 2
    resolver = Resolver()
    if (found := _pip_version()) < OLDEST_PIP:
        has = f"pip {found[0]}.{found[1]}" if any(found) else "no pip"
        sys.stderr.write(f"{sys.executable} has {has} and needs 23.3 or later: pip install --upgrade pip\n")
        return 2
    if resolver.versions(["pip"]) is None:
        sys.stderr.write(f"the package index cannot be reached: {resolver.said.strip().splitlines()[-1:]}\n")
        return UNREACHABLE
    chosen = names or [name for name in extras.extras if name not in (*NOT_FOR_USERS, *ENGINES)]
    wrong = check(extras, chosen, resolver)
    sys.stderr.write("".join(f"{line}\n" for line in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
