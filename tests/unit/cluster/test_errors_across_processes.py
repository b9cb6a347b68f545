"""Every error of the project comes out of an actor's answer as itself, and so does a user's own."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import skyrl_train
from skyrl_train.cluster.calls import Answer
from skyrl_train.cluster.endpoints import answer_of
from skyrl_train.errors import ConfigError, DeadlineError, RankOutOfMemory, SkyrlTrainError, StopRequested, Violation

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ConfigError": (
        [
            Violation(field="a.b", rule="must be 1", value="2", remedy="try a.b=1"),
            Violation(field="c", rule="must be d", value="e", remedy="set c=d"),
        ],
    ),
    "DeadlineError": ("the engine", 3.5, "Raise a.timeout_s"),
    "StopRequested": ("SIGTERM", 7),
    "Unusual": (1, "two"),
}
"""What constructors take that want more than a message."""


class Unusual(SkyrlTrainError):
    """As a user's own loss may raise it."""

    def __init__(self, number: int, word: str):
        super().__init__(f"{word} is not {number}")
        self.number = number


def _all_errors() -> list[type[SkyrlTrainError]]:
    found: list[type[SkyrlTrainError]] = [SkyrlTrainError]
    for kind in found:
        found += [each for each in kind.__subclasses__() if each not in found]
    return found


@pytest.mark.parametrize("kind", _all_errors(), ids=lambda kind: kind.__name__)
def test_an_error_comes_out_of_another_process_as_itself(kind: type[SkyrlTrainError]) -> None:
    arguments = ARGUMENTS.get(kind.__name__, ("what happened",))
    raised = kind(*arguments)

    def broken() -> None:
        raise raised

    answer: Answer = pickle.loads(pickle.dumps(answer_of(broken)))

    with pytest.raises(kind) as caught:
        answer.unwrap()
    assert type(caught.value) is kind
    assert str(caught.value) == str(raised)
    assert vars(caught.value) == vars(raised)


def test_every_error_of_the_package_is_defined_in_errors() -> None:
    source = Path(skyrl_train.__file__).parent
    named = {kind.__name__ for kind in _all_errors()}
    elsewhere = [
        f"{path.relative_to(source)}: {line.strip()}"
        for path in source.rglob("*.py")
        if path.name != "errors.py"
        for line in path.read_text().splitlines()
        if line.startswith("class ") and any(f"({name}" in line or f", {name}" in line for name in named)
    ]

    assert elsewhere == []


def test_attributes_survive() -> None:
    errors = [ConfigError(*ARGUMENTS["ConfigError"]), DeadlineError(*ARGUMENTS["DeadlineError"])]
    violations, deadline = (pickle.loads(pickle.dumps(error)) for error in errors)

    assert [violation.field for violation in violations.violations] == ["a.b", "c"]
    assert str(violations).splitlines()[0] == "2 problems in the configuration:"
    assert (deadline.what, deadline.timeout_s) == ("the engine", 3.5)
    assert pickle.loads(pickle.dumps(RankOutOfMemory(""))).reason == ""
    assert pickle.loads(pickle.dumps(StopRequested("SIGTERM", 7))).global_step == 7
