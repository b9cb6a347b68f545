"""A tree of turns has one gradient: the sum over its sampled tokens, each in its own context and each of them once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.layouts import hosts_of, prefix_order
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.learner import PolicyLearner
from skyrl_train.rollout import ChatTokens
from skyrl_train.rollout.agents import Session
from skyrl_train.runs import assembler
from skyrl_train.types import GenerationRequest, Outcome, Prompt, RolloutBatch, Trajectory
from tests.support.agent_cases import asked, episode, origin, user
from tests.support.fakes import FakeEngine, make_tokenizer
from tests.support.layout_cases import close, flat_gradient, use_layout
from tests.support.learner_cases import make_learner, save_tiny_model

TOLERANCE = 1e-10
TOKENIZER = make_tokenizer()
LAYOUTS = [("padded", False), ("packed", True), ("prefix_shared", False), ("auto", True)]
"""With and without turns merged into the rows of the turns that go on from them."""


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> PolicyLearner:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    return make_learner(folder, double=True, algorithm=AlgorithmConfig(kl_loss_coef=0.0))


def sampled(request: GenerationRequest) -> list[int]:
    """Some words, and often the end of the turn: 3 is `<|im_end|>`."""
    draw = random.Random(request.seed)
    return [*draw.choices(range(8, 30), k=draw.randint(1, 4)), *([3] if draw.random() < 0.8 else [])]


def tree(sample: int) -> Trajectory:
    """A conversation with forks, a sub-agent of two turns and a history that was rewritten."""

    async def run() -> Trajectory:
        base = episode(FakeEngine(lambda request: sampled(request)), room=120)
        session = Session(_with_words(base, sample))

        async def say(*messages: dict[str, str]) -> list[dict[str, str]]:
            request = asked(*messages)
            answered = await session.ask(request, origin(request))
            session.deliver(answered)
            return [*messages, dict(answered.message)]

        main = await say(user("1 + 2?"))
        helper = await say({"role": "system", "content": "Try"}, user("3?"))
        await asyncio.gather(*(say(*main, user(f"{digit}?")) for digit in range(2)))
        await say(*helper, user("again"))
        await say(user("1 + 2?"), {"role": "assistant", "content": "STOP STOP"}, user("again"))
        deep = await say(*main, user("Wrong"))
        await say(*deep, user("Wrong"))
        turns = session.kept().turns
        return Trajectory(prompt_uid="p", sample_index=sample, turns=turns, outcome=Outcome.DONE)

    return asyncio.run(asyncio.wait_for(run(), 60))


def _with_words(base: object, sample: int) -> object:
    from dataclasses import replace

    return replace(base, chat=ChatTokens(TOKENIZER), job=replace(base.job, sample_index=sample), parse_calls=None)


def batch_of(trajectories: Sequence[Trajectory]) -> TrainingInputBatch:
    trainer = TrainerConfig(train_batch_size=1, policy_mini_batch_size=1, critic_mini_batch_size=1)
    prompts = (Prompt(uid="p", messages=(user("1 + 2?"),)),)
    rollouts = RolloutBatch(prompts=prompts, trajectories=tuple(trajectories), n_samples_per_prompt=len(trajectories))
    batch = assembler(Config(trainer=trainer), rows="per_turn")(rollouts, step=1, weight_version=7)
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(len(batch["input_ids"]), generator=generator, dtype=torch.float64)
    return batch.with_columns(advantages=advantages)


def by_hand(learner: PolicyLearner, trajectories: Sequence[Trajectory], advantages: Tensor) -> tuple[Tensor, int]:
    """The gradient of the mean over sampled tokens of minus advantage times log-probability, by one plain forward for each
    turn's own path; and the number of tokens."""
    num_tokens = sum(len(turn.response_token_ids) for each in trajectories for turn in each.turns)
    model, start = learner.engine.model, 0
    learner.engine.zero_grad()
    for trajectory in trajectories:
        for index, turn in enumerate(trajectory.turns):
            path = torch.tensor([*trajectory.prompt_token_ids(index), *turn.response_token_ids])
            first = len(path) - len(turn.response_token_ids)
            logits = model(input_ids=path[None], use_cache=False).logits[0, first - 1 : -1]
            logprobs = torch.log_softmax(logits, dim=-1).gather(1, path[first:, None])[:, 0]
            weights = advantages[start + first : start + len(path)]
            (-(weights * logprobs).sum() / num_tokens).backward()
            start += len(path)
    return flat_gradient(learner), num_tokens


def test_a_tree_has_the_gradient_of_its_sampled_tokens_each_once(learner: PolicyLearner) -> None:
    trajectories = [tree(sample) for sample in range(3)]
    for trajectory in trajectories:
        parents = [turn.parent for turn in trajectory.turns]
        assert parents.count(None) >= 3  # the conversation, the sub-agent and what was rewritten
        assert max(parents.count(parent) for parent in parents if parent is not None) >= 3  # a fork
    batch = batch_of(trajectories)
    expected, num_tokens = by_hand(learner, trajectories, batch["advantages"])
    assert int(batch["loss_mask"].sum()) == num_tokens
    for layout, merge in LAYOUTS:
        use_layout(learner, layout, merge=merge)  # type: ignore[arg-type]
        scored = batch.with_columns(old_logprobs=learner.forward(batch))
        learner.forward_backward(close(scored, reduction="token_mean"))
        found = flat_gradient(learner)
        error = float((found - expected).norm() / expected.norm())
        assert error < TOLERANCE, (layout, merge, error)


def test_shared_prefixes_of_a_tree_are_computed_once() -> None:
    """The shared-prefix layout computes each node of the tree once, and turns come in an order in which merging finds what
    goes on."""
    trajectories = [tree(sample) for sample in range(3)]
    batch = batch_of(trajectories)
    rows = [row.numpy() for row in torch.split(batch["input_ids"], batch.lengths.tolist())]
    order = prefix_order(rows)
    assert sum(order.lengths) - sum(order.shared) < 0.6 * sum(order.lengths)
    goes_on = sum(turn.parent == index - 1 for each in trajectories for index, turn in enumerate(each.turns) if index)
    assert int((hosts_of(batch) != torch.arange(batch.num_rows).numpy()).sum()) == goes_on > 0
