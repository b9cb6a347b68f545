"""The law's tests can fail: each fault of the field, planted into the code that trains, breaks one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skyrl_train.algorithms.losses import token_kl
from skyrl_train.batch import BatchMetadata, TrainingInputBatch
from skyrl_train.batch.planner import MemoryAwareBatchIterator, MicroBatch
from skyrl_train.batch.steps import close_mini_batch, stage
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import ModelConfig
from skyrl_train.model import load_causal_lm
from tests.support.layouts import (
    ALL_DIFFERENT,
    Step,
    assert_same_gradient,
    fixed_rollouts,
    learner_gradient,
    scored_batch,
)
from tests.support.learner_cases import make_double, save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    model = load_causal_lm(ModelConfig(path=str(save_tiny_model(tmp_path_factory.mktemp("model")))), "cpu")
    make_double(model)
    return model


def check_gradients(model: nn.Module) -> None:
    """The law on one layout of each kind."""
    algorithm = AlgorithmConfig(kl_loss_coef=0.1, normalize_advantages=True)
    for reduction in ("token_mean", "sequence_mean"):
        step = Step(algorithm=replace(algorithm, loss_reduction=reduction))
        expected = learner_gradient(model, step, fixed_rollouts())
        for layout in ALL_DIFFERENT:
            assert_same_gradient(learner_gradient(model, step, fixed_rollouts(), layout), expected)


def check_metadata(model: nn.Module) -> None:
    """Every part of a batch says what is true of its own rows."""
    batch = scored_batch(fixed_rollouts(), step_wise=True)
    staged = stage(batch.slice(0, 5), 2)
    parts = [batch.slice(2, 5), batch.take([4, 1]), batch.pad_rows(2), *staged.shards]
    for part in [*parts, TrainingInputBatch.cat([batch.slice(0, 3), batch.slice(3, batch.num_rows)])]:
        metadata = part.metadata
        assert len(metadata.uids) == part.num_rows
        for ends in (metadata.prompt_end_indices, [stop for _, stop in metadata.policy_mini_batch_boundaries or ()]):
            assert not ends or ends[-1] == part.num_rows


def row_mean_kl(patch: pytest.MonkeyPatch) -> None:
    """The KL term is a mean over the rows of the micro-batch."""

    def planted(name: str, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, **settings: Any) -> Tensor:
        tokens = mask.sum(1, keepdim=True).clamp(min=1)
        return token_kl(name, logprobs, ref_logprobs, mask, **settings) / (tokens * mask.shape[0])

    patch.setattr("skyrl_train.learner.policy.token_kl", planted)


def unmasked_mean(patch: pytest.MonkeyPatch) -> None:
    """Advantages are whitened with a mean over every token, prompts and padding included."""

    def planted(values: Tensor, mask: Tensor, **_: object) -> Tensor:
        return torch.where(mask, (values - values.mean()) / values[mask].std(), 0.0)

    patch.setattr("skyrl_train.batch.steps.minibatch.whiten", planted)


def denominators_per_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """Each micro-batch divides by its own tokens."""

    iterate = MemoryAwareBatchIterator.iterate

    def planted(*arguments: object, **settings: object) -> Iterator[MicroBatch]:
        for part in iterate(*arguments, **settings):  # type: ignore[arg-type]
            closed = close_mini_batch(part.batch, loss_reduction="token_mean", max_sequence_length_for_norm=1)
            yield replace(part, batch=closed.batch)

    patch.setattr(MemoryAwareBatchIterator, "iterate", planted)


def dummy_rows_counted(patch: pytest.MonkeyPatch) -> None:
    """Dummy rows are rows like others."""
    pad_rows = TrainingInputBatch.pad_rows

    def planted(self: TrainingInputBatch, count: int, *, uid: str | None = None) -> TrainingInputBatch:
        padded = pad_rows(self, count, uid=uid)
        mask, is_padding = padded["loss_mask"].clone(), padded["is_padding"].clone()
        mask[self.num_tokens + 1 :: 2], is_padding[self.num_rows :] = True, False
        return padded.with_columns(loss_mask=mask, is_padding=is_padding)

    patch.setattr(TrainingInputBatch, "pad_rows", planted)


def copied_metadata(patch: pytest.MonkeyPatch) -> None:
    """A part carries the boundaries of the whole batch."""
    patch.setattr(BatchMetadata, "of_rows", lambda self, uids, images=(): replace(self, uids=tuple(uids)))


Check = Callable[[nn.Module], None]
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_gradients, check_metadata])
def test_without_a_fault_the_checks_pass(model: nn.Module, check: Check) -> None:
    check(model)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (row_mean_kl, check_gradients),
        (unmasked_mean, check_gradients),
        (denominators_per_micro_batch, check_gradients),
        (dummy_rows_counted, check_gradients),
        (copied_metadata, check_metadata),
    ],
)
def test_a_planted_fault_breaks_a_check(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, plant: Plant, check: Check
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(model)
