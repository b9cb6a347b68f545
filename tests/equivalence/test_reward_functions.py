"""Rewards of functions and the gradient, in float64: failures change nothing for the others, rows nothing at all."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms import estimate_advantages
from skyrl_train.batch.steps import close_mini_batch
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.errors import EngineError
from skyrl_train.learner import PolicyLearner
from skyrl_train.rollout import RolloutGenerator
from skyrl_train.runs import assembler, trainer_of
from skyrl_train.trainers import steps
from skyrl_train.types import GenerationRequest, RolloutBatch, SamplingParams
from tests.support.fake_environments import FAKE_ENVIRONMENT, FakeEnvironment, go_on_with
from tests.support.fakes import FakeEngine, make_prompts, make_tiny_model, make_tokenizer
from tests.support.learner_cases import make_learner

TOKENIZER = make_tokenizer()
NUM_PROMPTS, NUM_SAMPLES = 5, 4
HERE = "tests.equivalence.test_reward_functions"
REWARDS: tuple[Any, ...] = (
    f"{HERE}:share_of_ones",
    {"_target_": f"{HERE}:two", "weight": {"short": 0.01, "many": 2.0}},
    {"_target_": f"{HERE}:plain", "weight": 0.5, "normalize": "none"},
)


def share_of_ones(completion: str) -> float:
    return completion.count("1") / len(completion)


def two(completion: str) -> dict[str, float]:
    return {"short": 100.0 / len(completion), "many": float(len(set(completion)))}


def plain(response_length: int) -> float:
    return float(response_length % 3)


def fails_for_some(completion: str) -> float:
    if is_lost(completion):
        raise ValueError("no rule for it")
    return share_of_ones(completion)


def is_lost(completion: str) -> bool:
    """So it is for 6 of the 20 answers."""
    return completion.count(" ") % 10 in (3, 5, 6)


def answer(prompt: int, sample: int, turn: int) -> str:
    return " ".join(["1" if (prompt + sample) % 3 else "2", "4"] + ["1", "3"] * turn + ["5"] * (prompt + 2 * sample))


def roll_out(*rewards: Any, turns: int = 1, without_lost: bool = False) -> RolloutBatch:
    def say(request: GenerationRequest) -> list[int] | Exception:
        text = answer(*map(int, request.request_id.split("-")[2:5]))
        return EngineError("gone") if without_lost and is_lost(text) else [*TOKENIZER.encode(text), 3]

    FakeEnvironment.reset()
    done = {"observations": [], "reward": 0.5, "done": True, "metadata": {}}
    env_class = FAKE_ENVIRONMENT if turns > 1 else "single_turn"
    environment = EnvironmentConfig(env_class=env_class, isolation="thread", rewards=rewards)
    settings = GeneratorConfig(max_turns=turns, max_context_length=2048)
    generator = RolloutGenerator(FakeEngine(say), TOKENIZER, settings, environment, seed=0)
    try:
        prompts = make_prompts(NUM_PROMPTS, steps=[go_on_with("Try again", 0.25)] * (turns - 1) + [done])
        return generator.generate(
            prompts, n_samples_per_prompt=NUM_SAMPLES, sampling=SamplingParams(), global_step=1, purpose="train"
        )
    finally:
        generator.close()


def config_of(*rewards: Any, rows: str = "per_trajectory", estimator: str = "grpo") -> Config:
    sizes = {"train_batch_size": NUM_PROMPTS, "policy_mini_batch_size": NUM_PROMPTS}
    algorithm = AlgorithmConfig(advantage_estimator=estimator)
    return Config(
        trainer=TrainerConfig(**sizes, update_epochs_per_batch=2, algorithm=algorithm),
        generator=GeneratorConfig(n_samples_per_prompt=NUM_SAMPLES, trajectory_rows=rows),
        environment=EnvironmentConfig(env_class=FAKE_ENVIRONMENT, rewards=rewards),
    )


@pytest.fixture
def learner(tmp_path: Path) -> PolicyLearner:
    make_tiny_model().save_pretrained(tmp_path)
    return make_learner(tmp_path, double=True)


def gradient(learner: PolicyLearner, rollouts: RolloutBatch, config: Config) -> Tensor:
    trainer, batch = trainer_of(config), assembler(config)(rollouts, step=1, weight_version=0)
    batch = steps.score(batch, steps.Learners(policy=learner, reference=None, critic=None), trainer)
    batch = steps.estimate(batch, trainer.algorithm, kl_coef=0.0, seed=0)
    mini_batch = close_mini_batch(batch, loss_reduction="token_mean", max_sequence_length_for_norm=None)
    learner.engine.zero_grad()
    learner.forward_backward(mini_batch)
    found = [parameter.grad for parameter in learner.engine.model.parameters() if parameter.grad is not None]
    return torch.cat([each.flatten() for each in found]).clone()


def test_a_function_that_fails_for_a_third_changes_no_gradient_of_the_others(learner: PolicyLearner) -> None:
    rollouts = roll_out(f"{HERE}:fails_for_some")
    failed = [one.failed for one in rollouts.trajectories]
    assert 0.25 <= sum(failed) / len(failed) <= 0.4
    found = gradient(learner, rollouts, config_of())
    without = gradient(learner, roll_out(f"{HERE}:share_of_ones", without_lost=True), config_of())
    assert float(found.abs().max()) > 1e-3
    assert float((found - without).abs().max()) < 1e-10
    everything = gradient(learner, roll_out(f"{HERE}:share_of_ones"), config_of())
    assert float((found - everything).abs().max()) > 1e-3


def test_components_give_one_gradient_in_one_row_and_in_a_row_for_each_turn(learner: PolicyLearner) -> None:
    rollouts = roll_out(*REWARDS, turns=2)
    one = gradient(learner, rollouts, config_of(*REWARDS, estimator="gdpo"))
    split = gradient(learner, rollouts, config_of(*REWARDS, estimator="gdpo", rows="per_turn"))
    assert float(one.abs().max()) > 1e-3
    assert float((one - split).abs().max()) < 1e-10


def test_components_of_the_list_are_normalised_apart_as_the_formula_says() -> None:
    rollouts = roll_out(*REWARDS, turns=2)
    config = config_of(*REWARDS, estimator="gdpo")
    batch = assembler(config)(rollouts, step=1, weight_version=0)
    batch = estimate_advantages(batch, trainer_of(config).algorithm)
    weights = {"share_of_ones": 1.0, "short": 0.01, "many": 2.0, "plain": 0.5, "environment": 1.0}
    totals = []
    for index, trajectory in enumerate(rollouts.trajectories):
        start = index - index % NUM_SAMPLES
        group = rollouts.trajectories[start : start + NUM_SAMPLES]
        total = 0.0
        for name, weight in weights.items():
            values = [float(torch.tensor(one.rewards[name], dtype=torch.float32)) for one in group]
            spread = statistics.stdev(values) if name not in ("plain", "environment") else 1.0
            centred = values[index - start] - statistics.fmean(values)
            total += weight * centred / spread if max(values) > min(values) else 0.0
        totals += [total] * sum(len(turn.response_token_ids) for turn in trajectory.turns)
    mean = statistics.fmean(totals)
    deviation = math.sqrt(sum((total - mean) ** 2 for total in totals) / (len(totals) - 1))
    expected = torch.tensor([(total - mean) / deviation for total in totals], dtype=torch.float64)
    found = batch["advantages"][batch["loss_mask"]].double()
    assert float((found - expected).abs().max()) < 1e-5
