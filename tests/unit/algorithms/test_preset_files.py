from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS
from skyrl_train.algorithms.losses.policy import POLICY_LOSSES
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig, FilterConfig, OffPolicyConfig, needs_critic, needs_reference
from skyrl_train.config.rules import validate_config
from skyrl_train.errors import Violation
from skyrl_train.runs.cli import HYDRA_VERSION_BASE, load_node, register_resolvers

CONF = Path(__file__).resolve().parents[3] / "conf"
PRESETS = sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml"))


def violations_of(algorithm: AlgorithmConfig) -> list[Violation]:
    config = Config(trainer=TrainerConfig(algorithm=algorithm))
    return [each for each in validate_config(config) if each.field.startswith("trainer.algorithm")]


@cache
def run_with(name: str, *overrides: str) -> Config:
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base=HYDRA_VERSION_BASE):
        node = compose("config", [f"algorithm={name}", "platform=cpu", *overrides])
    return load_node(node, Config)


def preset(name: str, *overrides: str) -> AlgorithmConfig:
    return run_with(name, *overrides).trainer.algorithm


@pytest.mark.parametrize("name", PRESETS)
def test_preset_composes_into_the_schema_and_breaks_no_rule(name: str) -> None:
    teacher = ["reference.model.path=hub/teacher"] if name == "distillation" else []
    run = run_with(name, "critic.model.path=policy", *teacher)
    config = run.trainer.algorithm
    assert ADVANTAGE_ESTIMATORS.name_of(config.advantage_estimator) in ADVANTAGE_ESTIMATORS
    assert POLICY_LOSSES.name_of(config.policy_loss) in POLICY_LOSSES
    assert validate_config(run) == []


def test_every_estimator_and_loss_that_needs_settings_of_its_own_has_a_preset() -> None:
    configs = [preset(name, "critic.model.path=policy") for name in PRESETS]
    assert {ADVANTAGE_ESTIMATORS.name_of(config.advantage_estimator) for config in configs} == set(ADVANTAGE_ESTIMATORS)
    assert set(POLICY_LOSSES) - {POLICY_LOSSES.name_of(config.policy_loss) for config in configs} == {
        "dual_clip",
        "cross_entropy",
        "dro",  # what clients of skyrl-serve ask for
    }


def test_grpo_preset_is_the_schemas_default() -> None:
    assert preset("grpo", "critic.model.path=policy") == AlgorithmConfig()


def test_who_needs_which_model() -> None:
    assert needs_critic(preset("ppo", "critic.model.path=policy"))
    assert not needs_critic(preset("grpo", "critic.model.path=policy"))
    assert [name for name in PRESETS if needs_reference(preset(name, "critic.model.path=policy"))] == [
        "deepseek_v3_2",
        "distillation",
        "reinforce_pp",
        "reinforce_pp_baseline",
    ]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (AlgorithmConfig(policy_loss="dppo", off_policy=OffPolicyConfig(weight="token")), "off_policy.weight"),
        (AlgorithmConfig(off_policy=OffPolicyConfig(weight_low=3.0)), "off_policy.weight_low"),
        (AlgorithmConfig(off_policy=OffPolicyConfig(sequence_mask_low=2.0)), "off_policy.sequence_mask_low"),
        (AlgorithmConfig(off_policy=OffPolicyConfig(batch_normalize=True)), "off_policy.batch_normalize"),
        (AlgorithmConfig(filters=FilterConfig(reward_clip_low=1.0, reward_clip_high=0.0)), "filters.reward_clip_low"),
        (AlgorithmConfig(reward_components={"solved": 1}), "reward_components"),
        (AlgorithmConfig(advantage_estimator="gdpo", reward_components={"solved": "much"}), "reward_components.solved"),
        (AlgorithmConfig(advantage_estimator="gdpo", step_rewards="turn_return"), "step_rewards"),
        (AlgorithmConfig(entropy_controller="adaptive", entropy_coef=2.0), "entropy_coef"),
        (AlgorithmConfig(kl_controller="adaptive"), "kl_controller"),
        *(
            (AlgorithmConfig(proximal="behaviour", **other), "proximal")  # type: ignore[arg-type]
            for other in (
                {"off_policy": OffPolicyConfig(weight="token")},
                {"policy_loss": "rollout_is"},
                {"policy_loss": "cross_entropy"},
                {"kl_reward_coef": 0.1},
                {"advantage_estimator": "on_policy_distillation"},
            )
        ),
        (
            AlgorithmConfig(advantage_estimator="gae", filters=FilterConfig(dynamic_sampling="filter")),
            "filters.dynamic_sampling",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_named(config: AlgorithmConfig, field: str) -> None:
    assert [violation.field for violation in violations_of(config)] == [f"trainer.algorithm.{field}"]
