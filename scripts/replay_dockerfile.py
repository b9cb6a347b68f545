"""Replays the steps of a Dockerfile in a scratch folder, without root and without an engine for images.

    python scripts/replay_dockerfile.py docker/Dockerfile.cpu --python /usr/bin/python3.11
    python scripts/replay_dockerfile.py docker/Dockerfile --resolve-only        # what pip would install, not installed

RUN lines are executed piece by piece (`a && b`), with the image's folders below the scratch folder, its ENV and an empty
HOME. The base image is not fetched: `python3` is the one that is named. Stages follow one another in the same scratch
folder, as they stand in the file. A piece that needs root is not run, and said so; a step that fails ends the replay, as
it would end a build. At the end the entry point runs with what follows `--`, or
with the image's CMD. Exit status 0 where everything that was run succeeded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDS_ROOT = frozenset({"apt-get", "useradd", "groupadd", "chown"})
IMAGE_FOLDERS = ("/app", "/outputs")
TIMEOUT_S = 3600.0
_INSTRUCTION = re.compile(r"([A-Za-z]+)\s+(.*)", re.DOTALL)
_ASKED_FOR = ("PIP_", "UV_", "SSL_CERT_FILE", "http_proxy", "https_proxy", "no_proxy")
"""Variables of this machine that the replay keeps: how packages are reached."""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of a Dockerfile, its continued lines joined."""

    name: str
    """In capitals."""
    text: str
    line: int
    """Where it begins, from 1."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What became of a piece of an instruction."""

    text: str
    outcome: str
    """`ok`, `failed`, or why it was not run."""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.outcome == "failed"


def parse(text: str) -> list[Instruction]:
    """Instructions in order. Raises ValueError at a line that is none."""
    found: list[Instruction] = []
    pending: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not pending:
            first = number
        pending.append(line.rstrip().removesuffix("\\").strip())
        if line.rstrip().endswith("\\"):
            continue
        joined = " ".join(part for part in pending if part)
        pending = []
        match = _INSTRUCTION.fullmatch(joined)
        if match is None:
            raise ValueError(f"line {first}: not an instruction: {joined!r}")
        found.append(Instruction(name=match[1].upper(), text=match[2], line=first))
    if pending:
        raise ValueError(f"line {first}: the file ends inside an instruction")
    return found


def pieces(command: str) -> list[str]:
    """The commands that `&&` joins. A `&&` inside quotes joins nothing."""
    lexer = shlex.shlex(command, posix=False, punctuation_chars="&")
    lexer.whitespace_split = True
    lexer.commenters = ""
    found: list[list[str]] = [[]]
    for token in lexer:
        if token == "&&":
            found.append([])
        else:
            found[-1].append(token)
    return [" ".join(words) for words in found]


def needs_root(piece: str) -> bool:
    """Whether only root, or the image's own file system, can do it."""
    words = shlex.split(piece)
    return words[0] in NEEDS_ROOT or (words[0] == "rm" and any(word.startswith("/var/") for word in words))


