"""Advantage estimators straight from their formulas: plain loops over floats, no tensors. And random inputs for them.

A trajectory here is a list of turns, a turn a context (tokens that are not trained) and actions (tokens that are). The
same trajectories are laid out as one row each or as one row per turn; what an oracle says must hold for both.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from skyrl_train.algorithms import AdvantageInputs, AdvantageOutput
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.parts import ADVANTAGE_ESTIMATORS
from skyrl_train.registry import TARGET


@dataclass(frozen=True)
class Step:
    """One turn: `context` tokens before it, and per action a value and two log-probabilities."""

    context: int
    values: list[float]
    reward: float
    old_logprobs: list[float] = field(default_factory=list)
    ref_logprobs: list[float] = field(default_factory=list)
    sum_pi_squared: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    prompt: int
    steps: list[Step]
    failed: bool = False
    greedy_reward: float = 0.0
    components: tuple[float, float] = (0.0, 0.0)

    @property
    def outcome(self) -> float:
        return sum(step.reward for step in self.steps)

    @property
    def num_actions(self) -> int:
        return sum(len(step.values) for step in self.steps)


def random_samples(seed: int, *, binary_rewards: bool = False, max_turns: int = 3) -> list[Sample]:
    """Uneven groups (one of a single trajectory), uneven turns, some failures, some groups of equal rewards."""
    draw, extra = random.Random(seed), random.Random(f"{seed} extra")
    samples = []
    for prompt in range(draw.randint(2, 4)):
        equal = draw.random() < 0.25
        greedy_reward, one_component = extra.uniform(-1, 2), extra.random() < 0.3
        for _ in range(1 if prompt == 0 else draw.randint(2, 5)):
            steps = []
            for _ in range(draw.randint(1, max_turns)):
                length = draw.randint(1, 6)
                reward = float(draw.random() < 0.5) if binary_rewards else draw.uniform(-1, 2)
                steps.append(
                    Step(
                        context=draw.randint(1, 4),
                        values=[draw.gauss(0, 1) for _ in range(length)],
                        reward=0.0 if equal else reward,
                        old_logprobs=[-draw.expovariate(1) for _ in range(length)],
                        ref_logprobs=[-draw.expovariate(1) for _ in range(length)],
                    )
                )
            # The square of one probability and some of the others': what old_logprobs allows.
            for step in steps:
                step.sum_pi_squared.extend(math.exp(2 * p) + extra.random() * 0.1 for p in step.old_logprobs)
            components = (float(extra.random() < 0.5), 1.0 if one_component else extra.uniform(0, 100))
            samples.append(
                Sample(
                    prompt=prompt,
                    steps=steps,
                    failed=draw.random() < 0.1,
                    greedy_reward=greedy_reward,
                    components=components,
                )
            )
    return samples


def advantage_inputs_of(
    samples: Sequence[Sample], *, step_wise: bool, dtype: torch.dtype = torch.float64
) -> AdvantageInputs:
    """One row per trajectory, or per turn. Failed ones become a padding row of two tokens."""
    rows: list[tuple[int, int, int, bool, bool, list[Step]]] = []
    for trajectory, sample in enumerate(samples):
        if sample.failed:
            rows.append((sample.prompt, trajectory, 0, False, True, []))
        elif step_wise:
            last = len(sample.steps) - 1
            rows += [
                (sample.prompt, trajectory, number, number == last, False, [step])
                for number, step in enumerate(sample.steps)
            ]
        else:
            rows.append((sample.prompt, trajectory, 0, True, False, sample.steps))
    width = max(max((sum(s.context + len(s.values) for s in row[5]) for row in rows), default=0), 2)
    columns = {
        name: torch.zeros(len(rows), width, dtype=dtype)
        for name in ("rewards", "values", "old_logprobs", "ref_logprobs", "sum_pi_squared")
    }
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        position = 0
        for step in row[5]:
            start = position + step.context
            position = start + len(step.values)
            mask[number, start:position] = True
            for name in ("values", "old_logprobs", "ref_logprobs", "sum_pi_squared"):
                given = getattr(step, name) or [0.0] * len(step.values)
                columns[name][number, start:position] = torch.tensor(given, dtype=dtype)
            columns["rewards"][number, position - 1] = step.reward
    facts = list(zip(*[row[:5] for row in rows]))
    return AdvantageInputs(
        **columns,
        loss_mask=mask,
        prompt_index=torch.tensor(facts[0], dtype=torch.int32),
        trajectory_index=torch.tensor(facts[1], dtype=torch.int32),
        step_index=torch.tensor(facts[2], dtype=torch.int32),
        is_last_step=torch.tensor(facts[3]),
        is_padding=torch.tensor(facts[4]),
        greedy_rewards=torch.tensor([samples[row[1]].greedy_reward for row in rows], dtype=dtype),
        reward_components=torch.tensor([samples[row[1]].components for row in rows], dtype=dtype),
    )


def by_trajectory(column: Tensor, inputs: AdvantageInputs, num_trajectories: int) -> list[list[float]]:
    """A `[rows, len]` column as the list of each trajectory's trained tokens, in order of steps."""
    found: list[list[float]] = [[] for _ in range(num_trajectories)]
    for row in sorted(range(len(column)), key=lambda index: int(inputs.step_index[index])):
        found[int(inputs.trajectory_index[row])] += column[row][inputs.loss_mask[row]].tolist()
    return found


