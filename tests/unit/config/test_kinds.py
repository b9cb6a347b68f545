"""A setting of one kind alone: refused by name with every other kind, read with its own, and no difference to a resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal, get_args, get_origin

import pytest

from skyrl_train.config import Config, SFTConfig
from skyrl_train.config.fields.fields import Kind, Of, SchemaField, kinds_of, strip, walk
from skyrl_train.config.rules.argument_rules import kind_violations
from skyrl_train.errors import Violation

ROOTS = (Config, SFTConfig)


def with_setting(section: Any, path: str, value: Any) -> Any:
    """A copy of a section with one setting of it, or of a section in it, set."""
    name, _, rest = path.partition(".")
    return replace(section, **{name: with_setting(getattr(section, name), rest, value) if rest else value})


def another(field: SchemaField) -> Any:
    """A value that is not the default."""
    kind, default = strip(field.annotation), field.default
    if isinstance(default, bool):
        return not default
    if get_origin(kind) is Literal:
        return next(each for each in get_args(kind) if each != default)
    if get_origin(kind) is Mapping or get_origin(kind) is tuple:
        return {"a": 1} if get_origin(kind) is Mapping else ("a",)
    if isinstance(default, (int, float)):
        return default + 1
    return {int: 1, bool: True}.get(kind, "my_code:part")


def others(kind: Kind, fields: Mapping[str, SchemaField]) -> list[Any]:
    """Every value of the setting that chooses the kind with which another kind is chosen."""
    field = fields[kind.setting]
    if kind.seam is not None:
        return [name for name in kind.seam.builtins if name not in kind.names]
    choices = get_args(strip(field.annotation)) if kind.names else (field.default,)
    return [each for each in choices if each not in kind.names]


def chosen(kind: Kind, fields: Mapping[str, SchemaField]) -> Any:
    """A value of that setting with which the kind is chosen."""
    return kind.names[0] if kind.names else another(fields[kind.setting])


def cases() -> Iterator[tuple[type, str, Kind, Any]]:
    for root in ROOTS:
        fields = {field.path: field for field in walk(root)}
        for path, (_, kinds) in kinds_of(root).items():
            for kind in (each for each in kinds if isinstance(each.of, Of)):
                assert others(kind, fields), f"{path}: there is no other kind than {kind.written}"
                yield from ((root, path, kind, value) for value in others(kind, fields))


def violation_of(path: str, config: object) -> Violation | None:
    return next((each for each in kind_violations(config) if each.field == path), None)


@pytest.mark.parametrize(
    ("root", "path", "kind", "value"),
    [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}-{case[2].setting}={case[3]}") for case in cases()],
)
def test_a_setting_is_refused_with_each_other_kind_and_dropped_at_its_default(
    root: type, path: str, kind: Kind, value: Any
) -> None:
    fields = {field.path: field for field in walk(root)}
    field, kinds = kinds_of(root)[path]
    config = root()
    for each in kinds:  # all that it needs but this one
        config = with_setting(config, each.setting, chosen(each, fields))
    stated = kind.of.values[0] if isinstance(kind.of, Of) and kind.of.values else another(field)
    with_own = with_setting(config, path, stated)
    assert violation_of(path, with_own) is None
    config = with_setting(config, kind.setting, value)
    assert violation_of(path, with_setting(config, path, field.default)) is None
    found = violation_of(path, with_setting(config, path, stated))
    assert found is not None
    assert "does nothing with" in found.rule
    assert kind.written[0].partition("=")[0] in f"{found.rule} {found.remedy}", "it names what has the setting"
    assert found.remedy.split()[0] in ("add", "set")
    assert ", or leave it at " in found.remedy


@pytest.mark.parametrize(
    ("setting", "part", "path", "value"),
    [
        ("strategy.name", "my_code:strategy", "strategy.fsdp_size", 2),
        ("generator.backend", "my_code:engine", "generator.vllm.num_engines", 2),
        ("generator.backend", "my_code:engine", "generator.seeds", "engine"),
        ("trainer.policy.optimizer.name", "my_code:optimizer", "trainer.policy.optimizer.betas", (0.5, 0.5)),
    ],
)
def test_a_custom_part_is_not_refused_what_it_might_read(setting: str, part: str, path: str, value: object) -> None:
    assert violation_of(path, with_setting(with_setting(Config(), setting, part), path, value)) is None


def test_one_of_values_alone_is_for_the_kind_that_has_it() -> None:
    assert violation_of("strategy.cpu_offload", with_setting(Config(), "strategy.cpu_offload", "optimizer")) is None
    found = violation_of("strategy.cpu_offload", with_setting(Config(), "strategy.cpu_offload", True))
    assert str(found) == (
        "strategy.cpu_offload: is for strategy=fsdp2, and does nothing with single: optimizer is for any; got True. "
        "Add strategy=fsdp2, or leave it at auto"
    )


def test_nothing_is_said_of_what_was_refused_before() -> None:
    config = with_setting(Config(), "strategy.fsdp_size", 2)
    assert [each.field for each in kind_violations(config)] == ["strategy.fsdp_size"]
    for refused in ("strategy.fsdp_size", "strategy.name", "strategy"):
        assert list(kind_violations(config, [refused])) == []


def test_the_settings_that_decide_are_settings() -> None:
    for root in ROOTS:
        for _, kinds in kinds_of(root).values():
            for kind in kinds:
                attrgetter(kind.setting)(root())
