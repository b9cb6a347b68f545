"""Advantage estimators with a baseline of their own: a greedy sample, the best of a group, each token's, each reward's.

What `advantages.py` says of groups holds here too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from skyrl_train.algorithms.groups import Scores, score, sum_by
from skyrl_train.algorithms.inputs import AdvantageInputs, AdvantageOutput
from skyrl_train.algorithms.losses.checks import needed
from skyrl_train.algorithms.sequences import actions_of, discounted_suffix_sum, position_in_segment
from skyrl_train.batch import TrainingInputBatch, component_column, rounding_tolerance
from skyrl_train.config.algorithm import AlgorithmConfig, needs_greedy_sample
from skyrl_train.errors import BatchError
from skyrl_train.types import Failure, Outcome, RolloutBatch, Trajectory


def remax(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutput:
    """`r_i - r_greedy`, with the reward of one greedy sample of the same prompt; groups are not needed.

    ReMax, arXiv:2310.10505, equation 5. With `step_rewards=turn_return` each turn's return-to-go stands for `r_i`.
    Needs greedy rewards. Raises BatchError for malformed inputs.
    """
    scores = score(inputs, step_rewards=config.step_rewards, gamma=config.gamma)
    greedy = needed("greedy_rewards", inputs.greedy_rewards).double()
    of_token = greedy.unsqueeze(1).expand(scores.trained.shape).to(inputs.rewards.dtype)
    returns = scores.to_tokens(scores.values)
    return AdvantageOutput(advantages=torch.where(scores.trained, returns - of_token, 0.0), returns=returns)


def grpo_pass_at_k(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutput:
    """`r_best - r_second` for the best trajectory of the prompt, 0 for all others; k is the size of the group.

    Optimizing Language Models for Inference Time Objectives using Reinforcement Learning, arXiv:2503.19595, section
    3.1: the leave-one-out gradient of `max(r_1 .. r_k)`. Divided by the group's sample deviation unless
    `normalize_by_std=false`. Where the best two are equal up to rounding, all get 0. Needs groups. Raises BatchError
    for malformed inputs.
    """
    scores = score(inputs, step_rewards=config.step_rewards, gamma=config.gamma)
    if not scores.values.numel():
        return AdvantageOutput(advantages=scores.to_tokens(scores.values), returns=scores.to_tokens(scores.values))
    order = torch.argsort(scores.values, stable=True)
    order = order[torch.argsort(scores.group[order], stable=True)]
    group = scores.group[order]
    last = torch.cat([group[1:] != group[:-1], group.new_ones(1, dtype=torch.bool)])
    best = order[last]
    has_second = torch.cat([group.new_zeros(1, dtype=torch.bool), group[1:] == group[:-1]])[last]
    second = torch.where(has_second, order[(last.nonzero().squeeze(1) - 1).clamp(min=0)], best)
    lead = scores.values[best] - scores.values[second]
    tolerance = rounding_tolerance(torch.maximum(scores.magnitude[best], scores.magnitude[second]), scores.reward_dtype)
    advantages = torch.zeros_like(scores.values)
    advantages[best] = torch.where(lead > tolerance, lead, 0.0)
    if config.normalize_by_std:
        advantages = advantages / scores.deviation()
    return AdvantageOutput(advantages=scores.to_tokens(advantages), returns=scores.to_tokens(scores.values))


def gpg(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutput:
    """`alpha * (r_i - mean(r)) / F`, `alpha = B / (B - M)` over the batch: B trajectories, M of groups of equal scores.

    Group Policy Gradient, arXiv:2504.02546, equations 6 and 7: alpha gives the trajectories that teach something the
    weight of those that teach nothing. F is 1, or the group's deviation with `normalize_by_std=true`. alpha is taken
    over the training batch by the caller. Needs groups. Raises BatchError for malformed inputs.
    """
    scores = score(inputs, step_rewards=config.step_rewards, gamma=config.gamma)
    centred, differs = scores.values - scores.group_mean(), scores.differs()
    if config.normalize_by_std:
        centred = centred / scores.deviation()
    return AdvantageOutput(
        advantages=scores.to_tokens(torch.where(differs, centred, 0.0)),
        returns=scores.to_tokens(scores.values),
        scale_over_batch=(float(scores.values.numel()), float(differs.sum())),
    )


def optimal_token_baseline(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutput:
    """`G_t - B_t`, `B_t = sum_i(G_it * W_it) / sum_i(W_it)` over the prompt's trajectories that reach action t.

    `G_t` is the discounted return-to-go and `W_t = sum_(s <= t) (1 - 2 * p_s + sum_v p_sv^2)` the squared norm of the
    trajectory's gradient up to t in the logits, with `p_s` the probability of the sampled token: the baseline of least
    variance at each token. The Optimal Token Baseline, arXiv:2602.07078. Actions are counted over all turns of a
    trajectory, observations skipped, so that one turn and several are one formula. An action that one trajectory alone
    reaches has no baseline (0, as in verl). Needs groups, old log-probabilities and `sum_pi_squared`. Raises BatchError
    for malformed inputs.
    """
    scores = score(inputs, step_rewards="outcome", gamma=1.0)
    actions = actions_of(inputs)
    returns = discounted_suffix_sum(actions.rewards, actions.trajectory, config.gamma)
    probability = actions.gather(needed("old_logprobs", inputs.old_logprobs)).exp()
    energy = 1 - 2 * probability + actions.gather(needed("sum_pi_squared", inputs.sum_pi_squared))
    position = position_in_segment(actions.trajectory)
    total = energy.cumsum(0)
    before = (total - energy)[torch.arange(len(position), device=position.device) - position]
    weight = total - before
    row = torch.div(actions.index, max(inputs.rewards.shape[1], 1), rounding_mode="floor")
    key = torch.stack([inputs.prompt_index[row].long(), position])
    group = torch.unique(key, dim=1, return_inverse=True)[1] if len(position) else position
    shared = (sum_by(torch.ones_like(weight), group) > 1)[group] & (sum_by(weight, group) > 0)[group]
    mean = sum_by(returns * weight, group)[group] / torch.where(shared, sum_by(weight, group)[group], 1.0)
    advantages = actions.scatter(returns - torch.where(shared, mean, 0.0), inputs.rewards)
    return AdvantageOutput(
        advantages=torch.where(scores.differs_at_tokens(), advantages, 0.0),
        returns=actions.scatter(returns, inputs.rewards),
    )


def gdpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutput:
    """`sum_k weight_k * (r_ik - mean(r_k)) / std(r_k)`, then whitened over the training batch.

    Group reward-Decoupled normalization, arXiv:2601.05242, equations 4 to 6: each reward of `reward_components` is
    normalised within the prompt by itself, so that a reward of large spread does not hide the others. A reward that is
    equal in a group adds 0 there; trajectories of groups where all are keep their 0. The batch's mean and deviation are
    over trained tokens, as in verl. A component with `normalize: none` is not divided by its deviation: it keeps its own
    scale. Without `reward_components` the reward itself is the only one. Needs groups and the components. Raises BatchError
    for malformed inputs.
    """
    scores = score(inputs, step_rewards="outcome", gamma=1.0)
    parts: list[tuple[float, Scores, bool]] = [] if config.reward_components else [(1.0, scores, True)]
    if config.reward_components:
        components = needed("reward_components", inputs.reward_components).double()
        for column, component in zip(components.unbind(1), config.reward_components.values(), strict=True):
            values = _of_units(column, scores, inputs)
            one = replace(scores, values=values, magnitude=values.abs())
            given = component if isinstance(component, Mapping) else {"weight": component}
            parts.append((float(given.get("weight", 1.0)), one, given.get("normalize", "group") == "group"))
    total = torch.zeros_like(scores.values)
    differs = torch.zeros_like(scores.values, dtype=torch.bool)
    for weight, one, by_deviation in parts:
        centred = one.values - one.group_mean()
        if by_deviation:
            centred = centred / one.deviation()
        total += weight * torch.where(one.differs(), centred, 0.0)
        differs |= one.differs()
    at_tokens = scores.to_tokens(differs.double()) != 0
    return AdvantageOutput(
        advantages=scores.to_tokens(total), returns=scores.to_tokens(scores.values), whiten_over_batch=at_tokens
    )


def _of_units(column: Tensor, scores: Scores, inputs: AdvantageInputs) -> Tensor:
    """Take a fact of rows `[rows]`, equal on all rows of a trajectory, to trajectories `[units]`."""
    values = torch.zeros_like(scores.values)
    if values.numel():
        real = ~inputs.is_padding
        values[scores.unit_of_token[real, 0]] = column[real]
    return values


def with_greedy_rewards(rollouts: RolloutBatch, greedy: RolloutBatch) -> RolloutBatch:
    """Return `rollouts` with the reward of each prompt's one trajectory of `greedy` on every trajectory of the prompt.

    Where the greedy sample failed, its reward is unknown and the prompt's trajectories fail too, with its reason: a
    failure never becomes a reward. Raises BatchError where the two are not of the same prompts.
    """
    if greedy.n_samples_per_prompt != 1 or [p.uid for p in greedy.prompts] != [p.uid for p in rollouts.prompts]:
        raise BatchError("greedy samples must be one for each prompt of the rollouts, in the same order")
    baselines = [sample for sample in greedy.trajectories for _ in range(rollouts.n_samples_per_prompt)]
    pairs = zip(rollouts.trajectories, baselines, strict=True)
    return replace(rollouts, trajectories=tuple(_with_baseline(*pair) for pair in pairs))


def _with_baseline(trajectory: Trajectory, greedy: Trajectory) -> Trajectory:
    if trajectory.failed:
        return trajectory
    if greedy.failure is None:
        return replace(trajectory, greedy_reward=greedy.reward)
    message = f"the greedy sample of its prompt failed: {greedy.failure.message}"
    failure = Failure(kind=greedy.failure.kind, message=message, turn_index=greedy.failure.turn_index)
    return replace(trajectory, outcome=Outcome.FAILED, failure=failure)


def with_reward_columns(
    batch: TrainingInputBatch, rollouts: RolloutBatch, config: AlgorithmConfig
) -> TrainingInputBatch:
    """Return the batch assembled from `rollouts` with the row columns of rewards that the configured estimator reads.

    Raises BatchError naming the trajectory where one does not have them.
    """
    columns: dict[str, Tensor] = {}
    if needs_greedy_sample(config):
        missing = "no reward of a greedy sample: it was recorded by another advantage_estimator"
        columns["greedy_rewards"] = _per_row(batch, rollouts, [t.greedy_reward for t in rollouts.trajectories], missing)
    for name in config.reward_components:
        reported = [{**trajectory.metrics, **trajectory.rewards} for trajectory in rollouts.trajectories]
        values = [numbers.get(name) for numbers in reported]
        known = sorted({key for numbers in reported for key in numbers})
        missing = (
            f"no metric {name!r} that is a finite number, which reward_components names; its rewards and its environment "
            "report "
        )
        columns[component_column(name)] = _per_row(batch, rollouts, values, missing + (", ".join(known) or "none"))
    return batch.with_columns(**columns) if columns else batch


def _per_row(batch: TrainingInputBatch, rollouts: RolloutBatch, values: list[float | None], missing: str) -> Tensor:
    """Return `[num_rows]` float32; 0 for failed trajectories and dummy rows."""
    for trajectory, value in zip(rollouts.trajectories, values, strict=True):
        if not trajectory.failed and (value is None or not math.isfinite(value)):
            raise BatchError(f"trajectory {trajectory.prompt_uid}/{trajectory.sample_index} has {missing}")
    known = [0.0 if t.failed or value is None else value for t, value in zip(rollouts.trajectories, values)]
    trajectory_of_row = batch["trajectory_index"].long()
    found = torch.tensor(known, dtype=torch.float32)[trajectory_of_row.clamp(min=0)]
    return torch.where(batch["is_padding"], 0.0, found)