Advantages = list[list[float]]
"""Per trajectory, per action; failed trajectories have none."""


def _kept(samples: Sequence[Sample], values: Callable[[Sample], list[float]]) -> Advantages:
    return [[] if sample.failed else values(sample) for sample in samples]


def _action_rewards(sample: Sample) -> list[float]:
    return [
        step.reward if index == len(step.values) - 1 else 0.0
        for step in sample.steps
        for index in range(len(step.values))
    ]


def gae_oracle(samples: Sequence[Sample], config: AlgorithmConfig, *, gae_lambda: float = 1.0) -> Advantages:
    def one(sample: Sample) -> list[float]:
        values = [value for step in sample.steps for value in step.values]
        rewards = _action_rewards(sample)
        advantages = [0.0] * len(values)
        following, next_value = 0.0, 0.0
        for t in reversed(range(len(values))):
            delta = rewards[t] + config.gamma * next_value - values[t]
            following = delta + config.gamma * gae_lambda * following
            advantages[t], next_value = following, values[t]
        return advantages

    return _kept(samples, one)


def _units(samples: Sequence[Sample], config: AlgorithmConfig) -> list[list[tuple[float, tuple[int, int], int]]]:
    """Per trajectory, per turn: score, group, number of actions. Outcome: one unit for all turns."""
    found = []
    for sample in samples:
        if sample.failed:
            found.append([])
        elif config.step_rewards == "outcome":
            found.append([(sample.outcome, (sample.prompt, 0), sample.num_actions)])
        else:
            rewards = [step.reward for step in sample.steps]
            found.append(
                [
                    (
                        sum(config.gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))),
                        (sample.prompt, k),
                        len(sample.steps[k].values),
                    )
                    for k in range(len(rewards))
                ]
            )
    return found


def _group_oracle(
    samples: Sequence[Sample],
    config: AlgorithmConfig,
    advantage: Callable[[float, list[float], list[int]], float],
) -> Advantages:
    """`advantage(score, scores of its group, their numbers of actions)`; 0 for groups of one or of equal scores."""
    units = _units(samples, config)
    groups: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for unit in (unit for of_sample in units for unit in of_sample):
        groups.setdefault(unit[1], []).append((unit[0], unit[2]))
    found: Advantages = []
    for sample, of_sample in zip(samples, units):
        actions: list[float] = []
        for value, group, length in of_sample:
            scores = [score for score, _ in groups[group]]
            same = max(scores) - min(scores) <= 1e-12
            result = 0.0 if same else advantage(value, scores, [count for _, count in groups[group]])
            actions += [result] * (sample.num_actions if config.step_rewards == "outcome" else length)
        found.append(actions)
    return found


