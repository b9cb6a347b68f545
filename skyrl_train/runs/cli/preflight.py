"""Everything that is wrong with a command line, found before Hydra takes over and before torch is imported.

Hydra stops at the first key that it does not know, and knows nothing of types. `preflight` therefore composes the same
command line first, collects all problems (malformed arguments, unknown keys and choices, refused values, rules between
fields) and prints them at once. A command line without problems goes to Hydra untouched.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import hydra
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.version import setbase
from omegaconf import DictConfig

from skyrl_train.config import AnyConfig
from skyrl_train.config.door import for_hydra
from skyrl_train.config.fields import meant_by, walk
from skyrl_train.config.rules import near_path
from skyrl_train.errors import ConfigError, SkyrlTrainError, Violation
from skyrl_train.runs.cli.command_line import RL_ROOT, CommandLine, Root, root_of
from skyrl_train.runs.cli.composition import Composer, as_in_a_run, as_override, load_node
from skyrl_train.runs.cli.hydra_files import with_arguments_of_run
from skyrl_train.runs.cli.resolvers import HYDRA_VERSION_BASE, conf_dir, name_another_run, register_resolvers
from skyrl_train.system import DISTRIBUTION, find_modules_here
from skyrl_train.telemetry.logs import console_streams, learn_arguments, redact_text

LOOK = "--look"
"""The flag of a command that takes the first look at a run and ends."""
_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "output_dir")


def start(
    task: Callable[[DictConfig], object],
    *,
    config_name: str,
    trains: bool = True,
    look: Callable[[DictConfig], object] | None = None,
) -> None:
    """Runs `task` under Hydra on the root config `config_name`, with the arguments of this process.

    Hydra names the job after the module of `task`; the command that resumes a run does too. What `task` returns is what a
    sweeper compares. Raises SystemExit(2) for problems with the arguments, before torch is imported. `trains`:
    whether models are trained, so that room for that is needed. `look` takes the place of `task` with `--look`, in a folder
    that is gone afterwards.
    """
    find_modules_here()
    register_resolvers()
    if "--version" in sys.argv[1:]:
        ours = version(DISTRIBUTION)
        sys.stdout.write(f"skyrl_train {ours} (Hydra {hydra.__version__}, Python {platform.python_version()})\n")
        return
    with console_streams(), ExitStack() as stack:
        looks = look is not None and LOOK in sys.argv
        if look is not None and looks:
            sys.argv.remove(LOOK)
            task = look
        if trains and not sys.argv[1:]:
            sys.stderr.write(_no_experiment(config_name))
            raise SystemExit(2)
        if not trains:
            sys.argv[1:] = with_arguments_of_run(sys.argv[1:])
        sys.argv[1:] = for_hydra(sys.argv[1:])
        preflight(sys.argv[1:], config_name=config_name, trains=trains)
        if looks:
            folder = stack.enter_context(TemporaryDirectory(prefix="skyrl_train_look_"))
            behind = max((index for index, text in enumerate(sys.argv) if "=" in text), default=len(sys.argv) - 1) + 1
            sys.argv[behind:behind] = [as_override(name, folder) for name in _FOLDERS]
        hydra.main(version_base=HYDRA_VERSION_BASE, config_path=str(conf_dir()), config_name=config_name)(task)()


def _no_experiment(config_name: str) -> str:
    """What a command without arguments is answered: the defaults are for a large model, and the bundled one would learn
    nothing from them."""
    supervised = config_name != "config"
    names = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))
    commands = [f"  {_program()} +experiment={name}\n" for name in names if name.startswith("sft") == supervised]
    return f"Nothing was named to train. Begin with an experiment, and override what differs:\n{''.join(commands)}"


def _program() -> str:
    """The command as it was typed."""
    name = Path(sys.argv[0])
    return name.name if name.suffix != ".py" else f"python -m skyrl_train.{name.stem}"


def preflight(argv: list[str], *, config_name: str, rules: bool = True, trains: bool = True) -> None:
    """Check the arguments of an entry point whose root config is `config_name`.

    Prints every problem to stderr and raises SystemExit(2); returns where there is none, or where the arguments ask for
    something that Hydra answers by itself, such as `--help`.

    Args:
        argv: the arguments without the program's name (`sys.argv[1:]`).
        rules: False checks names and types only: rules between fields, and whether data and model are there, are left
            to the caller (a plan for another machine).
        trains: False where models only generate.
    """
    learn_arguments(argv, os.environ)
    try:
        root = replace(root_of(config_name), trains=trains)
        flags = parse_flags(argv, root)
        if flags is None:
            return
        check(flags, config_name=flags.config_name or config_name, rules=rules, root=root)
    except (SkyrlTrainError, HydraException) as error:
        sys.stderr.write(f"{redact_text(str(error))}\n")
        raise SystemExit(2) from None


def check(flags: argparse.Namespace, *, config_name: str, rules: bool, root: Root = RL_ROOT) -> None:
    """Raises ConfigError with all problems of the parsed arguments."""
    register_resolvers()
    with config_loader(flags.config_dir) as loader:
        search_path = [text for text in flags.overrides if text.lstrip("+~").startswith("hydra.searchpath=")]
        composer = Composer(loader, config_name, search_path)
        line = CommandLine(composer, multirun=flags.multirun, rules=rules, root=root)
        names_only = flags.cfg is not None or flags.info is not None
        violations = [*_folder_violations(flags.config_dir), *line.violations(flags.overrides, names_only=names_only)]
    for note in line.notes:
        sys.stderr.write(f"note: {redact_text(note)}\n")
    if violations:
        raise ConfigError(violations)


def checked_config(arguments: Sequence[str], *, config_name: str, trains: bool = True) -> AnyConfig:
    """Return the configuration that the command line of an entry point would run with, for runs that Python starts.

    Raises ConfigError with all problems of the arguments.
    """
    learn_arguments(arguments, os.environ)
    arguments = for_hydra(arguments)
    flags = argparse.Namespace(config_dir=None, overrides=list(arguments), multirun=False, cfg=None, info=None)
    root = replace(root_of(config_name), trains=trains)
    name_another_run()
    check(flags, config_name=config_name, rules=True, root=root)
    with config_loader(None) as loader:
        composer = Composer(loader, config_name, [])
        config = composer.attempt([override for text in arguments for override in composer.parse(text)])
        assert isinstance(config, DictConfig), "it was checked"
        with as_in_a_run(config, 0, multirun=False):
            return load_node(config, root.schema)


def _folder_violations(config_dir: str | None) -> Iterator[Violation]:
    if config_dir is not None and not Path(config_dir).is_dir():  # without one, Hydra's own message names its flag
        yield Violation.of("--config-dir", config_dir, "must be an existing folder", near_path(config_dir))


def parse_flags(argv: Sequence[str], root: Root = RL_ROOT) -> argparse.Namespace | None:
    """Hydra's flags; None where Hydra should answer by itself: help, a malformed flag, another `--config-path`.

    Raises ConfigError where something is no flag, or flags split the overrides, which Hydra would call unrecognized.
    """
    if {"--version", "--help", "-h", "--hydra-help", "--shell-completion", "-sc"} & set(argv):
        return None
    parser = get_args_parser()
    parser.exit_on_error = False
    parser.allow_abbrev = False  # `--experiment NAME` would be taken for `--experimental-rerun FILE`
    try:
        flags, unknown = parser.parse_known_args(list(argv))
    except (argparse.ArgumentError, SystemExit):
        return None
    if flags.experimental_rerun:
        unknown = ["--experimental-rerun"]
    if refused := [argument for argument in unknown if argument.startswith("-")]:
        raise ConfigError([_no_flag(argument, following=_after(argument, argv), root=root) for argument in refused])
    if unknown:
        rule, remedy = "must stand together", "put flags such as -m before or after all of KEY=VALUE"
        raise ConfigError([Violation(field="arguments", rule=rule, value=repr(" ".join(argv)), remedy=remedy)])
    return None if flags.config_path else flags


def _no_flag(argument: str, *, following: str, root: Root) -> Violation:
    name, _, value = argument.lstrip("-").partition("=")
    name, value = name.replace("-", "_"), value or following or "VALUE"
    fields = {field.path for field in walk(root.schema)}
    known = name in fields or (conf_dir() / name).is_dir()
    meant, convert = (name, "") if known else meant_by(name, root.schema)
    if name == "experiment":
        meant = f"+{name}"
    if name == "model" and not (conf_dir() / "model" / f"{value}.yaml").exists():
        meant = "model.path"
    written = meant if "=" in meant else f"{meant}={value}"
    remedy = f"settings and groups have no dashes: write {written}. {convert}".rstrip(". ")
    if not meant:
        remedy = "settings and groups have no dashes, and none has that name: docs/configuration.md lists all settings"
        remedy = convert or remedy
    if name == "experimental_rerun":  # which would unpickle the file
        remedy = "run the command again that trainer.resume_mode=latest goes on from"
    return Violation.of(argument.partition("=")[0], argument, "is not a flag", remedy)


def _after(argument: str, argv: Sequence[str]) -> str:
    """The value that stands behind a flag; empty where none does."""
    rest = [*argv[argv.index(argument) + 1 :], ""] if argument in argv else [""]
    return "" if rest[0].startswith("-") or "=" in rest[0] else rest[0]


@contextmanager
def config_loader(config_dir: str | None) -> Iterator[ConfigLoader]:
    """Hydra's loader over our `conf/` and the user's `--config-dir`, as `hydra.main` would build it."""
    setbase(HYDRA_VERSION_BASE)
    search_path = create_config_search_path(str(conf_dir()))
    if config_dir is not None and Path(config_dir).is_dir() and isinstance(search_path, ConfigSearchPathImpl):
        search_path.prepend(
            provider="command-line",
            path=f"file://{os.path.abspath(config_dir)}",
            anchor=SearchPathQuery(provider="schema"),
        )
    before = GlobalHydra.instance().hydra  # of a program that calls us
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2(task_name="main", config_search_path=search_path).config_loader
    finally:
        GlobalHydra.instance().hydra = before
