"""A judge that fails costs the trajectories that it was asked about, and changes nothing for the others: in float64."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.judge.stub_judge import MODEL, StubJudge, points
from skyrl_train.batch.steps import close_mini_batch
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.errors import EngineError, SkyrlTrainError
from skyrl_train.learner import PolicyLearner
from skyrl_train.rollout import RolloutGenerator
from skyrl_train.runs import assembler
from skyrl_train.trainers import steps
from skyrl_train.types import FailureKind, GenerationRequest, RolloutBatch, SamplingParams
from tests.support.fakes import FakeEngine, make_prompts, make_tiny_model, make_tokenizer
from tests.support.learner_cases import make_learner

TOKENIZER = make_tokenizer()
NUM_PROMPTS, NUM_SAMPLES = 6, 4


def place(request: GenerationRequest) -> tuple[int, int]:
    prompt, sample = request.request_id.split("-")[2:4]
    return int(prompt), int(sample)


def answer(prompt: int, sample: int) -> str:
    """All different, with one to five different digits."""
    digits = [(prompt + digit) % 10 for digit in range(1 + (prompt * 3 + sample * 2) % 5)]
    return " ".join(map(str, [*digits, *[digits[0]] * (NUM_SAMPLES * prompt + sample)]))


@pytest.fixture
def judge() -> Iterator[StubJudge]:
    server = StubJudge()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def roll_out(judge: StubJudge, *, absent: frozenset[tuple[int, int]] = frozenset()) -> RolloutBatch:
    """Trajectories of a scripted engine, of which `absent` have not even begun."""

    def say(request: GenerationRequest) -> list[int] | Exception:
        where = place(request)
        return EngineError("gone") if where in absent else [*TOKENIZER.encode(answer(*where)), 3]

    # What a judge once said it keeps: another one is made for each share of failures.
    reward = {"_target_": "judge", "url": judge.url, "model": MODEL, "max_retries": 0, "timeout_s": 60 + judge.failing}
    environment = EnvironmentConfig(env_class="single_turn", reward=reward)
    generator = RolloutGenerator(FakeEngine(say), TOKENIZER, GeneratorConfig(max_turns=1), environment, seed=0)
    try:
        return generator.generate(
            make_prompts(NUM_PROMPTS),
            n_samples_per_prompt=NUM_SAMPLES,
            sampling=SamplingParams(),
            global_step=1,
            purpose="train",
        )
    finally:
        generator.close()


@pytest.fixture
def learner(tmp_path: Path) -> PolicyLearner:
    make_tiny_model().save_pretrained(tmp_path)
    return make_learner(tmp_path, double=True)


def gradient(learner: PolicyLearner, rollouts: RolloutBatch) -> Tensor:
    # With two epochs the policy scores the batch before the first.
    sizes = {"train_batch_size": NUM_PROMPTS, "policy_mini_batch_size": NUM_PROMPTS}
    trainer = TrainerConfig(**sizes, update_epochs_per_batch=2)
    config = Config(trainer=trainer, generator=GeneratorConfig(n_samples_per_prompt=NUM_SAMPLES))
    batch = assembler(config)(rollouts, step=1, weight_version=0)
    batch = steps.score(batch, steps.Learners(policy=learner, reference=None, critic=None), trainer)
    batch = steps.estimate(batch, trainer.algorithm, kl_coef=0.0, seed=0)
    mini_batch = close_mini_batch(batch, loss_reduction="token_mean", max_sequence_length_for_norm=None)
    learner.engine.zero_grad()
    learner.forward_backward(mini_batch)
    return flat(learner)


def flat(learner: PolicyLearner) -> Tensor:
    found = [parameter.grad for parameter in learner.engine.model.parameters() if parameter.grad is not None]
    return torch.cat([each.flatten() for each in found]).clone()


def written_out(learner: PolicyLearner, rollouts: RolloutBatch) -> Tensor:
    """GRPO of the judged trajectories alone: their group's mean and deviation, and their tokens, are all there is."""
    judged = [one for one in rollouts.trajectories if not one.failed]
    terms, num_tokens = [], 0
    for prompt in {one.prompt_uid for one in judged}:
        group = [one for one in judged if one.prompt_uid == prompt]
        rewards = torch.tensor([one.reward for one in group], dtype=torch.float64)
        spread = rewards.std() if len(group) > 1 and float(rewards.max() - rewards.min()) > 0 else torch.tensor(1.0)
        for advantage, one in zip((rewards - rewards.mean()) / spread, group):
            ids = torch.tensor(one.contexts()[-1][None].astype("int64"))
            start = one.prompt_lengths()[0]
            log_probs = learner.engine.model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0, start - 1 : -1]
            terms.append(-advantage * log_probs.gather(-1, ids[0, start:, None]).sum())
            num_tokens += ids.shape[1] - start
    learner.engine.zero_grad()
    (torch.stack(terms).sum() / num_tokens).backward()  # type: ignore[no-untyped-call]
    return flat(learner)


def test_rewards_are_those_of_the_judge_and_its_failures_are_no_rewards(judge: StubJudge) -> None:
    judge.failing = 30
    rollouts = roll_out(judge)
    failed = [one for one in rollouts.trajectories if one.failed]
    assert 0.2 <= len(failed) / len(rollouts.trajectories) <= 0.4
    for one in failed:
        assert one.failure is not None
        assert one.failure.kind is FailureKind.REWARD_ERROR
        assert "judge at http" in one.failure.message
        assert "status 400" in one.failure.message
    for index, one in enumerate(rollouts.trajectories):
        said = answer(*divmod(index, NUM_SAMPLES))
        assert one.turns[0].response_token_ids.tolist() == [*TOKENIZER.encode(said), 3]
        assert one.failed or one.reward == points(said) / 10


@pytest.mark.slow
def test_what_a_judge_does_not_score_changes_no_gradient_of_the_others(
    judge: StubJudge, learner: PolicyLearner
) -> None:
    whole = gradient(learner, roll_out(judge))
    judge.failing = 30
    rollouts = roll_out(judge)
    found = gradient(learner, rollouts)
    assert float((found - whole).abs().max()) > 1e-3
    failed = {divmod(index, NUM_SAMPLES) for index, one in enumerate(rollouts.trajectories) if one.failed}
    judge.failing = 0
    without = gradient(learner, roll_out(judge, absent=frozenset(failed)))
    assert float((found - without).abs().max()) < 1e-10
    expected = written_out(learner, rollouts)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-6


def test_a_judge_that_scores_nothing_fails_the_step_by_name(judge: StubJudge) -> None:
    judge.failing = 100
    with pytest.raises(SkyrlTrainError, match=r"status 400: .*this judge does not like the answer"):
        roll_out(judge)
