from __future__ import annotations

import json

import pytest

from skyrl_train.algorithms.dynamic_sampling import SamplingState, sample_dynamically
from skyrl_train.config.algorithm import FilterConfig
from skyrl_train.errors import CheckpointError, DataError
from skyrl_train.types import Prompt, RolloutBatch
from tests.support.fakes_trainer import make_trajectory, make_turn

FILTER = FilterConfig(dynamic_sampling="filter", dynamic_sampling_max_batches=3)
REPLACE = FilterConfig(dynamic_sampling="replace", dynamic_sampling_max_batches=2, replace_min_share=0.4)


def generated(**rewards: tuple[float, float]) -> RolloutBatch:
    """Two samples of one turn for each prompt."""
    trajectories = []
    for uid, pair in rewards.items():
        for sample, reward in enumerate(pair):
            turn = make_turn((1,), (2, 3), reward=reward, response_text=f"{uid}{sample}")
            trajectories.append(make_trajectory(turn, uid=uid, sample=sample))
    prompts = tuple(Prompt(uid=uid, messages=({"role": "user", "content": uid},), extras={"k": 1}) for uid in rewards)
    return RolloutBatch(prompts=prompts, trajectories=tuple(trajectories), n_samples_per_prompt=2)


GOOD, BAD = (1.0, 0.0), (1.0, 1.0)


def uids(rollouts: RolloutBatch | None) -> list[str]:
    assert rollouts is not None
    return [prompt.uid for prompt in rollouts.prompts]


def test_without_it_the_generated_batch_is_the_training_batch() -> None:
    batch = generated(a=BAD)
    assert sample_dynamically(SamplingState(), batch, num_prompts=1, config=FilterConfig()).rollouts is batch


class TestFilter:
    def test_prompts_with_differing_rewards_are_collected_over_batches(self) -> None:
        first = sample_dynamically(SamplingState(), generated(a=GOOD, b=BAD), num_prompts=2, config=FILTER)
        assert first.rollouts is None
        second = sample_dynamically(first.state, generated(c=BAD, d=GOOD), num_prompts=2, config=FILTER)
        assert uids(second.rollouts) == ["a", "d"]
        assert second.rollouts is not None
        assert [one.turns[0].response_text for one in second.rollouts.trajectories] == ["a0", "a1", "d0", "d1"]
        assert second.state == SamplingState()
        assert second.metrics == {
            "sampling/batches": 2.0,
            "sampling/prompts_seen": 4.0,
            "sampling/prompts_differing_fraction": 0.5,
        }

    def test_what_is_over_is_dropped(self) -> None:
        found = sample_dynamically(SamplingState(), generated(a=GOOD, b=GOOD, c=GOOD), num_prompts=2, config=FILTER)
        assert uids(found.rollouts) == ["a", "b"]

    def test_a_prompt_that_comes_again_is_kept_once(self) -> None:
        first = sample_dynamically(SamplingState(), generated(a=GOOD), num_prompts=2, config=FILTER)
        second = sample_dynamically(first.state, generated(a=GOOD, b=GOOD), num_prompts=2, config=FILTER)
        assert uids(second.rollouts) == ["a", "b"]

    def test_it_gives_up_with_a_reason(self) -> None:
        state = SamplingState()
        for _ in range(2):
            state = sample_dynamically(state, generated(a=BAD, b=BAD), num_prompts=1, config=FILTER).state
        with pytest.raises(DataError, match=r"3 generated batches \(6 prompts\) gave 0 prompts"):
            sample_dynamically(state, generated(a=BAD, b=BAD), num_prompts=1, config=FILTER)

    def test_a_saved_and_loaded_state_goes_on_the_same(self) -> None:
        state = sample_dynamically(SamplingState(), generated(a=GOOD, b=BAD), num_prompts=2, config=FILTER).state
        loaded = SamplingState.from_json(json.loads(json.dumps(state.to_json())))
        assert loaded == state
        following = [sample_dynamically(s, generated(d=GOOD), num_prompts=2, config=FILTER) for s in (state, loaded)]
        assert following[0] == following[1]


class TestReplace:
    def test_other_prompts_become_copies_under_their_own_uids(self) -> None:
        batch = generated(a=BAD, b=GOOD, c=BAD, d=GOOD, e=BAD)
        found = sample_dynamically(SamplingState(), batch, num_prompts=5, config=REPLACE)
        assert uids(found.rollouts) == ["b#copy1", "b", "d#copy1", "d", "b#copy2"]
        assert found.rollouts is not None
        assert [one.prompt_uid for one in found.rollouts.trajectories][::2] == uids(found.rollouts)
        assert found.rollouts.trajectories[0].turns == batch.trajectories[2].turns

    def test_too_few_give_another_batch_and_then_an_error(self) -> None:
        batch = generated(a=BAD, b=BAD, c=GOOD)
        first = sample_dynamically(SamplingState(), batch, num_prompts=3, config=REPLACE)
        assert first.rollouts is None
        assert first.state == SamplingState(num_batches=1, num_prompts_seen=3)
        why = r"2 generated batches \(6 prompts\), in none of which .*replace_min_share=0.4 of the prompts have .*=none"
        with pytest.raises(DataError, match=why):
            sample_dynamically(first.state, batch, num_prompts=3, config=REPLACE)


@pytest.mark.parametrize("content", [{}, {"n_samples_per_prompt": 2, "kept": [{"uid": "a"}], "num_batches": 1}])
def test_a_damaged_state_is_refused(content: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="dynamic sampling's state is damaged"):
        SamplingState.from_json(content)
