from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.door.load import load_config
from skyrl_train.config.fields.fields import recorded
from skyrl_train.config.models.engines import GeneratorConfig
from skyrl_train.config.rules import RULES, run_rules, validate, validate_config, validate_models
from skyrl_train.config.schema import Config
from skyrl_train.errors import Violation


def config(**dotted: Any) -> Config:
    """`config(trainer__total_steps=3)` is the default config with `trainer.total_steps=3`."""
    tree: dict[str, Any] = {}
    for name, value in dotted.items():
        *parents, leaf = name.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return load_config(tree)


def violations(**dotted: Any) -> list[Violation]:
    return validate_config(config(**dotted))


def fields(**dotted: Any) -> list[str]:
    return [violation.field for violation in violations(**dotted)]


def test_the_defaults_break_no_rule() -> None:
    assert violations() == []


SINGLE_SAMPLE = {"generator__n_samples_per_prompt": 1, "trainer__algorithm__advantage_estimator": "reinforce++"}


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"generator__sampling__max_generate_length": 512}, "generator.sampling.max_generate_length"),
    ({"generator__eval_sampling__max_generate_length": 600}, "generator.eval_sampling.max_generate_length"),
    ({"data__max_prompt_length": 512}, "data.max_prompt_length"),
    ({"trainer__algorithm__advantage_estimator": "grop"}, "trainer.algorithm.advantage_estimator"),
    ({"trainer__algorithm__policy_loss": "no_such_module:loss"}, "trainer.algorithm.policy_loss"),
    ({"trainer__micro_batching": "fixd"}, "trainer.micro_batching"),
    ({"trainer__micro_batching": "auto"}, "trainer.memory_budget_gb"),
    ({"trainer__memory_budget_gb": 1.0}, "trainer.memory_budget_gb"),
    (
        {
            "trainer__micro_batching": "token_budget",
            "trainer__auto_micro_batch_size": True,
        },
        "trainer.auto_micro_batch_size",
    ),
    (
        {"trainer__micro_batching": "auto", "trainer__memory_budget_gb": 1.0, "trainer__docs_per_step": 8},
        "trainer.docs_per_step",
    ),
    (
        {
            "trainer__micro_batching": "auto",
            "trainer__memory_budget_gb": 1.0,
            "trainer__memory_probe": "trace",
            "strategy__sequence_parallel_size": 2,
        },
        "trainer.memory_probe",
    ),
    ({"generator__n_samples_per_prompt": 1}, "generator.n_samples_per_prompt"),
    ({"generator__sampling__temperature": 0.0}, "generator.sampling.temperature"),
    ({"generator__sampling__top_k": 1}, "generator.sampling.top_k"),
    (
        {"generator__eval_n_samples_per_prompt": 4, "generator__eval_sampling__temperature": 0},
        "generator.eval_n_samples_per_prompt",
    ),
    ({"trainer__resume_mode": "from_path"}, "trainer.resume_path"),
    ({"trainer__resume_path": "somewhere"}, "trainer.resume_path"),
    ({"trainer__resume_mode": "from_path", "trainer__resume_path": "/no/such"}, "trainer.resume_path"),
    ({"trainer__resume_mode": "fork"}, "trainer.resume_path"),
    ({"trainer__resume_mode": "fork", "trainer__resume_path": "/no/such"}, "trainer.resume_path"),
    ({"generator__backend": "replay"}, "generator.replay_path"),
    ({"generator__backend": "replay", "generator__replay_path": "/no/such"}, "generator.replay_path"),
    ({"generator__replay_path": "somewhere"}, "generator.replay_path"),
    ({"trainer__stale_groups": "drop"}, "trainer.stale_groups"),
    ({"trainer__max_staleness": 1, "trainer__oversample": 1.5}, "trainer.stale_groups"),
    ({"trainer__take_groups": "in_order"}, "trainer.take_groups"),
    ({"placement__policy_num_workers": 2}, "placement.policy_num_workers"),
    ({"placement__ref_num_workers": 2}, "placement.ref_num_workers"),
    ({"placement__backend": "ray", "placement__policy_num_workers": 2}, "placement.policy_num_workers"),
    ({"strategy__name": "fsdp2"}, "strategy.name"),
    ({"strategy__cpu_offload": True}, "strategy.cpu_offload"),
    ({"generator__backend": "vllm", "generator__vllm__num_engines": 2}, "generator.vllm.num_engines"),
    ({"generator__backend": "vllm", "placement__inference_num_nodes": 1}, "placement.inference_num_nodes"),
    ({"generator__backend": "vllm", "generator__full_sync_every": 8}, "generator.full_sync_every"),
    ({"generator__weight_change_tolerance": 1e-6}, "generator.weight_change_tolerance"),
    ({"generator__backend": "vllm", "generator__weight_transport": "broadcast"}, "generator.weight_transport"),
    (
        {"generator__backend": "vllm", "generator__weight_transport": "cuda_ipc"},
        "generator.weight_transport",
    ),
    (
        {"generator__backend": "vllm", "platform__name": "gpu", "platform__device": "cuda:1"},
        "platform.device",
    ),
    ({"trainer__algorithm__advantage_estimator": "gae"}, "critic.model.path"),
    ({"model__lora__rank": 8, "model__lora__dropout": 0.1}, "model.lora.dropout"),
    ({"model__lora__rank": 8, "model__lora__targets": []}, "model.lora.targets"),
    ({"critic__model__lora__rank": 8}, "critic.model.lora.rank"),
    (
        {"critic__model__path": "policy", "critic__model__lora__rank": 8, "critic__model__lora__dropout": 0.1},
        "critic.model.lora.dropout",
    ),
    ({"trainer__docs_per_step_exact": True}, "trainer.docs_per_step_exact"),
    ({"data__train": []}, "data.train"),
    ({"output_dir": ""}, "output_dir"),
    ({"run_name": " "}, "run_name"),
    ({"trainer__policy_mini_batch_size": 15}, "trainer.policy_mini_batch_size"),
    ({"trainer__algorithm__kl_controller": "adaptive"}, "trainer.algorithm.kl_controller"),
    ({"trainer__algorithm__ref_update_interval": 2}, "trainer.algorithm.ref_update_interval"),
    ({"reference__model__path": ""}, "reference.model.path"),
    ({"trainer__algorithm__advantage_estimator": "on_policy_distillation"}, "reference.model.path"),
    (
        {
            "trainer__algorithm__advantage_estimator": "on_policy_distillation",
            "reference__model__path": Config().model.path,
        },
        "reference.model.path",
    ),
    ({**SINGLE_SAMPLE, "trainer__algorithm__filters__zero_variance": True}, "generator.n_samples_per_prompt"),
    (
        {**SINGLE_SAMPLE, "trainer__algorithm__filters__dynamic_sampling": "filter"},
        "generator.n_samples_per_prompt",
    ),
    (
        {
            "trainer__algorithm__advantage_estimator": "reinforce++",
            "trainer__algorithm__filters__zero_variance": True,
            "generator__sampling__temperature": 0.0,
        },
        "generator.sampling.temperature",
    ),
    (
        {
            "trainer__algorithm__ref_update_interval": 2,
            "trainer__algorithm__kl_loss_coef": 0.1,
            "reference__model__path": "builtin:tiny_qwen2",
        },
        "trainer.algorithm.ref_update_interval",
    ),
]


