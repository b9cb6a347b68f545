"""`skyrl-train --from trl config.yaml`: the command line here that is equal to a configuration of another trainer.

Nothing is guessed: what this project would refuse, what needs a person and what has no equal is listed. The command is for a
shell; all else stands below it, as comments.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from skyrl_train.config import Config, RunConfig, SFTConfig
from skyrl_train.config.fields import TRAINERS
from skyrl_train.errors import ConfigError, SkyrlTrainError, Violation
from skyrl_train.runs.cli import from_trl
from skyrl_train.runs.cli.composition import as_override
from skyrl_train.runs.cli.foreign_files import Given, read_settings
from skyrl_train.runs.cli.foreign_names import Converter, Migration, text_of
from skyrl_train.runs.cli.from_verl import convert_skyrl, convert_verl

FLAG = "--from"
_USAGE = "skyrl-train --from trl|verl|skyrl FILE [--gpus N] [--preset]"
_FROM = ("trl", "verl", "skyrl")


def migrate(given: Given, trainer: str, *, schema: type[RunConfig] = Config, gpus: int = 0) -> Migration:
    """Return our settings that are equal to `given`, those of `trainer`: a key of `TRAINERS`.

    Args:
        schema: Config for reinforcement learning, SFTConfig for supervised training.
        gpus: Processes that theirs runs in where the file does not say; 0 is one, and no platform is stated.
    """
    to = Converter(given, trainer, schema, gpus)
    if schema is not Config:
        from_trl.convert_supervised(to)
    else:
        {"trl": from_trl.convert, "verl": convert_verl, "skyrl": convert_skyrl}[trainer](to)
    to.rest()
    return to.found


# What is printed


def command_of(found: Migration, *, program: str) -> str:
    """The command line in lines that a shell reads as one."""
    words = [as_override(name, value) for name, value in sorted(found.settings.items(), key=_order)]
    return " \\\n    ".join([program, *map(shlex.quote, map(_bare, words))])


def _bare(word: str) -> str:
    """Without the quotes of texts that Hydra reads as text in any case."""
    return re.sub(r"'([A-Za-z_/][\w./:@-]*)'", r"\1", word)


def preset_of(found: Migration) -> str:
    """The same as an experiment's file."""
    groups = {name: value for name, value in sorted(found.settings.items()) if _is_group(name)}
    tree: dict[str, Any] = {}
    for name, value in found.settings.items():
        if name not in groups:
            *above, last = name.split(".")
            level = tree
            for part in above:
                level = level.setdefault(part, {})
            level[last] = value
    head = "# @package _global_\n"
    if groups:
        words = " ".join(_bare(as_override(name, value)) for name, value in groups.items())
        head += f"# Groups are chosen on the command line: {words}\n"
    return head + yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=110)


def _is_group(name: str) -> bool:
    return name in ("platform", "generator", "tracker", "strategy", "algorithm")


def _order(item: tuple[str, Any]) -> tuple[int, str]:
    return (0 if _is_group(item[0]) else 1, item[0])


def report_of(found: Migration, trainer: str) -> str:
    """What a person has to know beside the command, as comments of a shell."""
    name, lines = TRAINERS[trainer], []
    parts: list[tuple[str, Mapping[str, Any]]] = [
        ("To be decided by hand", found.by_hand),
        ("Computed by a program, so unknown here", found.unknown),
        ("No equal here", {each: text_of(value) for each, value in found.no_equal.items()}),
        ("Not needed here", found.not_needed),
    ]
    if found.assumed:
        lines.append(f"# Not in the file, but what {name} would take: {', '.join(sorted({*found.assumed}))}")
    for title, listed in parts:
        if listed:
            lines += [f"# {title}:", *(f"#   {each}: {_line(said)}" for each, said in sorted(listed.items()))]
    return "\n".join(lines)


def _line(said: Any) -> str:
    return " ".join(str(said).split())[:240]


def main(argv: Sequence[str], *, config_name: str) -> int:
    """Answer `--from TRAINER FILE`; return the exit status: 2 where the arguments or the file are wrong."""
    schema, program = (SFTConfig, "skyrl-sft") if config_name == "sft" else (Config, "skyrl-train")
    try:
        trainer, path, gpus, preset = _parsed(argv)
        if schema is SFTConfig and trainer != "trl":
            rule, remedy = "is read as reinforcement learning alone", f"write {_USAGE}"
            raise ConfigError([Violation.of(FLAG, trainer, rule, remedy)])
        given = read_settings(path, kind="sft" if schema is SFTConfig else "rl")
        found = migrate(given, trainer, schema=schema, gpus=gpus)
    except SkyrlTrainError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    text = preset_of(found) if preset else command_of(found, program=program) + "\n"
    sys.stdout.write("\n".join(filter(None, [text.rstrip("\n"), report_of(found, trainer)])) + "\n")
    return 0


def _parsed(argv: Sequence[str]) -> tuple[str, Path, int, bool]:
    rest = [*argv]
    at = rest.index(FLAG)
    words = rest[at + 1 : at + 3]
    others = rest[:at] + rest[at + 3 :]
    preset = "--preset" in others
    others = [each for each in others if each != "--preset"]
    gpus = 0
    if "--gpus" in others:
        index = others.index("--gpus")
        stated = "".join(others[index + 1 : index + 2])
        if not stated.isdecimal() or int(stated) < 1:
            raise ConfigError([Violation.of("--gpus", stated, "must be a number of devices", f"write {_USAGE}")])
        gpus = int(stated)
        others = others[:index] + others[index + 2 :]
    if len(words) < 2 or words[0] not in _FROM or others:
        value = " ".join(argv)
        raise ConfigError(
            [Violation.of(FLAG, value, "takes a trainer and a file, and nothing else", f"write {_USAGE}")]
        )
    return words[0], Path(words[1]), gpus, preset
