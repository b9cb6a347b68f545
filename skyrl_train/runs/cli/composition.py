"""Hydra's configs: what there is to choose from, which overrides are refused and why, and their way into the schema."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from skyrl_train.config.derived import COMPILE
from skyrl_train.config.door import MISSING, NotStated, Unresolved, load_root
from skyrl_train.errors import DataError, Violation
from skyrl_train.runs.cli.resolvers import derived, unchanging
from skyrl_train.system.files import write_atomically

T = TypeVar("T")

_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, ValueError)


REDACTED_FILES = "skyrl_train.runs.cli.hydra_files.RedactedFiles"
"""What `conf/` names as Hydra's callback."""
MAX_ALTERNATIVES = 64
"""Values of a sweep that are looked at beforehand."""


def alternatives(override: Override) -> list[Override]:
    """The values that a sweep tries, one override each; none where only the sweeper knows them."""
    if not override.is_sweep_override():
        return [override]
    if override.is_interval_sweep():
        return []
    key = override.get_key_element()
    texts = [f"{key}={value}" for value in itertools.islice(override.sweep_string_iterator(), MAX_ALTERNATIVES)]
    return OverridesParser.create().parse_overrides(texts)


def choices_of(override: Override) -> list[str]:
    """The names that a group override chooses."""
    if override.is_sweep_override():
        return [choice for option in alternatives(override) for choice in choices_of(option)]
    value = override.value()
    return [str(choice) for choice in value] if isinstance(value, list) else ["null" if value is None else str(value)]


def is_hydra(override: Override) -> bool:
    """Whether the override is about Hydra itself, which checks it."""
    return override.key_or_group == "hydra" or override.key_or_group.startswith(("hydra.", "hydra/"))


def text_of(override: Override) -> str:
    """The override as it was typed."""
    return str(override.input_line)


def value_of(override: Override) -> str:
    """What was typed after the equals sign, quoted."""
    return repr(text_of(override).partition("=")[2])


def as_override(key: str, value: object) -> str:
    """`KEY=VALUE` of a plain Python value, as Hydra's grammar reads it back."""
    return f"{key}={_in_grammar(value)}"


