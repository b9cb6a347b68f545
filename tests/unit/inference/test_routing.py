"""Which engine answers."""

from __future__ import annotations

from skyrl_train.inference.routing import PrefixRouter

PROMPT = tuple(range(100))
OTHER = tuple(range(500, 600))


def test_samples_of_one_prompt_and_later_turns_go_to_the_same_engine() -> None:
    router = PrefixRouter(max_lead=8)
    first = router.choose(PROMPT, [0, 0], {0, 1})
    assert router.choose(PROMPT, [1, 0], {0, 1}) == first
    assert router.choose((*PROMPT, 1, 2, 3), [2, 0], {0, 1}) == first


def test_an_unknown_prompt_goes_to_the_least_busy_engine() -> None:
    router = PrefixRouter(max_lead=8)
    assert router.choose(PROMPT, [3, 1, 2], {0, 1, 2}) == 1
    assert router.choose(OTHER, [3, 2, 0], {0, 1, 2}) == 2


def test_an_engine_that_is_far_ahead_gets_no_more() -> None:
    router = PrefixRouter(max_lead=4)
    assert router.choose(PROMPT, [0, 0], {0, 1}) == 0
    assert router.choose(PROMPT, [3, 0], {0, 1}) == 0
    assert router.choose(PROMPT, [4, 0], {0, 1}) == 1


def test_a_dead_engine_is_not_chosen_however_well_it_knew_the_prompt() -> None:
    router = PrefixRouter(max_lead=4)
    assert router.choose(PROMPT, [0, 0], {0, 1}) == 0
    assert router.choose(PROMPT, [0, 9], {1}) == 1


def test_after_new_weights_nothing_is_known() -> None:
    router = PrefixRouter(max_lead=8)
    router.choose(PROMPT, [0, 5], {0, 1})
    router.forget()
    assert router.choose(PROMPT, [5, 0], {0, 1}) == 1
