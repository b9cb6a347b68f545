"""Everything that is wrong with a command line, found before Hydra takes over and before torch is imported.

Hydra stops at the first key that it does not know, and knows nothing of types. `preflight` therefore composes the same
command line first, collects all problems (malformed arguments, unknown keys and choices, refused values, rules between
fields) and prints them at once. A command line without problems goes to Hydra untouched.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
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
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.version import setbase
from omegaconf import DictConfig

from skyrl_train.config import AnyConfig, Config, SFTConfig
from skyrl_train.config.door import EARLIER, for_hydra, read_root
from skyrl_train.config.fields import (
    Rule,
    SchemaField,
    meant_by,
    nearest,
    parts_of,
    peer_name,
    remedy_for_unknown,
    strip,
    walk,
)
from skyrl_train.config.rules import near_path
from skyrl_train.errors import ConfigError, SkyrlTrainError, Violation
from skyrl_train.registry import TARGET
from skyrl_train.runs.cli.composition import (
    Composer,
    alternatives,
    as_in_a_run,
    as_override,
    choices_of,
    clear_text_violations,
    is_hydra,
    plain_values,
    reason,
    source_of,
    text_of,
    value_of,
)
from skyrl_train.runs.cli.conf_folder import conf_dir
from skyrl_train.runs.cli.hydra_files import with_arguments_of_run
from skyrl_train.runs.cli.machine import MACHINE_RULES, RL_MACHINE_RULES
from skyrl_train.runs.cli.placement import violations_here
from skyrl_train.runs.cli.resolvers import HYDRA_VERSION_BASE, name_another_run, register_resolvers
from skyrl_train.system import DISTRIBUTION, find_modules_here
from skyrl_train.telemetry.logs import console_streams, learn_arguments, redact_text


@dataclass(frozen=True, kw_only=True)
class Root:
    """What checks one kind of run."""

    schema: type[AnyConfig]
    platform_group: str
    """The group that chooses the platform."""
    machine_rules: tuple[Rule, ...]
    trains: bool = True
    """Whether models are trained, or only generate."""


RL_ROOT = Root(schema=Config, platform_group="platform", machine_rules=RL_MACHINE_RULES)
SFT_ROOT = Root(schema=SFTConfig, platform_group="sft_platform", machine_rules=MACHINE_RULES)


def root_of(config_name: str) -> Root:
    """By the name of an entry point's root config."""
    return SFT_ROOT if config_name == "sft" else RL_ROOT


OF_PATHS = {"model": "model.path={}", "data": "data.train=[{}]"}
"""Groups whose choices are ready-made, and what takes any other model or data."""
_DATA = frozenset({"data.train", "data.validation"})
"""What `${default_environment:...}` follows."""
MAX_VARIANTS = 64
"""Values of a sweep that are checked beforehand; Hydra starts the others unchecked and they refuse by themselves."""