@pytest.mark.parametrize(("broken", "field"), BROKEN)
def test_each_rule_names_the_field_that_breaks_it(broken: dict[str, Any], field: str) -> None:
    assert field in fields(**broken)


@pytest.mark.parametrize(
    "sound",
    [
        {"generator__n_samples_per_prompt": 1, "trainer__algorithm__advantage_estimator": "reinforce++"},
        {"generator__sampling__temperature": 0.0, "trainer__algorithm__advantage_estimator": "reinforce++"},
        {"trainer__algorithm__advantage_estimator": "gae", "critic__model__path": "policy"},
        {"critic__model__path": "policy", "critic__model__lora__rank": 8},
        {"trainer__algorithm__kl_loss_coef": 0.1, "trainer__algorithm__ref_update_interval": 2},
        {"trainer__algorithm__policy_loss": "operator:add"},
        {"trainer__algorithm__step_rewards": "turn_return", "generator__step_wise_trajectories": True},
        {"trainer__algorithm__step_rewards": "turn_return", "trainer__algorithm__filters__overlong": True},
        {"data__validation": []},
        {"generator__backend": "vllm"},
        {"generator__backend": "vllm", "placement__colocate_all": True},
        {"generator__backend": "vllm", "generator__vllm__tensor_parallel_size": 2},
        {
            "generator__backend": "vllm",
            "generator__weight_transport": "cuda_ipc",
            "platform__name": "gpu",
            "platform__device": "cuda:0",
        },
        {
            "trainer__algorithm__advantage_estimator": "reinforce++",
            "trainer__algorithm__filters__zero_variance": True,
            "generator__n_samples_per_prompt": 8,
        },
        {
            "trainer__algorithm__advantage_estimator": "on_policy_distillation",
            "reference__model__path": "hub/teacher",
        },
    ],
)
def test_sensible_combinations_pass(sound: dict[str, Any]) -> None:
    assert violations(**sound) == []