def _in_grammar(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}: {_in_grammar(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_in_grammar, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    text = re.sub(r"(\\*)'", r"\1\1\\'", str(value))  # backslashes count where a quote follows them
    text = re.sub(r"(\\+)$", r"\1\1", text)
    return f"'{text}'"


def reason(error: BaseException) -> str:
    """The first message in an error and its causes, on one line."""
    current: BaseException | None = error
    while current is not None:
        lines = [line.strip().rstrip(".:") for line in str(current).splitlines() if "https://" not in line]
        if any(lines):
            return ". ".join(line for line in lines if line)
        current = current.__cause__
    return type(error).__name__


class Composer:
    """Composes one root config.

    Args of the constructor:
        loader: Hydra's, over the same folders as the run's.
        search_path: the overrides of `hydra.searchpath`, which add groups.
    """

    def __init__(self, loader: ConfigLoader, config_name: str, search_path: Sequence[str]):
        self._loader = loader
        self._config_name = config_name
        self._search_path = list(search_path)
        self._options: dict[tuple[str, ObjectType], list[str]] = {}

    def groups(self, parent: str = "") -> list[str]:
        """Names of the groups in a group, or at the top."""
        return self._list(parent, ObjectType.GROUP)

    def choices(self, group: str) -> list[str]:
        """Return the names that a group offers."""
        return self._list(group, ObjectType.CONFIG)

    def _list(self, group: str, kind: ObjectType) -> list[str]:
        if (group, kind) not in self._options:
            options = self._loader.get_group_options(group, kind, self._config_name, self._search_path)
            self._options[group, kind] = options
        return self._options[group, kind]

    def is_group(self, override: Override) -> bool:
        """Hydra's rule: a choice of a group, unless a dictionary is given."""
        is_dictionary = not override.is_sweep_override() and isinstance(override.value(), dict)
        parent, _, last = override.key_or_group.rpartition("/")
        return not is_dictionary and last in self.groups(parent)

    def has_choice(self, group: str, choice: str) -> bool:
        """Whether the group offers it; an expression may come to anything."""
        parent, _, name = f"{group}/{choice}".rpartition("/")
        return choice == "null" or "${" in choice or name in self.choices(parent)

    def parse(self, text: str) -> list[Override]:
        """One argument, read by Hydra's grammar. Raises HydraException."""
        return OverridesParser.create(self._loader).parse_overrides([text])

    def attempt(self, overrides: Sequence[Override]) -> DictConfig | str:
        """The config, with Hydra's own section in it, or why these overrides do not compose."""
        texts = [text_of(override) for override in overrides]
        try:
            return self._loader.load_configuration(self._config_name, texts, RunMode.RUN, from_shell=False)
        except _ERRORS as error:
            return reason(error)

    def refusals(self, overrides: Sequence[Override]) -> list[tuple[Override, str]]:
        """The overrides that do not compose, and why: groups each tried alone, values each with all sound groups."""
        groups = [override for override in overrides if self.is_group(override)]
        values = [override for override in overrides if override not in groups]
        refused_groups = list(self._refused(groups, context=[]))
        sound = [override for override in groups if override not in [refused for refused, _ in refused_groups]]
        return [*refused_groups, *self._refused(values, context=sound)]

    def _refused(self, overrides: Sequence[Override], *, context: Sequence[Override]) -> Iterator[tuple[Override, str]]:
        for override in overrides:
            outcome = self.attempt([*context, override])
            if isinstance(outcome, str):
                yield override, outcome


@contextmanager
def as_in_a_run(config: DictConfig, index: int, *, multirun: bool) -> Iterator[None]:
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


def clear_text_violations(config: DictConfig) -> Iterator[Violation]:
    """What would have Hydra write the command line and the configuration as they were typed, secrets included, or leave
    the callback out that writes them without (`hydra_files.py`)."""
    hydra = config.hydra
    if hydra.output_subdir is not None:
        yield Violation.of(
            "hydra.output_subdir",
            hydra.output_subdir,
            "would hold secrets in clear text",
            "drop it: .hydra/ is written in any case, without secrets",
        )
    written = OmegaConf.select(hydra, "callbacks.redacted_files._target_")
    if written != REDACTED_FILES:
        yield Violation.of(
            "hydra.callbacks.redacted_files",
            written,
            f"must be {REDACTED_FILES}, which keeps secrets out of files and logs",
            "drop what changes it; others stand beside it, as hydra.callbacks.NAME",
        )


def source_of(config: DictConfig, field: str) -> str:
    """Return the setting whose value `field` takes by `${SETTING}`; empty for a value of its own."""
    parent, _, name = field.rpartition(".")
    section = OmegaConf.select(config, parent) if parent else config
    if not isinstance(section, DictConfig) or name not in section.keys():  # noqa: SIM118  `in` would resolve it
        return ""
    if not OmegaConf.is_interpolation(section, name):
        return ""
    text = str(OmegaConf.to_container(section, resolve=False)[name])  # type: ignore[index,call-overload]
    return text.removeprefix("${").removesuffix("}")


def load_node(node: DictConfig, schema: type[T]) -> T:
    """The validated configuration of a composed config. Raises ConfigError with all that is wrong with single settings."""
    return load_root(plain_values(node), schema)


def read_yaml(path: Path) -> Any:
    """Return what `write_yaml` wrote. Raises DataError."""
    try:
        return plain_values(OmegaConf.load(path))
    except (OSError, OmegaConfBaseException, YAMLError) as error:
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error})") from error


def write_yaml(content: Mapping[str, Any], path: Path) -> None:
    """Write plain nested values, e.g. a resolved configuration with its secrets redacted: half of it would pass for the
    configuration of another run, whose files a run that begins again sets aside. Raises OSError."""
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(dict(content))).encode())


def plain_values(node: Any) -> Any:
    """The nested plain containers of a composed config; interpolations are resolved one by one, so that one failure does not
    hide the next."""
    with unchanging():
        return _plain(node)


def _plain(node: Any) -> Any:
    if isinstance(node, DictConfig):
        if node._is_none() or node._is_missing():
            return None if node._is_none() else MISSING
        return {key: _item(node, key) for key in node}
    if isinstance(node, ListConfig):
        if node._is_none() or node._is_missing():
            return None if node._is_none() else MISSING
        return [_item(node, index) for index in range(len(node))]
    if isinstance(node, Mapping):
        return {key: _plain(value) for key, value in node.items()}
    return node


def _item(node: DictConfig | ListConfig, key: Any) -> Any:
    if OmegaConf.is_missing(node, key):
        return MISSING
    try:
        value = node[key]
        if value == "auto" and node._get_full_key(key) == COMPILE:
            found: Any = node._get_node(key), node._get_root()
            value = derived(_node_=found[0], _root_=found[1])
        return _plain(value)
    except OmegaConfBaseException as error:
        if (found := _not_stated(error)) is not None:
            return Unresolved("nothing", found.remedy, found.rule)
        child = node._get_node(key)
        return Unresolved(str(getattr(child, "_value", lambda: key)()), str(error).splitlines()[0])


def _not_stated(error: BaseException) -> NotStated | None:
    """Return what a resolver asks the user for, which OmegaConf keeps as the context of its own errors."""
    current: BaseException | None = error
    while current is not None and not isinstance(current, NotStated):
        current = current.__context__
    return current