class CommandLine:
    """Collects the violations of one command line, each once.

    Args of the constructor:
        composer: over the same folders as the run's.
        multirun: whether `-m` was given.
        rules: whether to check rules between fields, and files, beside names and types.
        root: the kind of run.
    """

    def __init__(self, composer: Composer, *, multirun: bool, rules: bool = True, root: Root = RL_ROOT):
        self._composer = composer
        self._root = root
        self._multirun = multirun
        self._rules = rules
        self._found: dict[str, Violation] = {}
        self.notes: dict[str, None] = {}
        """What to write instead of settings of before, each once."""
        self.config: AnyConfig | None = None
        """What the first of the runs would run with, after `violations`; None where it was not read, or has any."""

    def violations(self, arguments: Sequence[str], *, names_only: bool) -> list[Violation]:
        """Every problem with the arguments.

        Args:
            names_only: the config will be shown rather than run, so values need not be sound.
        """
        overrides = [override for text in arguments for override in self._parse(text)]
        sound = [override for override in overrides if is_hydra(override) or self._check_name(override)]
        variants = self._variants(sound)
        folders = [self._check_variant(variant, index, names_only) for index, variant in enumerate(variants)]
        self._check_folders(folders)
        return list(self._found.values())

    def _add(self, *, field: str, rule: str, value: str, remedy: str) -> None:
        self._note([Violation(field=field, rule=rule, value=value, remedy=remedy)])

    def _note(self, violations: Iterable[Violation]) -> None:
        self._found.update((text, each) for each in violations if (text := str(each)) not in self._found)

    # Names

    def _parse(self, text: str) -> list[Override]:
        try:
            return self._composer.parse(text)
        except HydraException as error:
            self._add(
                field=text.partition("=")[0],
                rule="cannot be read as KEY=VALUE",
                value=repr(text),
                remedy=f"{reason(error)}. Quote text that has commas, spaces or brackets: \"KEY='...'\"",
            )
            return []

    def _check_name(self, override: Override) -> bool:
        """Whether key, group and choice exist; what does not is recorded."""
        if override.is_sweep_override() and not self._multirun:
            key, values = override.key_or_group, override.get_value_string()
            self._add(
                field=key,
                rule="has several values",
                value=values,
                remedy=f"add -m to run one after the other, or write {key}=[{values}] for a list",
            )
            return False
        if self._composer.is_group(override):
            return self._check_choices(override)
        return self._check_key(override)

    def _check_choices(self, override: Override) -> bool:
        group = override.key_or_group
        if override.is_delete():
            return True
        choices = choices_of(override)
        missing = [choice for choice in choices if not self._composer.has_choice(group, choice)]
        options = self._composer.choices(group)
        for choice in missing:
            near = nearest(choice, options)
            remedy = f"did you mean {group}={near}?" if near else f"--help lists the choices of {group}"
            if group in OF_PATHS and ("/" in choice or not near):
                remedy = f"write {OF_PATHS[group].format(choice)} for a folder, a file or a name on a hub"
            self._add(field=group, rule=f"must be one of {', '.join(options)}", value=repr(choice), remedy=remedy)
        if not missing and group == "experiment" and not override.is_add():
            remedy = f"write +experiment={choices[0]}"
            self._add(field=group, rule="is added with a plus sign", value=text_of(override), remedy=remedy)
            return False
        return not missing

    def _check_key(self, override: Override) -> bool:
        key = override.key_or_group
        if key == "platform.name":
            remedy = f"write {self._root.platform_group}={override.get_value_string()}"
            self._add(field=key, rule="is chosen with the group", value=value_of(override), remedy=remedy)
            return False
        fields = {field.path: field for field in walk(self._root.schema)}
        if key in fields and fields[key].section and not override.is_sweep_override():
            return self._check_section(fields[key], override)
        known = {*fields, *EARLIER}
        if key in known or any(field.open and key.startswith(f"{field.path}.") for field in fields.values()):
            return True
        near_group = None if "." in key or peer_name(key) else nearest(key, self._composer.groups())
        remedy = f"did you mean {near_group}=...?" if near_group else remedy_for_unknown(key, self._root.schema)
        remedy = remedy or "see docs/configuration.md for every setting, --help for every group"
        self._add(field=key, rule="is not a setting", value=value_of(override), remedy=remedy)
        return False

    def _check_section(self, section: SchemaField, override: Override) -> bool:
        """Whether a mapping given for a whole section has settings of it alone, of the right types."""
        value = override.value()
        if not isinstance(value, dict):
            return True
        schema = strip(section.annotation)
        violations = read_root(value, schema, at=section.path, root=self._root.schema).violations
        self._note(violations)
        return not violations

    # Composition and values

    def _variants(self, overrides: Sequence[Override]) -> list[list[Override]]:
        """The runs of a sweep that together contain each swept value; otherwise the one run."""
        tried = [options for override in overrides if (options := alternatives(override))]
        first = [options[0] for options in tried]
        variants = [first]
        for index, options in enumerate(tried):
            variants += [[*first[:index], option, *first[index + 1 :]] for option in options[1:]]
        return list(itertools.islice(variants, MAX_VARIANTS))

    def _check_variant(self, overrides: Sequence[Override], index: int, names_only: bool) -> str | None:
        """Records what is wrong with one run; returns its output folder."""
        config = self._compose(overrides)
        if config is None or names_only:
            return None
        self._note(clear_text_violations(config))
        with as_in_a_run(config, index, multirun=self._multirun):
            loaded = read_root(plain_values(config), self._root.schema)
            rules = self._root.machine_rules if self._rules else None
            violations = violations_here(loaded, rules, trains=self._root.trains)
        if not index and not loaded.violations:
            self.config = loaded.config
        self.notes.update(dict.fromkeys(loaded.notes))
        fields = {violation.field for violation in violations}
        for violation in violations:
            source = source_of(config, violation.field)
            follows = _DATA if source.startswith("default_environment:") else {source}
            if not follows & fields:  # what follows another setting is right when that is
                self._note([violation])
        return loaded.config.output_dir

    def _check_folders(self, folders: Sequence[str | None]) -> None:
        if len(folders) > 1 and len(set(folders)) < len(folders) and None not in folders:
            self._add(
                field="output_dir",
                rule="must differ between the runs of a sweep",
                value=repr(folders[0]),
                remedy=f"leave output_dir alone and set hydra.sweep.dir={folders[0]}",
            )

    def _mistyped(self, key: str, value: object) -> list[Violation]:
        """Return what is wrong with the type of a value; nothing for an unknown key."""
        tree = value
        for part in reversed(key.split(".")):
            tree = {part: tree}
        violations = read_root(tree, self._root.schema).violations
        return [each for each in violations if each.field == key and each.rule != "is not a setting"]

    def _compose(self, overrides: Sequence[Override]) -> DictConfig | None:
        """The composed config; offending overrides are recorded and left out."""
        config = self._composer.attempt(overrides)
        if isinstance(config, DictConfig):
            return config
        refusals = self._composer.refusals(overrides)
        parts = parts_of(self._root.schema)
        for override, why in refusals:
            key = override.key_or_group
            part = next((path for path in parts if key.startswith(f"{path}.")), None)
            if part is not None:  # a name has no arguments
                argument = key.removeprefix(f"{part}.")
                name = next(iter(parts[part].having(argument)), "NAME")
                why = f"write {part}={{{TARGET}: {name}, {argument}: ...}}"
            # A list in the place of a mapping, say, which OmegaConf refuses without saying what there may be.
            mistyped = [] if override.is_sweep_override() else self._mistyped(key, override.value())
            self._note(mistyped)
            if not mistyped:
                self._add(field=key, rule="was refused", value=value_of(override), remedy=why)
        refused = [override for override, _ in refusals]
        sound = [override for override in overrides if override not in refused]
        config = self._composer.attempt(sound)
        if isinstance(config, DictConfig):
            return config
        arguments = " ".join(text_of(override) for override in sound)
        self._add(field="arguments", rule="do not fit together", value=repr(arguments), remedy=config)
        return None