def test_what_ray_needs_passes_with_ray() -> None:
    on_ray = {"placement__backend": "ray", "strategy__name": "fsdp2", "placement__policy_num_workers": 2}
    assert fields(**on_ray, generator__backend="vllm", strategy__cpu_offload=True) == []


def test_recordings_may_be_trained_on_whatever_the_temperature_says(tmp_path: Path) -> None:
    replay = {"generator__backend": "replay", "generator__replay_path": str(tmp_path)}
    assert violations(**replay, generator__sampling__temperature=0.0) == []


def test_a_missing_path_is_answered_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "step_000010").mkdir()
    wanted = str(tmp_path / "step_00010")

    (violation,) = violations(trainer__resume_mode="from_path", trainer__resume_path=wanted)

    assert violation.remedy == f"in {tmp_path.resolve()}: did you mean 'step_000010'?"


def test_all_broken_rules_are_reported_together() -> None:
    found = fields(generator__n_samples_per_prompt=1, strategy__name="ddp", trainer__resume_mode="from_path")
    assert found == ["trainer.resume_path", "strategy.name", "generator.n_samples_per_prompt"]


def test_rules_about_a_refused_value_are_left_out() -> None:
    broken = config(generator__n_samples_per_prompt=1, strategy__name="ddp")
    found = validate_config(broken, refused={"generator.n_samples_per_prompt"})
    assert [violation.field for violation in found] == ["strategy.name"]


ELSEWHERE = {
    "seed",
    "trainer.policy.optimizer.lr",
    "trainer.algorithm.gamma",
    "trainer.algorithm.filters.overlong_max_length",
    "generator.sampling.top_p",
    "generator.vllm.gpu_memory_utilization",
    "placement.start_timeout_s",
    "critic.optimizer.lr",
    "model.lora.alpha",
    "reference.model.dtype",
    "trainer.no_such_setting",
}
"""What a rule that breaks in `BROKEN` does not read, though it lies beside what it reads."""


@pytest.mark.parametrize(("broken", "field"), BROKEN)
def test_what_was_refused_elsewhere_hides_no_rule(broken: dict[str, Any], field: str) -> None:
    assert field in [violation.field for violation in validate_config(config(**broken), refused=ELSEWHERE)]


def _reads_seed(seed: int) -> Iterator[Violation]:
    yield Violation.of("seed", seed, "is read", "")


def _reads_turns(generator: GeneratorConfig) -> Iterator[Violation]:
    yield Violation.of("generator.max_turns", generator.max_turns, "is read", "")


def _changes_turns(generator: GeneratorConfig) -> Iterator[Violation]:
    generator.max_turns = 9  # type: ignore[misc]
    yield from ()


@pytest.mark.parametrize("refused", [(), {"data.train"}])
def test_no_rule_changes_what_the_next_one_reads(refused: set[str]) -> None:
    read = Config()
    with pytest.raises(FrozenInstanceError):
        list(run_rules(read, [_changes_turns], refused))
    (violation,) = run_rules(read, [_reads_turns], refused)
    assert violation.value == str(read.generator.max_turns)


def test_what_one_rule_read_leaves_no_other_out() -> None:
    found = run_rules(Config(), [_reads_turns, _reads_turns, _reads_seed], {"generator.max_turns"})
    assert [violation.field for violation in found] == ["seed"]


def test_the_configuration_is_copied_once_for_all_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[object] = []
    monkeypatch.setattr(validate, "recorded", lambda *given: copies.append(given) or recorded(*given))
    list(run_rules(Config(), RULES, {"data.train"}))
    assert len(copies) == 1


def test_a_refused_section_leaves_the_rules_out_that_read_what_is_in_it() -> None:
    broken = config(generator__n_samples_per_prompt=1, placement__policy_num_workers=2, run_name="")
    found = validate_config(broken, refused={"placement"})
    assert [violation.field for violation in found] == ["run_name", "generator.n_samples_per_prompt"]


def test_xla_is_refused_where_jax_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "find_spec", lambda name: None)
    broken = config(trainer__micro_batching="auto", trainer__memory_budget_gb=1.0, trainer__memory_probe="xla")
    (violation,) = validate_config(broken)
    assert violation.field == "trainer.memory_probe"
    assert "pip install 'jax" in violation.remedy


def test_an_adapter_is_refused_where_peft_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate_models, "find_spec", lambda name: None)
    (violation,) = violations(model__lora__rank=8)
    assert violation.field == "model.lora.rank"
    assert "pip install 'peft" in violation.remedy


def test_rules_of_one_section_are_all_reported_beside_each_other() -> None:
    found = fields(trainer__micro_batching="auto", trainer__docs_per_step=8, trainer__docs_per_step_exact=True)
    assert found == ["trainer.memory_budget_gb", "trainer.docs_per_step"]
