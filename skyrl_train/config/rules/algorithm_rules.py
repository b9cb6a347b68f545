"""Rules between the settings of `trainer.algorithm`, by what its estimator and its loss read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from skyrl_train.config.algorithm.settings import (
    REJECTION_CRITERIA,
    AlgorithmConfig,
    estimator_reads,
    is_self_taught,
    loss_reads,
    starts_at_rollout,
)
from skyrl_train.config.fields.fields import Rule
from skyrl_train.errors import Violation
from skyrl_train.registry import split_spec

_PREFIX = "trainer.algorithm."


def _require(holds: bool, name: str, rule: str, value: object, remedy: str) -> Iterator[Violation]:
    """A violation of the setting `name` unless the rule holds; `remedy` is a setting to try, or advice."""
    if not holds:
        advice = f"try {_PREFIX}{remedy}" if "=" in remedy else remedy
        yield Violation(field=_PREFIX + name, rule=rule, value=str(value), remedy=advice)


def _double_correction(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    correction, loss = algorithm.off_policy, split_spec(algorithm.policy_loss)[0]
    yield from _require(
        not (correction.enabled and starts_at_rollout(algorithm)),
        "off_policy.weight",
        f"cannot be combined with policy_loss={loss}, whose ratio already starts at the rollout",
        correction.weight,
        f"switch the correction off, or choose another {_PREFIX}policy_loss",
    )


def _proximal(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    why = _why_not_behaviour(algorithm)
    yield from _require(
        not (algorithm.proximal == "behaviour" and why),
        "proximal",
        f"cannot be behaviour {why}",
        algorithm.proximal,
        "proximal=recompute",
    )


def _batch_normalize(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    correction = algorithm.off_policy
    yield from _require(
        not (correction.batch_normalize and not correction.weighs),
        "off_policy.batch_normalize",
        "needs weights to normalise: off_policy.weight other than none",
        correction.batch_normalize,
        "off_policy.weight=token",
    )


def _bounds(algorithm: AlgorithmConfig, low: str, high: str) -> Iterator[Violation]:
    """The lower one of two settings of `off_policy` must not be above the other."""
    low_value, high_value = getattr(algorithm.off_policy, low), getattr(algorithm.off_policy, high)
    name = f"off_policy.{low}"
    yield from _require(
        low_value <= high_value, name, f"must not be above {high}={high_value:g}", low_value, f"{name}=0"
    )


def _entropy_coef(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    yield from _require(
        not (
            algorithm.entropy_controller == "adaptive" and not 0 <= algorithm.entropy_coef <= algorithm.entropy_coef_max
        ),
        "entropy_coef",
        f"must lie between 0 and entropy_coef_max={algorithm.entropy_coef_max:g} with entropy_controller=adaptive",
        algorithm.entropy_coef,
        "entropy_coef=0",
    )


def _kl_controller(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    yield from _require(
        not (algorithm.kl_controller == "adaptive" and algorithm.kl_reward_coef == 0),
        "kl_controller",
        "adaptive needs a first weight: kl_reward_coef above 0",
        algorithm.kl_controller,
        "kl_reward_coef=0.05",
    )


def _reward_clip(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    low, high = algorithm.filters.reward_clip_low, algorithm.filters.reward_clip_high
    yield from _require(
        low is None or high is None or low < high,
        "filters.reward_clip_low",
        f"must be below reward_clip_high={high}",
        low,
        "filters.reward_clip_low=null",
    )


def _reward_weights(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    for name, component in algorithm.reward_components.items():
        given = component if isinstance(component, Mapping) else {"weight": component}
        yield from _require(
            _is_number(given.get("weight", 1.0))
            and given.get("normalize", "group") in ("group", "none")
            and set(given) <= {"weight", "normalize"},
            f"reward_components.{name}",
            "must be a number, the reward's weight, or {weight: 1, normalize: group|none}",
            component,
            f"reward_components={{{name}: 1}}",
        )


def _self_taught(algorithm: AlgorithmConfig, name: str) -> Iterator[Violation]:
    """A self-taught policy has no weight on the divergence from a reference."""
    weight, estimator = getattr(algorithm, name), split_spec(algorithm.advantage_estimator)[0]
    yield from _require(
        not is_self_taught(algorithm) or weight == 0,
        name,
        f"must be 0 with advantage_estimator={estimator}, whose teacher takes the reference's place",
        weight,
        f"{name}=0",
    )


def _self_taught_loss(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    estimator = split_spec(algorithm.advantage_estimator)[0]
    yield from _require(
        not (is_self_taught(algorithm) and "ref_logprobs" in loss_reads(algorithm).columns),
        "policy_loss",
        f"reads the reference, whose place the teacher of advantage_estimator={estimator} takes",
        split_spec(algorithm.policy_loss)[0],
        "policy_loss=regular",
    )


def _reward_components(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    yield from _require(
        "reward_components" in estimator_reads(algorithm).columns or not algorithm.reward_components,
        "reward_components",
        f"are not read by advantage_estimator={split_spec(algorithm.advantage_estimator)[0]}",
        dict(algorithm.reward_components),
        "advantage_estimator=gdpo",
    )


def _step_rewards(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    estimator, reads = split_spec(algorithm.advantage_estimator)[0], estimator_reads(algorithm)
    yield from _require(
        not ("reward_components" in reads.columns and algorithm.step_rewards != "outcome"),
        "step_rewards",
        f"must be outcome with advantage_estimator={estimator}, which scores whole trajectories",
        algorithm.step_rewards,
        "step_rewards=outcome",
    )


def _dynamic_sampling(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    filters, estimator = algorithm.filters, split_spec(algorithm.advantage_estimator)[0]
    yield from _require(
        not (filters.dynamic_sampling != "none" and "values" in estimator_reads(algorithm).columns),
        "filters.dynamic_sampling",
        f"compares the trajectories of a prompt, which advantage_estimator={estimator} does not",
        filters.dynamic_sampling,
        "filters.dynamic_sampling=none",
    )


def _why_not_behaviour(algorithm: AlgorithmConfig) -> str:
    """Why the policy that sampled cannot be the one that ratios start from; empty where it can."""
    if algorithm.off_policy.enabled:
        return "with off_policy corrections, which weigh what lies between the two"
    loss, estimator = split_spec(algorithm.policy_loss)[0], split_spec(algorithm.advantage_estimator)[0]
    if starts_at_rollout(algorithm):
        return f"with policy_loss={loss}, which takes its ratio against them by itself"
    if "old_logprobs" not in loss_reads(algorithm).columns:
        return f"with policy_loss={loss}, which has no ratio"
    if algorithm.kl_reward_coef > 0:
        return (
            f"with kl_reward_coef={algorithm.kl_reward_coef:g}: a KL compares two models as the trainer computes them"
        )
    if "old_logprobs" in estimator_reads(algorithm).columns:
        return (
            f"with advantage_estimator={estimator}, which reads the policy's probabilities as the trainer computes them"
        )
    return ""


def _rejection(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    for name, bound in algorithm.off_policy.reject.items():
        field_name = f"{_PREFIX}off_policy.reject.{name}"
        if name not in REJECTION_CRITERIA:
            rule, remedy = f"is no criterion; choose from {', '.join(REJECTION_CRITERIA)}", "try sequence_mean_k3"
        elif name.endswith("k1"):
            pair = list(bound) if isinstance(bound, (list, tuple)) else []
            if len(pair) == 2 and all(map(_is_number, pair)) and 0 < pair[0] <= pair[1]:
                continue
            rule, remedy = "must be [low, high] of the ratio, both above 0", f"try {field_name}=[0.5,2]"
        else:
            if _is_number(bound) and bound > 0:
                continue
            rule, remedy = "must be a number above 0, the largest divergence", f"try {field_name}=0.01"
        yield Violation(field=field_name, rule=rule, value=str(bound), remedy=remedy)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


ALGORITHM_RULES: tuple[Rule, ...] = (
    _double_correction,
    _proximal,
    _rejection,
    _batch_normalize,
    partial(_bounds, low="weight_low", high="weight_high"),
    partial(_bounds, low="sequence_mask_low", high="sequence_mask_high"),
    _entropy_coef,
    _kl_controller,
    _reward_clip,
    _reward_weights,
    *(partial(_self_taught, name=name) for name in ("kl_loss_coef", "kl_reward_coef")),
    _self_taught_loss,
    _reward_components,
    _step_rewards,
    _dynamic_sampling,
)
"""One for what is decided together."""
