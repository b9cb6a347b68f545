"""Rules of the models: their optimizers, the critic, the reference, adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from skyrl_train.config.algorithm import (
    estimator_reads,
    is_self_taught,
    needs_critic,
    needs_reference,
)
from skyrl_train.config.schema import Config
from skyrl_train.errors import Violation
from skyrl_train.registry import part_name

LORA_DROPOUT = "model.lora.dropout"


def value_of(config: Config, path: str) -> object:
    """Of the setting with a dotted name."""
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def violation_of(config: Config, field: str, rule: str, remedy: str) -> Violation:
    """Of a setting, with the value that it has."""
    return Violation(field=field, rule=rule, value=repr(value_of(config, field)), remedy=remedy)


def _betas(config: Config, field: str) -> Iterator[Violation]:
    betas = value_of(config, field)
    if isinstance(betas, tuple) and not all(0.0 <= beta < 1.0 for beta in betas):
        yield violation_of(config, field, "must each be at least 0 and below 1", f"try {field}=[0.9,0.999]")


def _critic(config: Config) -> Iterator[Violation]:
    algorithm = config.trainer.algorithm
    if needs_critic(algorithm) and not config.critic.model.path:
        by_estimator = "values" in estimator_reads(algorithm).columns
        reader = "advantage_estimator" if by_estimator else "policy_loss"
        yield violation_of(
            config,
            "critic.model.path",
            f"must be given: {reader}={part_name(getattr(algorithm, reader))} needs a value model",
            "try critic.model.path=policy, a copy of the policy with a new value head",
        )


def _reference(config: Config) -> Iterator[Violation]:
    algorithm, path = config.trainer.algorithm, config.reference.model.path
    if not path.strip():
        yield violation_of(config, "reference.model.path", "must not be empty", "try reference.model.path=policy")
    if estimator_reads(algorithm).teacher == "other_model" and path in ("policy", config.model.path):
        yield violation_of(
            config,
            "reference.model.path",
            f"must name another model than the policy: {part_name(algorithm.advantage_estimator)} learns from where the two"
            " differ",
            "set reference.model.path to the folder or hub name of a teacher",
        )


def _privileged_context(config: Config) -> Iterator[Violation]:
    algorithm, context = config.trainer.algorithm, config.generator.privileged_context
    if is_self_taught(algorithm) != bool(context):
        yield violation_of(
            config,
            "generator.privileged_context",
            "names what the teacher of algorithm=self_distillation is shown, and of no other",
            "try algorithm=self_distillation, or generator.privileged_context=''"
            if context
            else "try generator.privileged_context=reward_spec.ground_truth",
        )


def _reference_updates(config: Config) -> Iterator[Violation]:
    algorithm, path = config.trainer.algorithm, config.reference.model.path
    if algorithm.ref_update_interval and not needs_reference(algorithm):
        yield violation_of(
            config,
            "trainer.algorithm.ref_update_interval",
            "does nothing without a reference, which this algorithm does not read",
            "set trainer.algorithm.kl_loss_coef above 0, or trainer.algorithm.ref_update_interval=0",
        )
    elif algorithm.ref_update_interval and path != "policy":
        yield violation_of(
            config,
            "trainer.algorithm.ref_update_interval",
            f"would replace reference.model.path={path} by the policy",
            "set trainer.algorithm.ref_update_interval=0, or reference.model.path=policy",
        )


def _lora(config: Config, prefix: str) -> Iterator[Violation]:
    """Of `model.lora` or `critic.model.lora`."""
    lora = config.model.lora if prefix == "model.lora" else config.critic.model.lora
    if lora.rank and lora.dropout:
        yield violation_of(
            config,
            f"{prefix}.dropout",
            "must be 0 in reinforcement learning: it would move the ratios of new and old probabilities, and values",
            f"set {prefix}.dropout=0",
        )
    if lora.rank and not lora.targets:
        yield violation_of(config, f"{prefix}.targets", "must name a layer", f"try {prefix}.targets=[all-linear]")


def _critic_lora(config: Config) -> Iterator[Violation]:
    if config.critic.model.lora.rank and not config.critic.model.path:
        yield violation_of(
            config,
            "critic.model.lora.rank",
            "needs a critic, and critic.model.path is empty",
            "set critic.model.path=policy, or critic.model.lora.rank=0",
        )


MODEL_RULES: tuple[Callable[[Config], Iterator[Violation]], ...] = (
    *(partial(_betas, field=f"{section}.optimizer.betas") for section in ("trainer.policy", "critic")),
    _critic,
    _reference,
    _privileged_context,
    _reference_updates,
    *(partial(_lora, prefix=prefix) for prefix in ("model.lora", "critic.model.lora")),
    _critic_lora,
)
