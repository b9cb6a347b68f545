"""Tokens that are sent to the experts recorded for them: one gradient in every layout, that of a router written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from skyrl_train.algorithms.losses import PolicyLossInputs, policy_loss
from skyrl_train.batch import ROUTED
from skyrl_train.batch.layouts import hosts_of, prefix_order, sharing_keys
from skyrl_train.config.fields import LayoutName
from skyrl_train.model.parallel import follow_routing
from skyrl_train.types import RolloutBatch
from tests.support.layouts import (
    ALL_DIFFERENT,
    Layout,
    assert_same_gradient,
    closed,
    fixed_rollouts,
    flat_gradient as gradient_of,
    learner_gradient,
)
from tests.support.moe_cases import (
    NUM_EXPERTS,
    NUM_LAYERS,
    STEP,
    TOP_K,
    DoubleRouter,
    double_moe,
    gradient,
    with_experts,
)


class WrittenOut(nn.Module):
    """Goes where it is told; where that is -1, to the best."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.told: Tensor

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        shares = (logits - logits.logsumexp(-1, keepdim=True)).exp()
        experts = torch.stack(
            [
                row if row[0] >= 0 else share.sort(descending=True).indices[:TOP_K]
                for row, share in zip(self.told, shares)
            ]
        )
        best = torch.stack([share[row] for share, row in zip(shares, experts)])
        return logits, best / best.sum(-1, keepdim=True), experts


@pytest.fixture(scope="module")
def model() -> nn.Module:
    made = double_moe()
    for layer in made.model.layers:  # type: ignore[union-attr]
        layer.mlp.gate = DoubleRouter(layer.mlp.gate.weight)
    follow_routing(made, name="m")
    return made


def written_out(batch_of: RolloutBatch) -> Tensor:
    """Row by row, with full logits and the routers above."""
    model = double_moe()
    routers = [WrittenOut(layer.mlp.gate.weight) for layer in model.model.layers]  # type: ignore[union-attr]
    for layer, router in zip(model.model.layers, routers):  # type: ignore[union-attr]
        layer.mlp.gate = router
    batch = closed(STEP, batch_of, Layout()).batch
    for row in range(batch.num_rows):
        one = batch.take([row])
        for number, router in enumerate(routers):
            router.told = one[ROUTED].long().view(-1, NUM_LAYERS, TOP_K)[:, number]
        columns = {name: one.padded(name) for name in one.token_columns}
        ids = columns["input_ids"].long()
        scores = model(input_ids=ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
        inputs = PolicyLossInputs(
            logprobs=torch.nn.functional.pad(scores, (1, 0)),
            old_logprobs=columns["old_logprobs"],
            advantages=columns["advantages"],
            loss_mask=columns["loss_mask"],
            rollout_logprobs=columns["rollout_logprobs"],
        )
        (columns["loss_weights"] * policy_loss(inputs, STEP.algorithm).token_losses).sum().backward()
    return gradient_of(model)


@pytest.fixture(scope="module")
def batch_of() -> RolloutBatch:
    return with_experts(fixed_rollouts())


@pytest.fixture(scope="module")
def expected(batch_of: RolloutBatch) -> Tensor:
    return written_out(batch_of)


@pytest.mark.parametrize("step_wise", [False, True])
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("name", ["padded", "packed", "prefix_shared"])
def test_every_way_to_compute_rows_gives_the_gradient_of_the_written_out_router(
    model: nn.Module, batch_of: RolloutBatch, expected: Tensor, name: LayoutName, merge: bool, step_wise: bool
) -> None:
    assert_same_gradient(gradient(model, batch_of, name, step_wise=step_wise, merge=merge), expected)


@pytest.mark.parametrize("layout", ALL_DIFFERENT)
def test_every_way_to_cut_a_step_gives_it(
    model: nn.Module, batch_of: RolloutBatch, expected: Tensor, layout: Layout
) -> None:
    assert_same_gradient(learner_gradient(model, STEP, batch_of, layout), expected)


def test_other_experts_and_the_routers_own_give_other_gradients(
    model: nn.Module, batch_of: RolloutBatch, expected: Tensor
) -> None:
    for other in (with_experts(fixed_rollouts(), seed=1), fixed_rollouts()):
        with pytest.raises(AssertionError, match="gradients differ"):
            assert_same_gradient(gradient(model, other, "padded", step_wise=False, merge=False), expected)


def alike() -> RolloutBatch:
    """One prompt with two samples of the same tokens."""
    found = fixed_rollouts()
    one = found.trajectories[4]
    return replace(
        found, prompts=found.prompts[2:3], trajectories=(one, replace(one, sample_index=1)), n_samples_per_prompt=2
    )


def test_rows_of_the_same_tokens_are_computed_once_only_as_far_as_they_were_sent_to_the_same_experts(
    model: nn.Module,
) -> None:
    """An engine may send the same tokens elsewhere in another batch; then the rows part."""
    prompt = len(alike().trajectories[0].turns[0].added_token_ids)
    for roots_alike, shared in ((True, prompt), (False, 0)):
        batch_of = with_experts(alike(), roots_alike=roots_alike)
        batch = closed(STEP, batch_of, Layout()).batch
        keys = np.split(sharing_keys(batch), batch.row_offsets[1:-1].tolist())
        assert prefix_order(keys).shared == [0, shared]
        assert_same_gradient(
            gradient(model, batch_of, "prefix_shared", step_wise=False, merge=False), written_out(batch_of)
        )


def test_a_turn_is_computed_in_the_row_of_the_turn_that_continues_it(batch_of: RolloutBatch) -> None:
    rows = closed(STEP, batch_of, Layout(step_wise=True)).batch
    plain = closed(STEP, fixed_rollouts(), Layout(step_wise=True)).batch
    assert (hosts_of(rows) == hosts_of(plain)).all()
    assert (hosts_of(rows) != np.arange(rows.num_rows)).any()
    assert int(rows[ROUTED].max()) == NUM_EXPERTS - 1
