"""Advantage estimators: how much better than expected each trained token was.

Groups are the trajectories of one prompt, never rows; failed trajectories are padding and belong to no group. A group
of one, and a group whose scores are equal, gives exactly 0: no epsilon is added to a deviation that is not there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from skyrl_train.algorithms.groups import score
from skyrl_train.algorithms.inputs import AdvantageInputs, AdvantageOutput
from skyrl_train.config.algorithm import AlgorithmConfig

__all__ = ["ADVANTAGE_ESTIMATORS", "AdvantageEstimator", "AdvantageInputs", "AdvantageOutput"]

AdvantageEstimator = Callable[[AdvantageInputs, AlgorithmConfig], AdvantageOutput]


def grpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutput:
    """`(r_i - mean(r)) / std(r)` over the prompt's trajectories, the same for every trained token of the trajectory.

    DeepSeekMath, arXiv:2402.03300, section 4.1.2. The deviation is the sample's (n - 1), without the epsilon that TRL
    (1e-4) and verl (1e-6) add. `normalize_by_std=false` leaves the division out: Dr. GRPO, arXiv:2503.20783.
    Needs groups. Raises BatchError for malformed inputs.
    """
    scores = score(inputs, step_rewards=config.step_rewards, gamma=config.gamma)
    size = scores.group_size()
    centred = scores.values - scores.per_group(scores.values) / size
    differs = scores.differs()
    if config.normalize_by_std:
        variance = scores.per_group(centred.square()) / (size - 1).clamp(min=1)
        centred = centred / torch.where(differs, variance, 1.0).sqrt()
    advantages = torch.where(differs, centred, 0.0)
    return AdvantageOutput(advantages=scores.to_tokens(advantages), returns=scores.to_tokens(scores.values))


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {
    "grpo": grpo,
}
