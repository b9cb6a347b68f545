"""One command line's overrides, checked in three stages: names, composition, values."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from skyrl_train.cli.machine import machine_violations
from skyrl_train.config.fields import nearest, suggest, walk
from skyrl_train.config.load import read_config
from skyrl_train.config.schema import Config
from skyrl_train.config.validate import validate_config
from skyrl_train.errors import Violation

MAX_VARIANTS = 64
"""Values of a sweep that are checked beforehand; Hydra starts the others unchecked and they refuse by themselves."""

_COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, ValueError)


class CommandLine:
    """Collects the violations of one command line, each once.

    Args of the constructor:
        loader: Hydra's, over the same folders as the run's.
        multirun: whether `-m` was given.
        rules: whether to check rules between fields, and files, beside names and types.
    """

    def __init__(self, loader: ConfigLoader, config_name: str, *, multirun: bool, rules: bool = True):
        self._loader = loader
        self._config_name = config_name
        self._multirun = multirun
        self._rules = rules
        self._hydra_overrides: list[str] = []
        self._known_options: dict[tuple[str, ObjectType], list[str]] = {}
        self._found: dict[str, Violation] = {}

    def violations(self, arguments: Sequence[str], *, names_only: bool) -> list[Violation]:
        """Every problem with the arguments.

        Args:
            names_only: the config will be shown rather than run, so values need not be sound.
        """
        overrides = [override for text in arguments for override in self._parse(text)]
        self._hydra_overrides = [_text(override) for override in overrides if _is_hydra(override)]
        sound = [override for override in overrides if _is_hydra(override) or self._check_name(override)]
        variants = self._variants(sound)
        folders = [self._check_variant(variant, index, names_only) for index, variant in enumerate(variants)]
        self._check_folders(folders)
        return list(self._found.values())

    def _add(self, *, field: str, rule: str, value: str, remedy: str) -> None:
        violation = Violation(field=field, rule=rule, value=value, remedy=remedy)
        self._found.setdefault(str(violation), violation)

    # Names

    def _parse(self, text: str) -> list[Override]:
        try:
            return OverridesParser.create(self._loader).parse_overrides([text])
        except HydraException as error:
            self._add(
                field=text.partition("=")[0],
                rule="cannot be read as KEY=VALUE",
                value=repr(text),
                remedy=f"{_reason(error)}. Quote text that has commas, spaces or brackets: \"KEY='...'\"",
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
        if self._is_group(override):
            return self._check_choices(override)
        return self._check_key(override)

    def _is_group(self, override: Override) -> bool:
        """Hydra's rule: a choice of a group, unless a dictionary is given."""
        is_dictionary = not override.is_sweep_override() and isinstance(override.value(), dict)
        return not is_dictionary and self._group_exists(override.key_or_group)

    def _group_exists(self, name: str) -> bool:
        parent, _, last = name.rpartition("/")
        return last in self._options(parent, ObjectType.GROUP)

    def _options(self, group: str, kind: ObjectType) -> list[str]:
        if (group, kind) not in self._known_options:
            options = self._loader.get_group_options(group, kind, self._config_name, self._hydra_overrides)
            self._known_options[group, kind] = options
        return self._known_options[group, kind]

    def _check_choices(self, override: Override) -> bool:
        group = override.key_or_group
        if override.is_delete():
            return True
        choices = _choices(override)
        missing = [choice for choice in choices if not self._choice_exists(group, choice)]
        options = self._options(group, ObjectType.CONFIG)
        for choice in missing:
            near = nearest(choice, options)
            remedy = f"did you mean {group}={near}?" if near else f"--help lists the choices of {group}"
            self._add(field=group, rule=f"must be one of {', '.join(options)}", value=repr(choice), remedy=remedy)
        if not missing and group == "experiment" and not override.is_add():
            remedy = f"write +experiment={choices[0]}"
            self._add(field=group, rule="is added with a plus sign", value=_text(override), remedy=remedy)
            return False
        return not missing

    def _choice_exists(self, group: str, choice: str) -> bool:
        parent, _, name = f"{group}/{choice}".rpartition("/")
        return choice == "null" or "${" in choice or name in self._options(parent, ObjectType.CONFIG)

    def _check_key(self, override: Override) -> bool:
        key = override.key_or_group
        fields = {field.path: field for field in walk(Config)}
        if key in fields or any(field.open and key.startswith(f"{field.path}.") for field in fields.values()):
            return True
        near_group = None if "." in key else nearest(key, self._options("", ObjectType.GROUP))
        near = f"{near_group}=..." if near_group else suggest(key, Config)
        remedy = (
            f"did you mean {near}?" if near else "see docs/configuration.md for every setting, --help for every group"
        )
        self._add(field=key, rule="is not a setting", value=_value_text(override), remedy=remedy)
        return False

    # Composition and values

    def _variants(self, overrides: Sequence[Override]) -> list[list[Override]]:
        """The runs of a sweep that together contain each swept value; otherwise the one run."""
        alternatives = [options for override in overrides if (options := _alternatives(override))]
        first = [options[0] for options in alternatives]
        variants = [first]
        for index, options in enumerate(alternatives):
            variants += [[*first[:index], option, *first[index + 1 :]] for option in options[1:]]
        return list(itertools.islice(variants, MAX_VARIANTS))

    def _check_variant(self, overrides: Sequence[Override], index: int, names_only: bool) -> str | None:
        """Records what is wrong with one run; returns its output folder."""
        config = self._compose(overrides)
        if config is None or names_only:
            return None
        with _as_in_a_run(config, index, multirun=self._multirun):
            loaded = read_config(config)
            violations = list(loaded.violations)
            if self._rules:
                violations += validate_config(loaded.config, refused=loaded.refused)
                violations += machine_violations(loaded.config, refused=loaded.refused)
        for violation in violations:
            self._found.setdefault(str(violation), violation)
        return loaded.config.output_dir

    def _check_folders(self, folders: Sequence[str | None]) -> None:
        if len(folders) > 1 and len(set(folders)) < len(folders) and None not in folders:
            self._add(
                field="output_dir",
                rule="must differ between the runs of a sweep",
                value=repr(folders[0]),
                remedy=f"leave output_dir alone and set hydra.sweep.dir={folders[0]}",
            )

    def _compose(self, overrides: Sequence[Override]) -> DictConfig | None:
        """The composed config; offending overrides are recorded and left out."""
        try:
            return self._load(overrides)
        except _COMPOSITION_ERRORS:
            sound = self._without_offenders(overrides)
        refusal = self._refusal(sound)
        if refusal is None:
            return self._load(sound)
        arguments = " ".join(_text(override) for override in sound)
        self._add(field="arguments", rule="do not fit together", value=repr(arguments), remedy=refusal)
        return None

    def _without_offenders(self, overrides: Sequence[Override]) -> list[Override]:
        """Tries each override on its own (values with all sound groups) and records Hydra's reason for a refusal."""
        sound: list[Override] = []
        groups = [override for override in overrides if self._is_group(override)]
        values = [override for override in overrides if override not in groups]
        for candidates, alone in ((groups, True), (values, False)):
            context = [] if alone else list(sound)
            for override in candidates:
                refusal = self._refusal([*context, override])
                if refusal is None:
                    sound.append(override)
                else:
                    self._add(
                        field=override.key_or_group, rule="was refused", value=_value_text(override), remedy=refusal
                    )
        return [override for override in overrides if override in sound]

    def _refusal(self, overrides: Sequence[Override]) -> str | None:
        """Why Hydra refuses these overrides, or None."""
        try:
            self._load(overrides)
        except _COMPOSITION_ERRORS as error:
            return _reason(error)
        return None

    def _load(self, overrides: Sequence[Override]) -> DictConfig:
        texts = [_text(override) for override in overrides]
        return self._loader.load_configuration(self._config_name, texts, RunMode.RUN, from_shell=False)


