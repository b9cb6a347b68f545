"""Which prompts a step takes by how often they are solved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from skyrl_train.config.data import CurriculumConfig
from skyrl_train.data.curriculum import Curriculum, SolveRates, solve_rates
from skyrl_train.types import (
    Failure,
    FailureKind,
    Outcome,
    Prompt,
    RolloutBatch,
    StopReason,
    Trajectory,
    Turn,
    VersionRun,
    token_ids,
)

PROMPTS = [Prompt(uid=f"p{index}", messages=()) for index in range(40)]
CONFIG = CurriculumConfig(enabled=True)


def curriculum(config: CurriculumConfig = CONFIG, size: int = 8, seed: int = 0) -> Curriculum:
    return Curriculum(datasets=[PROMPTS], slots=lambda _: [0] * size, seed=seed, config=config)


def uids(prompts: Sequence[Prompt]) -> list[str]:
    return [prompt.uid for prompt in prompts]


def sample(prompt: Prompt, index: int, reward: float | None) -> Trajectory:
    if reward is None:
        failure = Failure(kind=FailureKind.ENGINE_ERROR, message="x", turn_index=0)
        return Trajectory(prompt_uid=prompt.uid, sample_index=index, turns=(), outcome=Outcome.FAILED, failure=failure)
    turn = Turn(
        added_token_ids=token_ids((1,)),
        response_token_ids=token_ids((2,)),
        response_text="x",
        reward=reward,
        stop_reason=StopReason.STOP,
        weight_versions=(VersionRun(0, 0),),
    )
    return Trajectory(prompt_uid=prompt.uid, sample_index=index, turns=(turn,), outcome=Outcome.DONE)


def rollouts(rewards: dict[int, tuple[float | None, float | None]]) -> RolloutBatch:
    prompts = tuple(PROMPTS[number] for number in rewards)
    trajectories = [
        sample(PROMPTS[number], i, reward) for number, both in rewards.items() for i, reward in enumerate(both)
    ]
    return RolloutBatch(prompts=prompts, trajectories=tuple(trajectories), n_samples_per_prompt=2)


def test_prompts_are_first_tried_in_the_order_of_the_epoch() -> None:
    assert uids(curriculum().batch({}, 0, 1)) == [f"p{index}" for index in range(8)]


def test_prompts_in_flight_are_not_taken_where_there_are_enough_others() -> None:
    one = curriculum()
    busy = [f"p{index}" for index in range(30)]
    assert uids(one.batch({}, 1, 1, busy=busy)) == [f"p{index}" for index in range(30, 38)]
    assert len(set(uids(one.batch({}, 1, 1, busy=[f"p{index}" for index in range(33)])))) == 8


def test_prompts_are_found_by_their_uids() -> None:
    assert curriculum().named(["p7", "p2"]) == [PROMPTS[7], PROMPTS[2]]


def test_the_solve_rate_is_the_mean_of_rewards_cut_to_0_and_1_without_failed_ones() -> None:
    found = solve_rates(rollouts({0: (1.0, 0.0), 1: (5.0, None), 2: (-3.0, 0.5), 3: (None, None)}))
    assert [(prompt.uid, rate) for prompt, rate in found] == [("p0", 0.5), ("p1", 1.0), ("p2", 0.25)]


def test_an_estimate_moves_towards_the_newest_trial() -> None:
    one = curriculum(replace(CONFIG, newest=0.25))
    rates = one.after({}, rollouts({0: (1.0, 1.0)}), 3)
    assert rates == {"p0": (1.0, 3)}
    assert one.after(rates, rollouts({0: (0.0, 0.0)}), 7) == {"p0": (0.75, 7)}
    assert rates == {"p0": (1.0, 3)}


def test_a_batch_is_drawn_from_prompts_near_the_target_and_a_share_of_new_ones() -> None:
    half = {f"p{index}": (0.5, 1) for index in range(10)}
    never = {f"p{index}": (0.0, 1) for index in range(10, 20)}
    rare = {f"p{index}": (0.1, 1) for index in range(20, 30)}
    rates: SolveRates = {**half, **never, **rare}
    drawn = Counter(uid for position in range(200) for uid in uids(curriculum().batch(rates, position, 2)))
    assert all(drawn[uid] == 200 for uid in ("p30", "p31"))
    assert all(uid not in drawn for uid in never)
    assert min(drawn[uid] for uid in half) > 3 * max(drawn[uid] for uid in rare)


def test_a_solved_prompt_rests_and_is_then_tried_again() -> None:
    one = curriculum(replace(CONFIG, rest_steps=5, exploration=0.0), size=2)
    rates: SolveRates = {"p0": (1.0, 10), **{f"p{index}": (0.5, 1) for index in range(1, 40)}}
    assert one.metrics(rates, PROMPTS[:1], 15)["curriculum/resting"] == 1
    assert one.metrics(rates, PROMPTS[:1], 16)["curriculum/resting"] == 0
    all_rest: SolveRates = {prompt.uid: (1.0, 40 + index) for index, prompt in enumerate(PROMPTS)}
    assert uids(one.batch(all_rest, 0, 42)) == ["p0", "p1"], "those that have rested longest"


def test_a_batch_has_no_prompt_twice_and_is_a_function_of_state_seed_and_position() -> None:
    rates: SolveRates = {f"p{index}": (index / 40, 1) for index in range(36)}
    for position in range(50):
        batch = uids(curriculum().batch(rates, position, 2))
        assert len(set(batch)) == 8
        assert batch == uids(curriculum().batch(dict(reversed(rates.items())), position, 2))
    others = [uids(curriculum(seed=seed).batch(rates, position, 2)) for seed, position in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(each) for each in others}) == 3


def test_each_data_set_of_a_mix_keeps_its_slots() -> None:
    mixed = Curriculum(
        datasets=[PROMPTS[:20], PROMPTS[20:]], slots=lambda position: [0, 1, 0, position % 2], seed=0, config=CONFIG
    )
    rates: SolveRates = {prompt.uid: (0.5, 1) for prompt in PROMPTS}
    for position in range(4):
        numbers = [int(uid[1:]) >= 20 for uid in uids(mixed.batch(rates, position, 2))]
        assert numbers == [False, True, False, bool(position % 2)]