def grpo_oracle(samples: Sequence[Sample], config: AlgorithmConfig) -> Advantages:
    def one(value: float, scores: list[float], _: list[int]) -> float:
        deviation = statistics.stdev(scores) if config.normalize_by_std else 1.0
        return (value - statistics.fmean(scores)) / deviation

    return _group_oracle(samples, config, one)


def rloo_oracle(samples: Sequence[Sample], config: AlgorithmConfig) -> Advantages:
    return _group_oracle(
        samples, config, lambda value, scores, _: value - (math.fsum(scores) - value) / (len(scores) - 1)
    )


def maxrl_oracle(samples: Sequence[Sample], config: AlgorithmConfig) -> Advantages:
    def one(value: float, scores: list[float], _: list[int]) -> float:
        mean = statistics.fmean(scores)
        return (value - mean) / mean if mean > 0 else 0.0

    return _group_oracle(samples, config, one)


def opo_oracle(samples: Sequence[Sample], config: AlgorithmConfig) -> Advantages:
    def one(value: float, scores: list[float], lengths: list[int]) -> float:
        weighted = math.fsum(score * length for score, length in zip(scores, lengths))
        return value - weighted / sum(lengths)

    return _group_oracle(samples, config, one)


def remax_oracle(samples: Sequence[Sample], config: AlgorithmConfig) -> Advantages:
    units = _units(samples, config)
    found: Advantages = []
    for sample, of_sample in zip(samples, units):
        whole = config.step_rewards == "outcome"
        found.append(
            [
                value - sample.greedy_reward
                for value, _, length in of_sample
                for _ in range(sample.num_actions if whole else length)
            ]
        )
    return found


def pass_at_k_oracle(samples: Sequence[Sample], config: AlgorithmConfig) -> Advantages:
    def one(value: float, scores: list[float], _: list[int]) -> float:
        best, second, *_rest = sorted(scores, reverse=True)
        deviation = statistics.stdev(scores) if config.normalize_by_std else 1.0
        return (best - second) / deviation if value == best else 0.0

    return _group_oracle(samples, config, one)


def gpg_oracle(samples: Sequence[Sample], config: AlgorithmConfig) -> Advantages:
    """Before the batch's factor."""
    return grpo_oracle(samples, config)


def optimal_token_baseline_oracle(samples: Sequence[Sample], config: AlgorithmConfig) -> Advantages:
    def returns_and_weights(sample: Sample) -> list[tuple[float, float]]:
        rewards = _action_rewards(sample)
        probabilities = [math.exp(old) for step in sample.steps for old in step.old_logprobs]
        squares = [square for step in sample.steps for square in step.sum_pi_squared]
        energy = [1 - 2 * p + square for p, square in zip(probabilities, squares)]
        count = len(rewards)
        return [
            (
                math.fsum(config.gamma ** (j - t) * rewards[j] for j in range(t, count)),
                math.fsum(energy[: t + 1]),
            )
            for t in range(count)
        ]

    pairs = [[] if sample.failed else returns_and_weights(sample) for sample in samples]
    found: Advantages = []
    for sample, own in zip(samples, pairs):
        group = [p for other, p in zip(samples, pairs) if other.prompt == sample.prompt and not other.failed]
        outcomes = [s.outcome for s in samples if s.prompt == sample.prompt and not s.failed]
        differs = bool(outcomes) and max(outcomes) - min(outcomes) > 1e-12
        actions = []
        for t, (value, _) in enumerate(own):
            reached = [p[t] for p in group if len(p) > t]
            alone = len(reached) < 2
            baseline = 0.0 if alone else math.fsum(g * w for g, w in reached) / math.fsum(w for _, w in reached)
            actions.append(value - baseline if differs else 0.0)
        found.append(actions)
    return found


