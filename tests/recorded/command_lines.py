"""Wrong command lines, and what each of them prints: `command_lines.txt`.

    python -m tests.recorded.command_lines            what differs from the table; exit status 1 where something does
    python -m tests.recorded.command_lines --write    have the table say what is printed now, and show what changed

A command line is added as a line `$ python -m MODULE WORDS` without an answer, which `--write` fills in. Each is run in this
process by the function that the command calls, in a folder that has the files of `make_files`, on a machine without GPUs
and without a network. What would begin a run is an error here.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib.util
import io
import logging
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from unittest import mock

from skyrl_train.runs.cli import conf_dir
from skyrl_train.system.processes import STOP_SIGNALS
from tests.support.composing import presets_composed_once

TABLE = Path(__file__).with_name("command_lines.txt")
PROMPT, MARGIN = "$ python -m ", "  |"
STATUS = 2
"""The exit status of what the user can fix."""
ENVIRONMENT: Mapping[str, str] = {
    "COLUMNS": "100",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PATH": "/usr/bin:/bin",
}
"""All that a command sees of the environment, beside HOME, which is its folder."""
MAINS: Mapping[str, str] = {
    "skyrl_train.plan": "skyrl_train.runs.planning",
    "skyrl_train.view": "skyrl_train.view.__main__",
}
"""Where the function `main` of a package's command is, where that is not in the module that is typed."""
_COLLECTED_EACH = 20
"""Command lines between two collections of garbage, of which each leaves some six megabytes."""
CORES = 2
"""Of the pretended machine: defaults follow from them."""


@dataclass(frozen=True)
class Answer:
    """What a command line printed, and how it ended."""

    text: str
    """Standard output and errors in their order, with the test's folder as `{folder}` and that of the groups as `{conf}`."""
    status: int | str
    """The exit status, or what happened in its place."""


class _Accepted(BaseException):
    """The command line is one of a run. No `Exception`: Hydra would make an exit status of it."""


