from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from skyrl_train.config.door.load import read_root
from skyrl_train.config.fields.fields import Range
from skyrl_train.errors import Violation


@dataclass(frozen=True, kw_only=True)
class Engine:
    power: Annotated[float, Range(0.0, exclusive_min=True)] = 1.5
    fuel: Literal["petrol", "diesel"] = "petrol"


@dataclass(frozen=True, kw_only=True)
class Car:
    doors: Annotated[int, Range(1, 5)] = 4
    sporty: bool = False
    owner: str | None = None
    name: str = "car"
    wheels: tuple[str, ...] = ("front", "back")
    size: tuple[float, float] = (2.0, 4.5)
    extras: Mapping[str, Any] = field(default_factory=dict)
    engine: Engine = field(default_factory=Engine)
    spare: Engine = field(default_factory=lambda: Engine(power=0.5, fuel="diesel"))
    top_speed: Annotated[float, Range(0.0, exclusive_min=True)] | None = 180.0


def read(**given: Any) -> tuple[Car, list[Violation]]:
    loaded = read_root(given, Car)
    return loaded.config, list(loaded.violations)


def accepted(**given: Any) -> Car:
    car, violations = read(**given)
    assert violations == []
    return car


def refused(**given: Any) -> Violation:
    car, violations = read(**given)
    assert len(violations) == 1
    assert car == Car()
    return violations[0]


def test_nothing_given_is_the_default() -> None:
    assert accepted() == Car()


def test_what_is_given_replaces_the_default_at_every_depth() -> None:
    given = {
        "doors": 2,
        "sporty": True,
        "owner": "Ada",
        "wheels": ["one"],
        "size": [1, 2.5],
        "extras": {"radio": {"watts": 5}},
        "engine": {"power": 3, "fuel": "diesel"},
    }

    assert accepted(**given) == Car(
        doors=2,
        sporty=True,
        owner="Ada",
        wheels=("one",),
        size=(1.0, 2.5),
        extras={"radio": {"watts": 5}},
        engine=Engine(power=3.0, fuel="diesel"),
    )


def test_an_integer_serves_as_a_float_and_becomes_one() -> None:
    assert isinstance(accepted(engine={"power": 2}).engine.power, float)


def test_exponents_that_yaml_leaves_as_text_are_numbers() -> None:
    assert accepted(engine={"power": "1e-6"}).engine.power == 1e-6
    assert accepted(engine={"power": "2.5E+3"}).engine.power == 2500.0


def test_null_is_accepted_where_the_type_says_so() -> None:
    assert accepted(owner=None).owner is None
    assert refused(name=None).rule == "must be text"


def test_a_number_serves_as_text_but_a_truth_value_does_not() -> None:
    assert accepted(name=42).name == "42"
    assert refused(name=True).rule == "must be text"
    assert refused(name=1.5).rule == "must be text"


def test_a_single_text_serves_as_a_list_of_one() -> None:
    assert accepted(wheels="only").wheels == ("only",)


@pytest.mark.parametrize("value", [True, "abc", "4", 4.5, None, [4]])
def test_an_integer_is_nothing_else(value: object) -> None:
    violation = refused(doors=value)
    assert (violation.field, violation.rule, violation.value) == ("doors", "must be an integer", repr(value))
    assert violation.remedy == "try doors=4"


def test_a_whole_float_is_told_how_to_be_written() -> None:
    assert refused(doors=3.0).remedy == "write 3"


@pytest.mark.parametrize("value", [1, 0, "true", "yes", None])
def test_a_truth_value_is_true_or_false_only(value: object) -> None:
    assert refused(sporty=value).rule == "must be true or false"


@pytest.mark.parametrize("value", ["fast", "0.5", True, None, [1.0]])
def test_a_number_is_not_text_or_a_truth_value(value: object) -> None:
    assert refused(engine={"power": value}).rule == "must be a number"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_is_finite(value: float) -> None:
    assert refused(engine={"power": value}).rule == "must be a finite number"


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"doors": 0}, "must be at least 1 and at most 5"),
        ({"doors": 6}, "must be at least 1 and at most 5"),
        ({"engine": {"power": 0.0}}, "must be greater than 0"),
    ],
)
def test_bounds_are_kept(given: dict[str, Any], rule: str) -> None:
    assert refused(**given).rule == rule


def test_bounds_themselves_are_inside() -> None:
    assert accepted(doors=1).doors == 1
    assert accepted(doors=5).doors == 5


def test_a_choice_lists_the_choices_and_the_nearest() -> None:
    violation = refused(engine={"fuel": "deisel"})
    assert violation.field == "engine.fuel"
    assert violation.rule == "must be one of petrol, diesel"
    assert violation.remedy == "did you mean 'diesel'?"


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"size": [1.0]}, "must be a list of 2"),
        ({"size": [1.0, "wide"]}, "must be a number (item 1)"),
        ({"size": 3.0}, "must be a list"),
        ({"wheels": 3}, "must be a list"),
        ({"wheels": ["a", None]}, "must be text (item 1)"),
        ({"extras": [1]}, "must be a mapping with names as keys"),
        ({"extras": {1: "a"}}, "must be a mapping with names as keys"),
        ({"engine": 5}, "must be a section with settings in it"),
        ({"engine": None}, "must be a section with settings in it"),
    ],
)
def test_containers_have_their_shape(given: dict[str, Any], rule: str) -> None:
    assert refused(**given).rule == rule


def test_every_item_of_a_list_that_is_wrong_is_told() -> None:
    car, violations = read(wheels=["a", None, "b", True])
    assert [violation.rule for violation in violations] == ["must be text (item 1)", "must be text (item 3)"]
    assert car == Car()


def test_the_range_of_an_optional_value_holds() -> None:
    assert accepted(top_speed=None).top_speed is None
    assert refused(top_speed=0.0).rule == "must be greater than 0"


def test_what_a_section_leaves_out_or_gets_wrong_is_as_the_sections_around_it_have_it() -> None:
    assert accepted(spare={"fuel": "petrol"}).spare == Engine(power=0.5, fuel="petrol")
    assert refused(spare={"power": 0.0}).remedy == "try spare.power=0.5"


def test_a_missing_value_says_what_to_set_wherever_it_is() -> None:
    assert refused(doors="???").remedy == "set doors=..."
    assert refused(extras={"radio": {"watts": "???"}}).remedy == "set extras.radio.watts=..."


def test_an_unknown_key_names_the_sibling_that_was_meant() -> None:
    violation = refused(engine={"powr": 3})
    assert str(violation) == "engine.powr: is not a setting; got 3. Did you mean engine.power?"


def test_everything_wrong_is_found_at_once_and_the_rest_is_kept() -> None:
    car, violations = read(doors="abc", sporty="maybe", owner="Ada", colour="red", engine={"power": -1, "fuel": "milk"})

    assert [violation.field for violation in violations] == [
        "colour",
        "doors",
        "sporty",
        "engine.power",
        "engine.fuel",
    ]
    assert car == Car(owner="Ada")