def gdpo_oracle(samples: Sequence[Sample], config: AlgorithmConfig) -> Advantages:
    """Before whitening."""
    found: Advantages = []
    for sample in samples:
        group = [other.components for other in samples if other.prompt == sample.prompt and not other.failed]
        total = 0.0
        for index, component in enumerate(config.reward_components.values()):
            given = component if isinstance(component, dict) else {"weight": component, "normalize": "group"}
            values = [components[index] for components in group]
            if len(values) > 1 and max(values) > min(values):
                spread = statistics.stdev(values) if given["normalize"] == "group" else 1.0
                total += given["weight"] * (sample.components[index] - statistics.fmean(values)) / spread
        found.append([] if sample.failed else [total] * sample.num_actions)
    return found


def reinforce_pp_oracle(samples: Sequence[Sample], config: AlgorithmConfig) -> Advantages:
    """Before whitening."""

    def one(sample: Sample) -> list[float]:
        rewards = _action_rewards(sample)
        return [
            math.fsum(config.gamma ** (j - t) * rewards[j] for j in range(t, len(rewards))) for t in range(len(rewards))
        ]

    return _kept(samples, one)


def reinforce_pp_baseline_oracle(samples: Sequence[Sample], config: AlgorithmConfig) -> Advantages:
    """Before whitening."""
    return _group_oracle(samples, config, lambda value, scores, _: value - statistics.fmean(scores))


def distillation_oracle(samples: Sequence[Sample], config: AlgorithmConfig) -> Advantages:
    def one(sample: Sample) -> list[float]:
        return [
            ref - old for step in sample.steps for old, ref in zip(step.old_logprobs, step.ref_logprobs, strict=True)
        ]

    return _kept(samples, one)


ADVANTAGE_ORACLES: dict[str, Callable[..., Advantages]] = {
    "gae": gae_oracle,
    "grpo": grpo_oracle,
    "rloo": rloo_oracle,
    "reinforce++": reinforce_pp_oracle,
    "reinforce++_baseline": reinforce_pp_baseline_oracle,
    "maxrl": maxrl_oracle,
    "opo": opo_oracle,
    "remax": remax_oracle,
    "grpo_pass_at_k": pass_at_k_oracle,
    "gpg": gpg_oracle,
    "optimal_token_baseline": optimal_token_baseline_oracle,
    "gdpo": gdpo_oracle,
    "on_policy_distillation": distillation_oracle,
    "self_distillation": distillation_oracle,
}


ADVANTAGE_ARGUMENTS: dict[str, dict[str, Any]] = {"gae": {"gae_lambda": 0.8}}
"""By the estimator's name, where tests give it arguments of its own."""


def estimator_with_arguments(name: str) -> Callable[..., AdvantageOutput]:
    """The estimator with its `ADVANTAGE_ARGUMENTS`."""
    estimator: Callable[..., AdvantageOutput] = ADVANTAGE_ESTIMATORS.resolve(
        {TARGET: name, **ADVANTAGE_ARGUMENTS.get(name, {})}
    )
    return estimator


def advantage_error(name: str, seed: int, config: AlgorithmConfig) -> float:
    """Largest difference between the estimator and its oracle, over both layouts of one random input."""
    if name == "gdpo":
        length = {"weight": 0.5, "normalize": "none"} if seed % 2 else 0.5
        config = replace(config, reward_components={"correct": 1.0, "length": length}, step_rewards="outcome")
    samples = random_samples(seed, binary_rewards=name == "maxrl")
    expected = ADVANTAGE_ORACLES[name](samples, config, **ADVANTAGE_ARGUMENTS.get(name, {}))
    largest = 0.0
    for step_wise in (False, True):
        inputs = advantage_inputs_of(samples, step_wise=step_wise)
        found = by_trajectory(estimator_with_arguments(name)(inputs, config).advantages, inputs, len(samples))
        if [len(actions) for actions in found] != [len(actions) for actions in expected]:
            raise AssertionError(f"{name}: numbers of actions differ")
        pairs = zip((a for actions in found for a in actions), (a for actions in expected for a in actions))
        largest = max([largest, *(abs(one - other) for one, other in pairs)])
    return largest
