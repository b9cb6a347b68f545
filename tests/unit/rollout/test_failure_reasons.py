"""What a run that ends for its failures says of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from skyrl_train.errors import EngineError, SkyrlTrainError
from skyrl_train.rollout.checked_engine import check_failures
from skyrl_train.types import FailureKind
from tests.support.fakes_trainer import failed_trajectory


def lines_of(messages: Sequence[str], kind: FailureKind = FailureKind.REWARD_ERROR) -> list[str]:
    failed = [failed_trajectory(kind=kind, message=message) for message in messages]
    with pytest.raises(SkyrlTrainError) as error:
        check_failures(failed, len(failed), limit=0.5)
    return str(error.value).splitlines()[1:-1]


def test_failures_that_differ_in_what_they_quote_are_one_reason_with_an_example() -> None:
    replies = ["#### 43", "it's 5", 'say "no"', "#### 6"]
    assert lines_of([f"score: ValueError: cannot read {reply!r} at character {len(reply)}" for reply in replies]) == [
        "  4 x reward_error: score: ValueError: cannot read '...' at character N",
        "      e.g. reward_error: score: ValueError: cannot read '#### 43' at character 7",
    ]


def test_reasons_are_counted_apart_the_most_frequent_first_and_one_text_needs_no_example() -> None:
    timeouts = [
        "score: did not answer within 2 s",
        "score: did not answer within 2 s",
        "score: it doesn't fit, it isn't right",
    ]
    assert lines_of(["score: ValueError: no 'a", *timeouts]) == [
        "  2 x reward_error: score: did not answer within N s",
        "      e.g. reward_error: score: did not answer within 2 s",
        "  1 x reward_error: score: ValueError: no '...'",
        "      e.g. reward_error: score: ValueError: no 'a",
        "  1 x reward_error: score: it doesn't fit, it isn't right",
    ]


def test_replies_that_stand_in_a_message_unquoted_are_not_a_reason_each() -> None:
    words = ("red", "green", "blue", "white", "black", "brown")
    assert lines_of([f"score: ValueError: {word} is no number" for word in words]) == [
        "  6 x reward_error: score: ValueError",
        "      e.g. reward_error: score: ValueError: red is no number",
    ]


def test_what_does_not_fit_is_counted() -> None:
    words = ("red", "green", "blue", "white", "black", "brown", "brown")
    lines = lines_of([f"score: {word}" for word in words])
    assert lines[0] == "  2 x reward_error: score: brown"
    assert lines[-1] == "  1 for 1 other reason"
    assert len(lines) == 6


def test_the_engine_is_named_where_it_is_what_fails() -> None:
    failed = [failed_trajectory(kind=FailureKind.ENGINE_ERROR)] * 2
    with pytest.raises(EngineError, match=rf"The first is trajectory {failed[0].prompt_uid}/0, turn 0\. Fix the cause"):
        check_failures(failed, 2, limit=0.5)
    check_failures(failed, 4, limit=0.5)


def test_failures_that_are_all_alike_end_a_run_of_which_nothing_succeeded_yet() -> None:
    message = "score: KeyError: 'answr' at my_code.py:7 in score: return row['answr']"
    failed = [failed_trajectory(kind=FailureKind.REWARD_ERROR, message=message)] * 8
    with pytest.raises(
        SkyrlTrainError, match=r"each of the first 8 trajectories failed alike \(256 were to be made\)"
    ) as error:
        check_failures(failed, 256, limit=0.5, none_succeeded=True)
    assert f"e.g. reward_error: {message}" in str(error.value)
    assert str(error.value).endswith("or set environment.max_failed_fraction=1 to carry on without them.")
    check_failures(failed[:7], 256, limit=0.5, none_succeeded=True)
    check_failures(failed, 256, limit=0.5, none_succeeded=False)
    check_failures(failed, 256, limit=1.0, none_succeeded=True)
    other = failed_trajectory(kind=FailureKind.REWARD_ERROR, message="score: ValueError: 4")
    check_failures([*failed, other], 256, limit=0.5, none_succeeded=True)
    late = failed_trajectory(kind=FailureKind.REWARD_TIMEOUT, message="score: did not answer within 2 s")
    check_failures([late] * 20, 256, limit=0.5, none_succeeded=True)
