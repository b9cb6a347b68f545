"""What one override says, in the words of a message."""

from __future__ import annotations

import itertools

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

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


def reason(error: BaseException) -> str:
    """The first message in an error and its causes, on one line."""
    current: BaseException | None = error
    while current is not None:
        lines = [line.strip().rstrip(".:") for line in str(current).splitlines() if "https://" not in line]
        if any(lines):
            return ". ".join(line for line in lines if line)
        current = current.__cause__
    return type(error).__name__