def read_table(text: str) -> list[tuple[str, str]]:
    """Return pairs of a command line and its answer. Lines that begin with # are headings."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$"):
            found.append((line, []))
        elif line.startswith(MARGIN):
            found[-1][1].append(line.removeprefix(MARGIN).removeprefix(" "))
    return [(command, "".join(f"{line}\n" for line in lines)) for command, lines in found]


def as_table(text: str, answers: Mapping[str, Answer]) -> str:
    """Return the table with these answers, headings and order as they are in `text`."""
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith(MARGIN):
            lines.append(line)
        if line.startswith("$"):
            lines += [f"{MARGIN} {each}".rstrip() for each in answers[line].text.splitlines()]
    return "".join(f"{line}\n" for line in lines)


def run_all(commands: Sequence[str], folder: Path, *, keeps_presets: bool = True) -> dict[str, Answer]:
    """Return the answer to each command line, all of them run in `folder`, which is empty before. `keeps_presets`: what
    Hydra composes of groups is kept from one to the next."""
    make_files(folder)
    answers: dict[str, Answer] = {}
    with _as_in_a_process(folder), presets_composed_once() if keeps_presets else nullcontext(), _rarely_collected():
        for index, command in enumerate(commands):
            if index % _COLLECTED_EACH == 0:
                gc.collect()
            answers[command] = run(command, folder)
    return answers


def run(command: str, folder: Path) -> Answer:
    """Run one command line, `$ python -m MODULE WORDS`, as that command does."""
    name, *words = shlex.split(command.removeprefix(PROMPT))
    module = importlib.import_module(MAINS.get(name, name))
    printed = io.StringIO()
    status: int | str = 0
    with (
        mock.patch.object(sys, "argv", [str(module.__file__), *words]),
        redirect_stdout(printed),
        redirect_stderr(printed),
    ):
        try:
            status = module.main() or 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else str(ended.code)
        except _Accepted:
            status = "accepted: choose another command line"
    text = printed.getvalue().replace(str(folder.resolve()), "{folder}").replace(str(conf_dir()), "{conf}")
    return Answer("".join(f"{line.rstrip()}\n" for line in text.splitlines()), status)


def make_files(folder: Path) -> None:
    """Write what the command lines name: data with mistakes, folders that are no models, code, and groups of settings."""
    files = {
        "rows.jsonl": '{"question": "2+2?", "answer": "4"}\n',
        "broken.jsonl": '{"question": "2+2?", "answer": "4"}\n{"question": \n',
        "list.jsonl": "[1, 2]\n",
        "no_prompt.jsonl": '{"text": "2+2?"}\n',
        "no_answer.jsonl": '{"prompt": "2+2?"}\n',
        "roles.jsonl": '{"prompt": [{"content": "2+2?"}], "answer": "4"}\n',
        "worded.jsonl": '{"prompt": "2+2?", "reward_spec": {"ground_truth": "four"}}\n',
        "empty.jsonl": "",
        "object.json": '{"a": 1}',
        "broken.json": "[{]",
        "broken.parquet": "no parquet",
        "latin.csv": b"question,answer\ncaf\xe9,4\n",
        "rows.txt": "2+2?\n",
        "model/README.md": "no model",
        "broken_model/config.json": "{",
        "broken.gguf": "GGUF",
        "run/run.log": "",
        "my_code.py": _CODE,
        "own/experiment/mine.yaml": "# @package _global_\nseed: 5\ntrainer: {total_stepps: 3}\n",
        "own/experiment/broken.yaml": "seed: [1\n",
        "own/experiment/typed.yaml": "# @package _global_\nseed: x\ntrainer: {epochs: 0}\n",
        "own/experiment/based.yaml": "# @package _global_\ndefaults:\n  - /algorithm: nowhere\nseed: 5\n",
    }
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


_CODE = '''
from skyrl_train.registry import reads

NUMBER = 3

class Nothing:
    pass

def score(completion, answer):
    return 0.0

def no_completion(text):
    return 0.0

def loss(inputs):
    return None

@reads("advantages", "ref_logprobs")
def of_reference(inputs, config):
    return None

def estimate(inputs, config, *, tau):
    return None

def no_hint(a):
    """Add.

    Args:
        a: a number.
    """
    return a
'''


@contextmanager
def _as_in_a_process(folder: Path) -> Iterator[None]:
    """Stand in `folder`, on the machine that `ENVIRONMENT` and `CORES` describe, and leave this process as it was."""
    import hydra

    resolvers, machine, command_line = (
        importlib.import_module(f"skyrl_train.runs.cli.{name}") for name in ("resolvers", "machine", "command_line")
    )
    models = importlib.import_module("skyrl_train.config.rules.validate_models")

    def refuse(node: object) -> NoReturn:
        raise _Accepted

    def find_spec(package: str) -> object:
        if package == "bitsandbytes":
            return None
        return package if package == "vllm" else importlib.util.find_spec(package)

    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    here, path, modules = os.getcwd(), [*sys.path], {*sys.modules}
    root, real = logging.getLogger(), hydra.main
    logged = (root.level, [*root.handlers])
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {**ENVIRONMENT, "HOME": str(folder)}, clear=True))
        stack.enter_context(mock.patch.object(resolvers, "usable_cores", return_value=CORES))
        # vLLM is there, as with its extra, and bitsandbytes is not.
        stack.enter_context(mock.patch.object(machine, "find_spec", find_spec))
        stack.enter_context(mock.patch.object(models, "find_spec", find_spec))
        stack.enter_context(mock.patch.object(hydra, "main", lambda **named: lambda task: real(**named)(refuse)))
        command_line.register_resolvers()
        # Once for all, as nothing that it registers changes.
        stack.enter_context(mock.patch.object(command_line, "register_resolvers"))
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)
            sys.path[:] = path
            for name in {*sys.modules} - modules:
                file = getattr(sys.modules[name], "__file__", None)
                if file and Path(file).is_relative_to(folder):
                    del sys.modules[name]
            for signum, handler in handlers.items():
                with suppress(TypeError, ValueError):  # of C, or not on the main thread
                    signal.signal(signum, handler)
            root.setLevel(logged[0])
            root.handlers[:] = logged[1]


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Have garbage collected where it is asked for, and past what was there before: a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def changes(before: str, after: str) -> list[str]:
    """Return the lines of a table that differ, each under its command line."""
    old, new = dict(read_table(before)), dict(read_table(after))
    lines: list[str] = []
    for command in [*new, *(each for each in old if each not in new)]:
        pair = [text.get(command, "").splitlines() for text in (old, new)]
        differing = [
            line for line in difflib.unified_diff(*pair, n=0, lineterm="") if line[:2] not in ("--", "++", "@@")
        ]
        lines += [command, *differing] if differing else []
    return lines


def main() -> int:
    """Compare the table with what is printed now, or write it; return the exit status."""
    parser = argparse.ArgumentParser(prog="tests.recorded.command_lines", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--write", action="store_true", help="have the table say what is printed now")
    options = parser.parse_args()
    before = TABLE.read_text(encoding="utf-8")
    commands = [command for command, _ in read_table(before)]
    with tempfile.TemporaryDirectory(prefix="command-lines-") as folder:
        answers = run_all(commands, Path(folder))
    wrong = [f"{command}\n{MARGIN} {each.status}" for command, each in answers.items() if each.status != STATUS]
    after = as_table(before, answers)
    found = changes(before, after)
    sys.stdout.write("".join(f"{line}\n" for line in [*found, *wrong]))
    changed = sum(line.startswith("$") for line in found)
    sys.stdout.write(f"{len(commands)} command lines, {changed} of them answered otherwise than before\n")
    if options.write and not wrong:
        TABLE.write_text(after, encoding="utf-8")
        return 0
    return 1 if found or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
