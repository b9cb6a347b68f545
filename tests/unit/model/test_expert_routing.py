"""Routers that are told where to send tokens, of the families that have some; the others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from skyrl_train.batch import ROUTED, TrainingInputBatch, batch_of_lengths
from skyrl_train.batch.layouts import padded_layout
from skyrl_train.errors import BatchError, ModelError
from skyrl_train.model.layouts import hidden_states
from skyrl_train.model.parallel.expert_routing import follow_routing, replayed, replaying
from tests.support.fakes import make_tiny_model
from tests.support.moe_cases import FAMILIES, NUM_EXPERTS, NUM_LAYERS, TOP_K, make_moe

CPU = torch.device("cpu")
LOCAL = {"num_experts": None, "num_local_experts": NUM_EXPERTS}


def rows_of(*lengths: int) -> TrainingInputBatch:
    batch = batch_of_lengths(lengths)
    return batch.with_columns(input_ids=torch.arange(3, 3 + batch.num_tokens, dtype=torch.int32))


def states(model: PreTrainedModel, rows: TrainingInputBatch) -> torch.Tensor:
    layout = padded_layout(rows)
    with replaying(model, rows, layout, CPU):
        found: torch.Tensor = hidden_states(model, layout)[layout.position_of_token]
    return found


@torch.no_grad()
@pytest.mark.parametrize(("kind", "changes"), FAMILIES, ids=[kind for kind, _ in FAMILIES])
def test_a_family_computes_the_same_with_its_own_choice_and_something_else_with_another(
    kind: str, changes: dict[str, Any]
) -> None:
    model, rows = make_moe(kind, **changes), rows_of(5, 3)
    plain = states(model, rows)
    routing = follow_routing(model, name="m")
    assert torch.equal(states(model, rows), plain), "where nothing is recorded, nothing changes"
    routing.records = True
    states(model, rows)
    taken, routing.records = routing.taken, False
    assert taken is not None
    own = rows.with_columns(**{ROUTED: taken[padded_layout(rows).position_of_token]})
    assert torch.equal(states(model, own), plain)
    other = own.with_columns(**{ROUTED: (own[ROUTED] + 1) % NUM_EXPERTS})
    assert not torch.allclose(states(model, other), plain, atol=1e-4)
    assert torch.equal(states(model, rows), plain), "the experts are forgotten with the forward"


@torch.no_grad()
def test_tokens_without_a_record_choose_for_themselves() -> None:
    model, rows = make_moe(), rows_of(6)
    follow_routing(model, name="m")
    column = torch.full((6, NUM_LAYERS * TOP_K), -1, dtype=torch.int16)
    plain = states(model, rows)
    assert torch.equal(states(model, rows.with_columns(**{ROUTED: column})), plain)
    column[3:] = torch.arange(NUM_LAYERS * TOP_K, dtype=torch.int16)
    found = states(model, rows.with_columns(**{ROUTED: column}))
    torch.testing.assert_close(found[:3], plain[:3])
    assert not torch.allclose(found[3:], plain[3:], atol=1e-4)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (make_tiny_model(), "Qwen2ForCausalLM has no router that chooses among experts"),
        (make_moe("phimoe", num_local_experts=NUM_EXPERTS), "PhimoeTopKRouter chooses its experts in another way"),
    ],
    ids=["dense", "phimoe"],
)
def test_other_models_are_refused_by_name(model: PreTrainedModel, says: str) -> None:
    with pytest.raises(ModelError, match=f"{says}.*Set trainer.moe_routing_replay=false"):
        follow_routing(model, name="m")


def test_experts_of_another_model_are_refused_and_a_model_that_follows_none_is_spared_them() -> None:
    model, rows = make_moe(), rows_of(2)
    wide = torch.zeros((2, NUM_LAYERS * TOP_K), dtype=torch.int16)
    assert ROUTED not in replayed(model, rows.with_columns(**{ROUTED: wide}))
    follow_routing(model, name="m")
    assert ROUTED in replayed(model, rows.with_columns(**{ROUTED: wide}))
    for wrong in (wide[:, :1], wide + NUM_EXPERTS):
        with pytest.raises(BatchError, match="Were these rollouts made with another model"):
            replayed(model, rows.with_columns(**{ROUTED: wrong}))


def test_gradients_reach_the_router_through_the_experts_that_it_is_told() -> None:
    model, rows = make_moe(), rows_of(4)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    follow_routing(model.train(), name="m")
    told = torch.tensor([[6, 7] * NUM_LAYERS] * 4, dtype=torch.int16)
    layout = padded_layout(rows)
    with replaying(model, rows.with_columns(**{ROUTED: told}), layout, CPU):
        hidden_states(model, layout).sum().backward()  # type: ignore[no-untyped-call]
    for layer in model.model.layers:  # type: ignore[union-attr]
        reached = layer.mlp.experts.down_proj.grad.flatten(1).norm(dim=1) > 0
        assert reached.tolist() == [False] * 6 + [True] * 2
        assert float(layer.mlp.gate.weight.grad.norm()) > 0