def expanded(value: str, environment: Mapping[str, str]) -> str:
    """`$NAME` and `${NAME}` replaced."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: environment.get(match[1] or match[2], ""), value)


class Replay:
    """The steps of one Dockerfile below `scratch`."""

    def __init__(self, scratch: Path, *, python: str, context: Path, resolve_only: bool) -> None:
        """`context` is what COPY copies from; with `resolve_only` pip resolves the project's packages and installs
        none."""
        self.scratch, self.context, self.resolve_only = scratch, context, resolve_only
        self.steps: list[Step] = []
        home, programs = scratch / "home", scratch / "bin"
        home.mkdir()
        programs.mkdir()
        for name in ("python3", "python"):
            (programs / name).symlink_to(python)
        self.environment = {
            **{name: value for name, value in os.environ.items() if name.startswith(_ASKED_FOR)},
            "HOME": str(home),
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
        }
        self.folder = scratch
        self.entry: list[str] = []
        self.command: list[str] = []

    def run(self, instructions: Sequence[Instruction]) -> bool:
        """Whether all that was run succeeded."""
        return all(self._apply(instruction) for instruction in instructions)

    def run_entry(self, arguments: Sequence[str]) -> bool:
        """The image's entry point with `arguments`, or with its CMD."""
        return self._execute(shlex.join([*self.entry, *(arguments or self.command)]))

    def _apply(self, instruction: Instruction) -> bool:
        text = instruction.text
        if instruction.name == "RUN":
            return all(self._run_piece(piece) for piece in pieces(text))
        if instruction.name == "ENV":
            for assignment in shlex.split(text):
                name, _, value = assignment.partition("=")
                self.environment[name] = self._inside(expanded(value, self.environment))
        elif instruction.name == "WORKDIR":
            self.folder = Path(self._inside(text))
            self.folder.mkdir(parents=True, exist_ok=True)
        elif instruction.name == "COPY":
            return self._copy(text)
        elif instruction.name == "ENTRYPOINT":
            self.entry = json.loads(text)
        elif instruction.name == "CMD":
            self.command = json.loads(text)
        else:
            self._note(Step(text=f"{instruction.name} {text}", outcome="not run: part of the image alone"))
        return True

    def _run_piece(self, piece: str) -> bool:
        if needs_root(piece):
            self._note(Step(text=piece, outcome="not run: needs root"))
            return True
        if self.resolve_only and "pip install" in piece and "--no-build-isolation" not in piece:
            return self._execute(piece.replace("pip install", "pip install --dry-run --quiet"))
        if self.resolve_only and not piece.startswith(("python3 -m venv", "mkdir")):
            self._note(Step(text=piece, outcome="not run: nothing was installed"))
            return True
        return self._execute(piece)

    def _copy(self, text: str) -> bool:
        """`COPY FILE /file`, `COPY . /folder` and `COPY --from=STAGE /file /file`. Of a folder what version control knows
        of it, so that neither outputs nor caches come along."""
        words = [word for word in text.split() if not word.startswith("--")]
        source, into = words[0], Path(self._inside(words[1]))
        other_stage = any(word.startswith("--from=") for word in text.split())
        if other_stage and self.resolve_only:
            self._note(Step(text=f"COPY {text}", outcome="not run: nothing was installed"))
            return True
        if other_stage or (self.context / source).is_file():
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self._inside(source) if other_stage else self.context / source, into)
        else:
            self._copy_folder(source, into)
        self._note(Step(text=f"COPY {text}", outcome="ok"))
        return True

    def _copy_folder(self, source: str, into: Path) -> None:
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", source]
        files = subprocess.run(listed, cwd=self.context, capture_output=True, check=True).stdout
        into.mkdir(parents=True, exist_ok=True)
        packed = subprocess.run(
            ["tar", "--null", "--files-from=-", "--ignore-failed-read", "-cf", "-"],
            cwd=self.context,
            input=files,
            capture_output=True,
            check=False,
        )
        subprocess.run(["tar", "-xf", "-"], cwd=into, input=packed.stdout, check=True)

    def _execute(self, piece: str) -> bool:
        started = time.monotonic()
        finished = subprocess.run(
            ["sh", "-c", self._inside(piece)],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        outcome = "failed" if finished.returncode else "ok"
        self._note(Step(text=piece, outcome=outcome, seconds=time.monotonic() - started))
        if finished.returncode:
            print(finished.stdout[-4000:])
        return finished.returncode == 0

    def _inside(self, text: str) -> str:
        """The image's folders, below the scratch folder."""
        names = "|".join(map(re.escape, IMAGE_FOLDERS))
        return re.sub(rf"(?<![\w./-])({names})(?=/|\W|$)", lambda match: f"{self.scratch}{match[1]}", text)

    def _note(self, step: Step) -> None:
        self.steps.append(step)
        print(f"| `{step.text}` | {step.outcome} | {step.seconds:.1f} |", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--python", default=sys.executable, help="stands for the base image's python3")
    parser.add_argument(
        "--resolve-only", action="store_true", help="let pip resolve and install nothing; no entry point"
    )
    parser.add_argument("arguments", nargs="*", help="for the entry point")
    args = parser.parse_args(argv)
    instructions = parse(args.dockerfile.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="replay-dockerfile-") as scratch:
        replay = Replay(Path(scratch), python=args.python, context=ROOT, resolve_only=args.resolve_only)
        print(f"{args.dockerfile}: python3 is {args.python}\n\n| step | outcome | seconds |\n|---|---|---|", flush=True)
        succeeded = replay.run(instructions) and (args.resolve_only or replay.run_entry(args.arguments))
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