@contextmanager
def _as_in_a_run(config: DictConfig, index: int, *, multirun: bool) -> Iterator[None]:
    """Makes `${hydra:...}` answer as it will in the run, and takes Hydra's own section out of the config."""
    before = HydraConfig.instance().cfg
    with open_dict(config):
        job = config.hydra.job
        job.num, job.id = index, str(index)
        # A folder whose name cannot be worked out is reported where the value that it lacks is read.
        with suppress(OmegaConfBaseException):
            folder = f"{config.hydra.sweep.dir}/{config.hydra.sweep.subdir}" if multirun else config.hydra.run.dir
            config.hydra.runtime.output_dir = os.path.abspath(folder)
        HydraConfig.instance().set_config(config)
        del config["hydra"]
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def _alternatives(override: Override) -> list[Override]:
    """The values that a sweep tries, one override each; none where only the sweeper knows them."""
    if not override.is_sweep_override():
        return [override]
    if override.is_interval_sweep():
        return []
    key = override.get_key_element()
    texts = [f"{key}={value}" for value in itertools.islice(override.sweep_string_iterator(), MAX_VARIANTS)]
    return OverridesParser.create().parse_overrides(texts)


def _choices(override: Override) -> list[str]:
    """The names that a group override chooses."""
    if override.is_sweep_override():
        return [choice for option in _alternatives(override) for choice in _choices(option)]
    value = override.value()
    return [str(choice) for choice in value] if isinstance(value, list) else ["null" if value is None else str(value)]


def _is_hydra(override: Override) -> bool:
    return override.key_or_group == "hydra" or override.key_or_group.startswith(("hydra.", "hydra/"))


def _text(override: Override) -> str:
    return str(override.input_line)


def _value_text(override: Override) -> str:
    return repr(_text(override).partition("=")[2])


def _reason(error: BaseException) -> str:
    """The first message in an error and its causes, on one line."""
    current: BaseException | None = error
    while current is not None:
        lines = [line.strip().rstrip(".:") for line in str(current).splitlines() if "https://" not in line]
        if any(lines):
            return ". ".join(line for line in lines if line)
        current = current.__cause__
    return type(error).__name__
