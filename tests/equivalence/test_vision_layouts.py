"""Rows with images: one gradient in every layout, that of transformers' own forward of each row alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.algorithms.losses import PolicyLossInputs, policy_loss
from skyrl_train.batch.layouts import prefix_order, sharing_keys
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.fields import LayoutName
from skyrl_train.types import RolloutBatch
from tests.support.layout_cases import use_layout
from tests.support.layouts import (
    ALL_DIFFERENT,
    Layout,
    Step,
    assert_same_gradient,
    closed,
    fixed_rollouts,
    flat_gradient as gradient_of,
    learner_gradient,
    learner_of,
)
from tests.support.vision_cases import make_vlm, own_arguments, with_images

STEP = Step(algorithm=AlgorithmConfig(loss_reduction="sequence_mean"))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_vlm(double=True)


@pytest.fixture(scope="module")
def batch_of() -> RolloutBatch:
    return with_images(fixed_rollouts())


@pytest.fixture(scope="module")
def expected(batch_of: RolloutBatch) -> Tensor:
    """Row by row by the model of transformers, with full logits."""
    model = make_vlm(double=True)
    batch = closed(STEP, batch_of, Layout()).batch
    for row in range(batch.num_rows):
        one = batch.take([row])
        columns = {name: one.padded(name) for name in one.token_columns}
        ids = columns["input_ids"].long()
        spans = one.metadata.images[0] if one.metadata.images else ()
        given = own_arguments(ids, spans, torch.float64) if spans else {"input_ids": ids}
        model.base_model.rope_deltas = None  # type: ignore[union-attr]
        scores = model(**given).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
        inputs = PolicyLossInputs(
            logprobs=torch.nn.functional.pad(scores, (1, 0)),
            old_logprobs=columns["old_logprobs"],
            advantages=columns["advantages"],
            loss_mask=columns["loss_mask"],
            rollout_logprobs=columns["rollout_logprobs"],
        )
        (columns["loss_weights"] * policy_loss(inputs, STEP.algorithm).token_losses).sum().backward()
    return gradient_of(model)


@pytest.mark.parametrize("step_wise", [False, True])
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("name", ["padded", "packed", "prefix_shared"])
def test_every_layout_gives_the_gradient_of_rows_alone(
    model: PreTrainedModel, batch_of: RolloutBatch, expected: Tensor, name: LayoutName, merge: bool, step_wise: bool
) -> None:
    mini_batch = closed(STEP, batch_of, Layout(step_wise=step_wise))
    learner = learner_of(model, STEP, Layout())
    use_layout(learner, name, merge=merge, rows=3)
    learner.engine.zero_grad()
    learner.forward_backward(mini_batch)
    assert_same_gradient(gradient_of(model), expected)


@pytest.mark.parametrize("layout", ALL_DIFFERENT)
def test_every_way_to_cut_a_step_gives_it(
    model: PreTrainedModel, batch_of: RolloutBatch, expected: Tensor, layout: Layout
) -> None:
    assert_same_gradient(learner_gradient(model, STEP, batch_of, layout), expected)


def test_the_vision_tower_has_a_part_in_it(model: PreTrainedModel, batch_of: RolloutBatch) -> None:
    learner = learner_of(model, STEP, Layout())
    learner.engine.zero_grad()
    learner.forward_backward(closed(STEP, batch_of, Layout()))
    tower = [parameter.grad for name, parameter in model.named_parameters() if ".visual." in name]
    assert all(gradient is not None and bool(gradient.abs().max() > 0) for gradient in tower)


def test_other_images_give_another_gradient(model: PreTrainedModel, expected: Tensor) -> None:
    other = with_images(fixed_rollouts(), seed=1)
    with pytest.raises(AssertionError, match="gradients differ"):
        assert_same_gradient(learner_gradient(model, STEP, other, Layout()), expected)


def test_rows_share_a_prefix_up_to_the_first_image_that_differs(batch_of: RolloutBatch) -> None:
    batch = closed(STEP, batch_of, Layout()).batch
    first = next(row for row, spans in enumerate(batch.metadata.images) if spans)
    one = batch.take([first, first])
    span = one.metadata.images[0][0]
    keys = sharing_keys(one).reshape(2, -1)
    assert prefix_order([keys[0], keys[1]]).shared == [0, keys.shape[1]]
    image = replace(span.image, key="0" * 64)
    images = (one.metadata.images[0], (replace(span, image=image),))
    parted = replace(one, metadata=replace(one.metadata, images=images))
    keys = sharing_keys(parted).reshape(2, -1)
    assert prefix_order([keys[0], keys[1]]).shared == [0, span.start]
