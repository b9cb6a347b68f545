"""One command line's overrides, checked in three stages: names, composition, and values with what their root demands."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from skyrl_train.config import AnyConfig, Config, SFTConfig, validate_sft
from skyrl_train.config.door import EARLIER, Loaded, read_root
from skyrl_train.config.fields import (
    Rule,
    SchemaField,
    is_refused,
    nearest,
    parts_of,
    peer_name,
    remedy_for_unknown,
    strip,
    walk,
)
from skyrl_train.config.rules import run_rules, validate_config, with_sound_sizes
from skyrl_train.errors import ConfigError, Violation
from skyrl_train.registry import TARGET
from skyrl_train.runs.cli.auto_placement import place, room_violations
from skyrl_train.runs.cli.composition import (
    Composer,
    alternatives,
    as_in_a_run,
    choices_of,
    clear_text_violations,
    is_hydra,
    plain_values,
    reason,
    source_of,
    text_of,
    value_of,
)
from skyrl_train.runs.cli.machine import MACHINE_RULES, RL_MACHINE_RULES


@dataclass(frozen=True, kw_only=True)
class Root:
    """What checks one kind of run."""

    schema: type[AnyConfig]
    platform_group: str
    """The group that chooses the platform."""
    machine_rules: tuple[Rule, ...]
    trains: bool = True
    """Whether models are trained, or only generate."""

    def violations(self, config: AnyConfig, *, refused: Collection[str]) -> list[Violation]:
        """Return what breaks rules between fields."""
        if isinstance(config, SFTConfig):
            return validate_sft(config, refused=refused)
        return validate_config(config, refused=refused)

    def of_settings(
        self, violations: Iterable[Violation], config: AnyConfig, *, refused: Collection[str]
    ) -> list[Violation]:
        """What is wrong with single settings, with remedies that go with the others."""
        if isinstance(config, SFTConfig):
            return list(violations)
        return with_sound_sizes(violations, config, refused=refused)


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
        violation = Violation(field=field, rule=rule, value=value, remedy=remedy)
        self._found.setdefault(str(violation), violation)

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
        for violation in violations:
            self._found.setdefault(str(violation), violation)
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
        for violation in clear_text_violations(config):
            self._found.setdefault(str(violation), violation)
        with as_in_a_run(config, index, multirun=self._multirun):
            loaded = read_root(plain_values(config), self._root.schema)
            violations = self._violations_of(loaded)
        self.notes.update(dict.fromkeys(loaded.notes))
        fields = {violation.field for violation in violations}
        for violation in violations:
            source = source_of(config, violation.field)
            follows = _DATA if source.startswith("default_environment:") else {source}
            if not follows & fields:  # what follows another setting is right when that is
                self._found.setdefault(str(violation), violation)
        return loaded.config.output_dir

    def _violations_of(self, loaded: Loaded[AnyConfig]) -> list[Violation]:
        """Return the violations of names and types, then of rules between fields and of what is on this machine, with
        the placement that is chosen here. Where rules are left to the caller, those between fields are named beside a
        refused value alone."""
        config, refused = loaded.config, loaded.refused
        if not self._rules:
            settings = self._root.of_settings(loaded.violations, config, refused=refused)
            return [*settings, *self._root.violations(config, refused=refused)] if refused else []
        found: list[Violation] = []
        try:
            config = place(config, training=self._root.trains)
        except ConfigError as error:
            found += [violation for violation in error.violations if violation.field not in refused]
            # What is left to choose stays out of the rules.
            refused = refused | {"placement"}
        found = [*self._root.of_settings(loaded.violations, config, refused=refused), *found]
        found += self._root.violations(config, refused=refused)
        found += run_rules(config, self._root.machine_rules, refused)
        return found if is_refused("placement", refused) else [*found, *room_violations(config)]

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
            for violation in mistyped:
                self._found.setdefault(str(violation), violation)
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
