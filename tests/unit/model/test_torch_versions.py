"""What this release of torch has, held against what the package takes it to have."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.attention.varlen import varlen_attn

from skyrl_train.model.parallel import torch_versions
from skyrl_train.model.parallel.torch_versions import ALL_GATHER, REDUCE_SCATTER, VARLEN_OPTIONS, fsdp_groups


def test_options_of_variable_length_attention_are_those_of_this_torch() -> None:
    assert {"enable_gqa", "num_splits"} & inspect.signature(varlen_attn).parameters.keys() == VARLEN_OPTIONS


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (SimpleNamespace(_fsdp_param_groups=["a", "b"], _fsdp_param_group="a"), ["a", "b"]),
        (SimpleNamespace(_fsdp_param_group="a"), ["a"]),  # torch 2.11
        (SimpleNamespace(_fsdp_param_group=None), []),
    ],
)
def test_groups_of_parameters_are_found_in_both_forms(state: Any, expected: list[str]) -> None:
    module: Any = SimpleNamespace(_get_fsdp_state=lambda: state)
    assert list(fsdp_groups(module)) == expected


@pytest.mark.parametrize(("ours", "theirs"), [("all_gather", ALL_GATHER), ("reduce_scatter", REDUCE_SCATTER)])
def test_collectives_of_one_tensor_are_looked_up_by_the_name_that_there_is(
    ours: str, theirs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    assert hasattr(dist, theirs)
    monkeypatch.setattr(dist, theirs, lambda *given, **options: asked.append((given, options)))
    getattr(torch_versions, ours)("received", "sent", group="group")
    assert asked == [(("received", "sent"), {"group": "group"})]
