"""Rules of experts that are divided over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.door.load import load_config
from skyrl_train.config.rules import run_rules, validate_config
from skyrl_train.config.rules.validate_placement import num_experts
from skyrl_train.config.schema import Config
from skyrl_train.runs.cli import MACHINE_RULES


def config(*, name: str = "fsdp2", size: int = 2, workers: int = 4, model: Any = None, **more: Any) -> Config:
    return load_config(
        {
            "strategy": {"name": name, "expert_parallel_size": size},
            "placement": {"backend": "ray", "policy_num_workers": workers},
            "model": model or {},
            **more,
        }
    )


def test_whole_groups_pass_and_other_numbers_of_ranks_are_refused() -> None:
    assert validate_config(config()) == []
    assert validate_config(config(name="ddp")) == []
    (violation,) = validate_config(config(size=3, workers=4))
    assert violation.field == "placement.policy_num_workers"
    assert violation.rule == "must be a multiple of strategy.expert_parallel_size=3: so many ranks divide the experts"
    assert violation.remedy == "try placement.policy_num_workers=6, or another strategy.expert_parallel_size"


def test_the_ranks_of_a_reference_are_told_apart_from_those_of_one_that_is_not_there() -> None:
    algorithm = {"algorithm": {"kl_loss_coef": 0.1}}
    (violation,) = validate_config(config(trainer=algorithm))
    assert violation.field == "placement.ref_num_workers"
    assert validate_config(config()) == []


def test_what_does_not_go_together_is_told_at_once() -> None:
    found = validate_config(
        config(
            name="single",
            workers=1,
            model={"compile": True},
            trainer={"micro_batching": "auto", "memory_probe": "trace", "memory_budget_gb": 1},
        )
    )
    assert [violation.field for violation in found] == [
        "strategy.expert_parallel_size",
        "model.compile",
        "trainer.memory_probe",
    ]


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ({"model_type": "qwen2"}, "is for mixtures of experts, and {path} (qwen2) is dense"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, "must divide the 8 experts of {path} (qwen3_moe)"),
    ],
)
def test_a_model_without_experts_or_with_another_number_is_refused_by_name_before_it_is_loaded(
    tmp_path: Path, architecture: dict[str, Any], expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(architecture))
    found = run_rules(config(size=3, workers=3, model={"path": str(tmp_path)}), MACHINE_RULES, frozenset())
    told = [str(each) for each in found if each.field == "strategy.expert_parallel_size"]
    assert len(told) == 1
    assert expected.format(path=tmp_path) in told[0]


def test_a_model_whose_experts_divide_passes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    found = run_rules(config(size=4, model={"path": str(tmp_path)}), MACHINE_RULES, frozenset())
    assert not [each for each in found if each.field == "strategy.expert_parallel_size"]


def test_the_number_of_experts_is_read_from_each_name_that_configs_have() -> None:
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    assert [num_experts({name: 8}) for name in names] == [8] * 4
    assert num_experts({"num_experts": None, "hidden_size": 4}) == 0
