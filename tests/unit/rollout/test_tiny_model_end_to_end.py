"""The bundled model on the bundled problems: engine, agent loop, tokens and rewards together."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig, ModelConfig
from skyrl_train.data import load_prompts
from skyrl_train.inference import HFEngine
from skyrl_train.model import load_causal_lm, load_tokenizer
from skyrl_train.rollout.generator import RolloutGenerator
from skyrl_train.types import Outcome, RolloutBatch, SamplingParams, Trajectory

NUM_PROMPTS, NUM_SAMPLES = 12, 8


def roll_out(*, steps: tuple[int, ...] = (1,)) -> RolloutBatch:
    """The last of `steps`, with a new engine."""
    tokenizer = load_tokenizer(ModelConfig())
    engine = HFEngine(load_causal_lm(ModelConfig(), "cpu"), tokenizer, max_batch_size=64)
    generator = RolloutGenerator(engine, tokenizer, GeneratorConfig(), EnvironmentConfig(), seed=0)
    prompts = load_prompts(["builtin:word_problems/train"], limit=NUM_PROMPTS)
    try:
        return [
            generator.generate(
                prompts,
                n_samples_per_prompt=NUM_SAMPLES,
                sampling=SamplingParams(max_generate_length=64),
                global_step=step,
                purpose="train",
            )
            for step in steps
        ][-1]
    finally:
        generator.close()
        engine.close()


@pytest.fixture(scope="module")
def rollouts() -> RolloutBatch:
    return roll_out()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelConfig())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_causal_lm(ModelConfig(), "cpu").eval()


def with_truth(rollouts: RolloutBatch) -> Iterator[tuple[Trajectory, str]]:
    for index, trajectory in enumerate(rollouts.trajectories):
        extras = rollouts.prompts[index // NUM_SAMPLES].extras
        yield trajectory, extras["reward_spec"]["ground_truth"]


def test_nothing_fails_and_nothing_is_lost(rollouts: RolloutBatch) -> None:
    assert len(rollouts.trajectories) == NUM_PROMPTS * NUM_SAMPLES
    assert {trajectory.outcome for trajectory in rollouts.trajectories} == {Outcome.DONE}


def test_right_answers_and_no_others_are_rewarded(rollouts: RolloutBatch) -> None:
    num_right = 0
    for trajectory, truth in with_truth(rollouts):
        for index, turn in enumerate(trajectory.turns):
            right = re.fullmatch(rf"(?s).*#### {truth}\s*", turn.response_text) is not None
            assert turn.reward == ((1.0, 0.5)[index] if right else 0.0)
            num_right += right
    assert 0 < num_right < len(rollouts.trajectories)


def test_a_second_turn_continues_the_first_token_by_token(
    rollouts: RolloutBatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    retried = [trajectory for trajectory in rollouts.trajectories if len(trajectory.turns) == 2]
    assert retried
    for trajectory in retried:
        first, second = trajectory.turns
        assert (first.parent, second.parent) == (None, 0)
        ending = "<|im_end|>\n<|im_start|>user\nWrong. Try again.<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(trajectory.prompt_token_ids(1)).endswith(first.response_text + ending)


def test_recorded_logprobs_are_those_of_the_model(rollouts: RolloutBatch, model: PreTrainedModel) -> None:
    for trajectory in rollouts.trajectories[:: NUM_SAMPLES + 1]:
        for turn, prompt_length, context in zip(trajectory.turns, trajectory.prompt_lengths(), trajectory.contexts()):
            tokens = torch.tensor([context.tolist()])
            with torch.no_grad():
                logprobs = model(tokens, use_cache=False).logits[0].log_softmax(dim=-1)
            start = prompt_length - 1
            expected = [float(logprobs[start + t, token]) for t, token in enumerate(turn.response_token_ids)]
            assert list(turn.response_logprobs) == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_a_step_is_the_same_whether_or_not_others_came_before_it(rollouts: RolloutBatch) -> None:
    second = roll_out(steps=(2,))
    assert roll_out(steps=(1, 2)) == second
    assert second != rollouts