FROM, FIND = "--from", "--find"
"""Flags that are answered without a run: a configuration of another trainer, and settings that have words."""
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
    if asked := next((each for each in (FROM, FIND) if each in sys.argv[1:]), None):
        raise SystemExit(_answered(asked, sys.argv[1:], config_name))
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


def _answered(flag: str, argv: list[str], config_name: str) -> int:
    """Return the exit status of what `--from` and `--find` print."""
    if flag == FROM:
        from skyrl_train.runs.cli import migrate

        return migrate.main(argv, config_name=config_name)
    from skyrl_train.runs.cli import find

    return find.main(argv, root_of(config_name).schema)


def _no_experiment(config_name: str) -> str:
    """What a command without arguments is answered: the defaults are for a large model, and the bundled one would learn
    nothing from them."""
    supervised = config_name != "config"
    names = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))
    typed = Path(sys.argv[0])
    program = typed.name if typed.suffix != ".py" else f"python -m skyrl_train.{typed.stem}"
    commands = [f"  {program} +experiment={name}\n" for name in names if name.startswith("sft") == supervised]
    return f"Nothing was named to train. Begin with an experiment, and override what differs:\n{''.join(commands)}"


def preflight(argv: list[str], *, config_name: str, rules: bool = True, trains: bool = True) -> AnyConfig | None:
    """Check the arguments of an entry point whose root config is `config_name`, and return what they come to.

    Prints every problem to stderr and raises SystemExit(2). Returns None where the arguments ask for something that Hydra
    answers by itself, such as `--help`.

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
            return None
        return check(flags, config_name=flags.config_name or config_name, rules=rules, root=root)
    except (SkyrlTrainError, HydraException) as error:
        sys.stderr.write(f"{redact_text(str(error))}\n")
        raise SystemExit(2) from None


def check(flags: argparse.Namespace, *, config_name: str, rules: bool, root: Root = RL_ROOT) -> AnyConfig | None:
    """Return what the parsed arguments come to, of a sweep its first run; None where only names were checked. Raises
    ConfigError with all problems."""
    register_resolvers()
    with config_loader(flags.config_dir) as loader:
        search_path = [text for text in flags.overrides if text.lstrip("+~").startswith("hydra.searchpath=")]
        composer = Composer(loader, config_name, search_path)
        line = CommandLine(composer, multirun=flags.multirun, rules=rules, root=root)
        names_only = flags.cfg is not None or flags.info is not None
        violations = line.violations(flags.overrides, names_only=names_only)
    if (
        flags.config_dir is not None and not Path(flags.config_dir).is_dir()
    ):  # without one, Hydra's message names its flag
        found = Violation.of(
            "--config-dir", flags.config_dir, "must be an existing folder", near_path(flags.config_dir)
        )
        violations.insert(0, found)
    for note in line.notes:
        sys.stderr.write(f"note: {redact_text(note)}\n")
    if violations:
        raise ConfigError(violations)
    return line.config


def checked_config(arguments: Sequence[str], *, config_name: str, trains: bool = True) -> AnyConfig:
    """Return the configuration that the command line of an entry point would run with, for runs that Python starts.

    Raises ConfigError with all problems of the arguments.
    """
    learn_arguments(arguments, os.environ)
    arguments = for_hydra(arguments)
    flags = argparse.Namespace(config_dir=None, overrides=list(arguments), multirun=False, cfg=None, info=None)
    root = replace(root_of(config_name), trains=trains)
    name_another_run()
    config = check(flags, config_name=config_name, rules=True, root=root)
    assert config is not None, "values were checked, too"
    return config


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
