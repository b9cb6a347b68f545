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


def _violation(name: str, rule: str, value: object, remedy: str) -> Violation:
    """Of the setting `name`; `remedy` is a setting to try, or advice."""
    return Violation.of(_PREFIX + name, value, rule, f"try {_PREFIX}{remedy}" if "=" in remedy else remedy)


def _double_correction(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    correction, loss = algorithm.off_policy, split_spec(algorithm.policy_loss)[0]
    if correction.enabled and starts_at_rollout(algorithm):
        rule = f"cannot be combined with policy_loss={loss}, whose ratio already starts at the rollout"
        remedy = f"switch the correction off, or choose another {_PREFIX}policy_loss"
        yield _violation("off_policy.weight", rule, correction.weight, remedy)


def _proximal(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    if algorithm.proximal == "behaviour" and (why := _why_not_behaviour(algorithm)):
        yield _violation("proximal", f"cannot be behaviour {why}", algorithm.proximal, "proximal=recompute")


def _bounds(algorithm: AlgorithmConfig, low: str, high: str) -> Iterator[Violation]:
    """The lower one of two settings of `off_policy` must not be above the other."""
    low_value, high_value = getattr(algorithm.off_policy, low), getattr(algorithm.off_policy, high)
    if low_value > high_value:
        name = f"off_policy.{low}"
        yield _violation(name, f"must not be above {high}={high_value:g}", low_value, f"{name}=0")


def _entropy_coef(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    weight, most = algorithm.entropy_coef, algorithm.entropy_coef_max
    if algorithm.entropy_controller == "adaptive" and not 0 <= weight <= most:
        rule = f"must lie between 0 and entropy_coef_max={most:g} with entropy_controller=adaptive"
        yield _violation("entropy_coef", rule, weight, "entropy_coef=0")


def _reward_clip(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    low, high = algorithm.filters.reward_clip_low, algorithm.filters.reward_clip_high
    if low is not None and high is not None and low >= high:
        rule = f"must be below reward_clip_high={high}"
        yield _violation("filters.reward_clip_low", rule, low, "filters.reward_clip_low=null")


def _reward_weights(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    for name, component in algorithm.reward_components.items():
        given = component if isinstance(component, Mapping) else {"weight": component}
        is_weight = _is_number(given.get("weight", 1.0)) and given.get("normalize", "group") in ("group", "none")
        if not is_weight or not set(given) <= {"weight", "normalize"}:
            rule = "must be a number, the reward's weight, or {weight: 1, normalize: group|none}"
            yield _violation(f"reward_components.{name}", rule, component, f"reward_components={{{name}: 1}}")


def _self_taught(algorithm: AlgorithmConfig, name: str) -> Iterator[Violation]:
    """A self-taught policy has no weight on the divergence from a reference."""
    weight, estimator = getattr(algorithm, name), split_spec(algorithm.advantage_estimator)[0]
    if is_self_taught(algorithm) and weight != 0:
        rule = f"must be 0 with advantage_estimator={estimator}, whose teacher takes the reference's place"
        yield _violation(name, rule, weight, f"{name}=0")


def _self_taught_loss(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    estimator, loss = (split_spec(each)[0] for each in (algorithm.advantage_estimator, algorithm.policy_loss))
    if is_self_taught(algorithm) and "ref_logprobs" in loss_reads(algorithm).columns:
        rule = f"reads the reference, whose place the teacher of advantage_estimator={estimator} takes"
        yield _violation("policy_loss", rule, loss, "policy_loss=regular")


def _step_rewards(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    estimator, columns = split_spec(algorithm.advantage_estimator)[0], estimator_reads(algorithm).columns
    if "reward_components" in columns and algorithm.step_rewards != "outcome":
        rule = f"must be outcome with advantage_estimator={estimator}, which scores whole trajectories"
        yield _violation("step_rewards", rule, algorithm.step_rewards, "step_rewards=outcome")


def _dynamic_sampling(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    sampling, estimator = algorithm.filters.dynamic_sampling, split_spec(algorithm.advantage_estimator)[0]
    if sampling != "none" and "values" in estimator_reads(algorithm).columns:
        rule = f"compares the trajectories of a prompt, which advantage_estimator={estimator} does not"
        yield _violation("filters.dynamic_sampling", rule, sampling, "filters.dynamic_sampling=none")


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
    partial(_bounds, low="weight_low", high="weight_high"),
    partial(_bounds, low="sequence_mask_low", high="sequence_mask_high"),
    _entropy_coef,
    _reward_clip,
    _reward_weights,
    *(partial(_self_taught, name=name) for name in ("kl_loss_coef", "kl_reward_coef")),
    _self_taught_loss,
    _step_rewards,
    _dynamic_sampling,
)
"""One for what is decided together."""
