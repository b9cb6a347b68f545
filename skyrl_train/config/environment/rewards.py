"""`environment.reward` and `environment.rewards`: what the entries of the list say, and the rules on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from skyrl_train.config.algorithm.settings import AlgorithmConfig, estimator_reads
from skyrl_train.config.data.sources import EnvironmentConfig
from skyrl_train.config.models.placement import PlacementConfig
from skyrl_train.errors import Violation
from skyrl_train.registry import TARGET, PartSpec, part_name, split_spec

SINGLE_TURN = "single_turn"
"""The environment of a run whose rewards are all there is to it: one response, no reward of its own."""
OWN_REWARD = "environment"
"""Name of the environment's own reward among those of a trajectory."""
ONE_SCORE = ({"name": "score", "criterion": "how well the answer does its task"},)
"""The rubric of a judge that states none: its component is called as the judge is."""
_OF_THE_LIST = ("name", "weight", "normalize")


@dataclass(frozen=True, kw_only=True)
class RewardEntry:
    """One entry of `environment.rewards`, or `environment.reward`."""

    setting: str
    """`environment.rewards[0]`"""
    name: str
    """As the list says it, or the function's own name, with a number where an earlier entry has the same."""
    spec: PartSpec
    """What is called: without what belongs to the list."""
    weight: float | Mapping[str, float]
    """By which its value is multiplied, or those of its values that are in the sum; others are only reported."""
    normalize: Literal["group", "none"] | None
    """Whether its values are divided by their spread in the group before they are added up; None is the algorithm's way."""

    @property
    def in_trainer(self) -> bool:
        """Whether it is called in the trainer's process: those of this package that hold a model or connections."""
        return split_spec(self.spec)[0] in IN_TRAINER

    @property
    def weights(self) -> Mapping[str, Any]:
        """The weight of each component that is known by name before it is called: those that `weight` names, the criteria
        of a judge's rubric, or itself."""
        if isinstance(self.weight, Mapping):
            return self.weight
        target, arguments = split_spec(self.spec)
        rubric = arguments.get("rubric", ONE_SCORE)
        if target != "judge" or not isinstance(rubric, (list, tuple)) or is_one_score(rubric):
            return {self.name: self.weight}
        criteria = [str(each.get("name", "")) for each in rubric if isinstance(each, Mapping)]
        return dict.fromkeys(criteria, self.weight)


def is_one_score(rubric: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a judge's rubric is the one that it has unless another is stated."""
    return list(rubric) == list(ONE_SCORE)


IN_TRAINER = frozenset({"judge", "model"})
MODEL_CODE = frozenset({"searchcode", "lcb", "text2sql"})
"""Environments of skyrl-gym that run what the model wrote."""


def runs_model_code(environment: EnvironmentConfig) -> bool:
    """Whether something that is configured runs what the model wrote; rows may name further environments."""
    chosen = "" if environment.env_class is None else split_spec(environment.env_class)[0]
    return chosen in MODEL_CODE or any(split_spec(entry.spec)[0] == "code" for entry in reward_entries(environment))


def with_sandbox(spec: PartSpec, environment: EnvironmentConfig) -> PartSpec:
    """Return an environment, or a reward, with the level of its sandbox among its arguments where it runs such code."""
    target, arguments = split_spec(spec)
    if target not in MODEL_CODE and target != "code":
        return spec
    return {TARGET: target, "sandbox": environment.sandbox, **arguments}


def reward_entries(environment: EnvironmentConfig) -> tuple[RewardEntry, ...]:
    """Return the configured rewards, whose weights `REWARD_RULES` checks."""
    specs = {} if environment.reward is None else {"environment.reward": environment.reward}
    specs |= {f"environment.rewards[{index}]": spec for index, spec in enumerate(environment.rewards)}
    entries: list[RewardEntry] = []
    names: list[str] = []
    for setting, spec in specs.items():
        target, arguments = split_spec(spec)
        own = str(arguments.get("name") or target.rpartition(":")[2].rpartition(".")[2])
        names.append(own)
        passed = {key: value for key, value in arguments.items() if key not in _OF_THE_LIST}
        entries.append(
            RewardEntry(
                setting=setting,
                name=own if names.count(own) == 1 else f"{own}_{names.count(own)}",
                spec=with_sandbox({TARGET: target, **passed} if passed else target, environment),
                weight=arguments.get("weight", 1.0),
                normalize=arguments.get("normalize"),
            )
        )
    return tuple(entries)


def has_own_reward(environment: EnvironmentConfig) -> bool:
    """Whether the environment gives rewards beside those that are configured."""
    return environment.env_class is None or split_spec(environment.env_class)[0] != SINGLE_TURN


def with_reward_components(algorithm: AlgorithmConfig, environment: EnvironmentConfig) -> AlgorithmConfig:
    """Return the algorithm with the configured rewards as its `reward_components`, where its estimator reads them and none
    are named."""
    entries = reward_entries(environment)
    if algorithm.reward_components or not entries or "reward_components" not in estimator_reads(algorithm).columns:
        return algorithm
    components: dict[str, Any] = {OWN_REWARD: {"normalize": "none"}} if has_own_reward(environment) else {}
    for entry in entries:
        for name, weight in entry.weights.items():
            components[name] = {"weight": weight, "normalize": entry.normalize or "group"}
    return replace(algorithm, reward_components=components)


def _reward_lists(environment: EnvironmentConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """What belongs to the list: weights, and how components are normalised."""
    reads_components = "reward_components" in estimator_reads(algorithm).columns
    seen: set[str] = {OWN_REWARD}
    for entry in reward_entries(environment):
        many = isinstance(entry.weight, Mapping)
        for name, weight in entry.weights.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
                field, remedy = f"{entry.setting}.weight", "write weight: 0.5, or weight: {correct: 1, format: 0.5}"
                yield Violation.of(f"{field}.{name}" if many else field, weight, "must be a finite number", remedy)
            if name in seen:
                rule = f"gives a reward named {name!r}, which there is already"
                yield Violation.of(entry.setting, part_name(entry.spec), rule, "give the function another name")
            seen.add(name)
        if entry.normalize not in ("group", "none", None):
            remedy = "write normalize: group, or drop it"
            yield Violation.of(f"{entry.setting}.normalize", entry.normalize, "must be group or none", remedy)
        if entry.normalize == "group" and not reads_components:
            estimator = split_spec(algorithm.advantage_estimator)[0]
            rule = f"is not read by advantage_estimator={estimator}, which takes the sum of rewards"
            remedy = "add algorithm=gdpo, or drop it"
            yield Violation.of(f"{entry.setting}.normalize", entry.normalize, rule, remedy)


def _reward_models(environment: EnvironmentConfig, placement: PlacementConfig) -> Iterator[Violation]:
    for entry in reward_entries(environment):
        target, arguments = split_spec(entry.spec)
        on_ray = target == "model" and arguments.get("placement") == "ray"
        if on_ray and placement.backend == "inline" and not placement.auto:
            rule = "must be inline with placement.backend=inline, which has no actors"
            yield Violation.of(f"{entry.setting}.placement", "ray", rule, "add placement=ray")


REWARD_RULES = (_reward_lists, _reward_models)
