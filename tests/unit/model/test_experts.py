"""Which models' experts can be divided over ranks, and what the others are told."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from skyrl_train.errors import ModelError
from skyrl_train.model.parallel.experts import check_experts, expert_modules
from skyrl_train.model.sizes.counts import meta_model
from tests.support.moe_cases import EXPERTS, FAMILIES, NUM_EXPERTS, SIZES


def meta(kind: str, **changes: Any) -> PreTrainedModel:
    made: PreTrainedModel = meta_model({**SIZES, **EXPERTS, "model_type": kind, **changes}, name="m")
    return made


@pytest.mark.parametrize(("kind", "changes"), FAMILIES, ids=[kind for kind, _ in FAMILIES])
def test_a_family_that_keeps_experts_as_tensors_is_divided(kind: str, changes: dict[str, Any]) -> None:
    model = meta(kind, **changes)
    assert expert_modules(model)
    check_experts(model, size=4, num_shards=8, name="m")


def test_a_dense_model_and_a_family_that_keeps_its_experts_otherwise_are_refused_by_name() -> None:
    begins = "model path 'm': strategy.expert_parallel_size=2, but "
    with pytest.raises(ModelError, match=f"{begins}Qwen2ForCausalLM is dense: it has no experts"):
        check_experts(meta("qwen2", num_experts=None), size=2, num_shards=2, name="m")
    with pytest.raises(ModelError, match=f"{begins}Llama4ForCausalLM keeps its experts in a form that cannot"):
        check_experts(meta("llama4_text", num_local_experts=4), size=2, num_shards=2, name="m")


def test_sizes_that_do_not_divide_are_refused_with_those_that_do() -> None:
    model = meta("qwen3_moe")
    with pytest.raises(
        ModelError, match=rf"must divide the {NUM_EXPERTS} experts of model.layers.0.mlp.experts. Try 1 or 2"
    ):
        check_experts(model, size=3, num_shards=12, name="m")
    with pytest.raises(
        ModelError, match=r"the 3 ranks with the same experts must divide dimension 1 of .*gate_up_proj"
    ):
        check_experts(model, size=2, num_shards=6, name="m")
