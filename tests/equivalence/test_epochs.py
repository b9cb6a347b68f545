"""Each optimizer step of a batch compares with the policy as it was before the first of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.learner import PolicyLearner
from skyrl_train.model import load_causal_lm
from skyrl_train.trainers import steps
from tests.support.learner_cases import make_batch, make_double, make_learner, save_tiny_model

LR = 0.5
EPOCHS = 3
ALGORITHM = AlgorithmConfig(eps_clip_low=0.02, eps_clip_high=0.03)
CONFIG = Config(
    trainer=TrainerConfig(
        train_batch_size=4, policy_mini_batch_size=2, update_epochs_per_batch=EPOCHS, algorithm=ALGORITHM
    )
)
LENGTHS = [5, 9, 7, 12, 6, 8, 11, 4]
"""Two trajectories of each of four prompts; the mini-batches are the first two prompts and the last two."""
MINI_BATCHES = ((0, 4), (4, 8))


def logprobs_of_row(model: nn.Module, ids: Tensor) -> Tensor:
    """`[len - 1]`: of each token but the first."""
    logits = model(input_ids=ids.unsqueeze(0)).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)


def clipped_objective(model: nn.Module, batch: TrainingInputBatch, old: list[Tensor], rows: range) -> Tensor:
    """PPO's loss as the paper has it, averaged over the trained tokens of these rows."""
    losses = []
    for row in rows:
        start, stop = int(batch.row_offsets[row]), int(batch.row_offsets[row + 1])
        mask, advantages = batch["loss_mask"][start + 1 : stop], batch["advantages"][start + 1 : stop]
        ratio = (logprobs_of_row(model, batch["input_ids"][start:stop].long()) - old[row]).exp()
        clipped = ratio.clamp(1 - ALGORITHM.eps_clip_low, 1 + ALGORITHM.eps_clip_high)
        losses.append(-torch.minimum(ratio * advantages, clipped * advantages)[mask])
    return torch.cat(losses).mean()


def plain_update(folder: Path, batch: TrainingInputBatch, *, epochs: int = EPOCHS) -> dict[str, Tensor]:
    """All optimizer steps written out: the weights after them."""
    model = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
    make_double(model)
    ids = [batch["input_ids"][start:stop].long() for start, stop in zip(batch.row_offsets, batch.row_offsets[1:])]
    with torch.no_grad():
        old = [logprobs_of_row(model, row) for row in ids]
    for _ in range(epochs):
        for start, stop in MINI_BATCHES:
            gradients = torch.autograd.grad(
                clipped_objective(model, batch, old, range(start, stop)), list(model.parameters())
            )
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients):
                    parameter -= LR * gradient
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def unscored_batch() -> TrainingInputBatch:
    batch = make_batch(LENGTHS)
    metadata = replace(batch.metadata, policy_mini_batch_boundaries=MINI_BATCHES)
    return replace(batch, metadata=metadata).without_columns("old_logprobs")


def learner_of(folder: Path) -> PolicyLearner:
    optimizer = OptimizerConfig(name="sgd", lr=LR, weight_decay=0.0, max_grad_norm=0.0)
    learner = make_learner(folder, double=True, algorithm=ALGORITHM, optimizer=optimizer)
    learner._on_policy = True
    return learner


def test_every_epoch_compares_with_the_policy_before_the_first(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    batch = unscored_batch()
    learner = learner_of(folder)
    learners = steps.Learners(policy=learner, reference=None, critic=None)

    update = steps.update(
        steps.score(batch, learners, CONFIG.trainer), learners, CONFIG.trainer, on_progress=lambda _done, _total: None
    )

    assert update.num_optimizer_steps == EPOCHS * len(MINI_BATCHES)
    assert update.metrics["policy/clip_fraction"].value > 0.1, (
        "later epochs are far enough from the first to be clipped"
    )
    expected = plain_update(folder, batch)
    for name, weight in learner.weights():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-10)


def test_in_one_epoch_the_first_step_is_its_own_old_policy_and_is_not_scored(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    batch, learner = unscored_batch(), learner_of(folder)
    trainer = replace(CONFIG.trainer, update_epochs_per_batch=1)
    learners = steps.Learners(policy=learner, reference=None, critic=None)
    every_row = learner.forward(batch)

    scored = steps.score(batch, learners, trainer)
    first = int(batch.row_offsets[4])
    assert scored.metadata.first_scored_row == 4
    assert not scored["old_logprobs"][:first].any()
    torch.testing.assert_close(scored["old_logprobs"][first:], every_row[first:], rtol=0, atol=1e-12)
    update = steps.update(scored, learners, trainer, on_progress=lambda _done, _total: None)

    assert update.metrics["policy/clip_fraction"].value > 0.05, "the second step is far enough from the first"
    expected = plain_update(folder, batch, epochs=1)
    for name, weight in learner.weights():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-10)
