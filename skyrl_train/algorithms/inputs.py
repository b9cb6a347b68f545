"""What estimators and losses take and return. Columns are `[rows, len]`, right-padded; position t is token t."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from skyrl_train.telemetry import Metric


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """The rows of whole prompts: all rows of each of their trajectories, in any order.

    Columns that may be None are there where the estimator declares that it reads them.
    """

    rewards: Tensor
    """`[rows, len]` float. A turn's reward sits on the turn's last response token; 0 elsewhere and in padding."""
    loss_mask: Tensor
    """`[rows, len]` bool. True: a token that the policy sampled and that is trained."""
    prompt_index: Tensor
    """`[rows]` integer."""
    trajectory_index: Tensor
    """`[rows]` integer, unique in the batch. Several rows share one where a trajectory has one row per turn."""
    step_index: Tensor
    """`[rows]` integer: order of a trajectory's rows."""
    is_last_step: Tensor
    """`[rows]` bool: the trajectory's last row."""
    is_padding: Tensor
    """`[rows]` bool: dummy rows and failed trajectories, which belong to no group and get zeros."""
    values: Tensor | None = None
    """`[rows, len]` float: value of the state from which token t was sampled (the tokens before t)."""
    old_logprobs: Tensor | None = None
    """`[rows, len]` float: of the policy at the start of the update."""
    ref_logprobs: Tensor | None = None
    """`[rows, len]` float: of the reference (the teacher)."""
    sum_pi_squared: Tensor | None = None
    """`[rows, len]` float: sum over the vocabulary of squared old probabilities."""
    greedy_rewards: Tensor | None = None
    """`[rows]` float: reward of the greedy sample of the row's prompt."""
    reward_components: Tensor | None = None
    """`[rows, components]` float: the row's trajectory's, in the order of `reward_components`."""
    response_mask: Tensor | None = None
    """`[rows, len]` bool: True for a token that the policy sampled, trained or not. None: all of them are trained."""

    @property
    def responses(self) -> Tensor:
        """`[rows, len]` bool: what the policy sampled, whose runs are the turns. A filter that takes the loss of a
        trajectory away leaves its turns, and their place in the group, as they were."""
        return self.loss_mask if self.response_mask is None else self.response_mask


@dataclass(frozen=True, kw_only=True)
class AdvantageOutput:
    """Both `[rows, len]`, in the dtype of the rewards, 0 outside `loss_mask`."""

    advantages: Tensor
    returns: Tensor
    """What a critic learns to predict."""
    whiten_over_batch: Tensor | None = None
    """`[rows, len]` bool, or None. The caller replaces the advantages of these tokens by `(A - mean) / std`, mean and
    deviation taken over all trained tokens of the training batch: an estimator sees some of the prompts at a time."""
    scale_over_batch: tuple[float, float] | None = None
    """Two counts, or None. The caller sums both over the training batch and multiplies all advantages by their quotient;
    by nothing where the second is 0."""


@dataclass(frozen=True, kw_only=True)
class PolicyLossInputs:
    """Rows of one micro-batch. Values outside `loss_mask` may be anything, NaN included."""

    logprobs: Tensor
    """`[rows, len]` float: log-probability of each token under the model that is trained. Carries the gradient."""
    old_logprobs: Tensor
    """`[rows, len]` float: the same under the proximal policy, that of the start of the update. No gradient."""
    advantages: Tensor
    """`[rows, len]` float."""
    loss_mask: Tensor
    """`[rows, len]` bool."""
    rollout_logprobs: Tensor | None = None
    """`[rows, len]` float: under the behaviour policy, as the inference engine reported them while sampling."""
    ref_logprobs: Tensor | None = None
    """`[rows, len]` float: of the reference, for a loss that declares to read them."""
    values: Tensor | None = None
    """`[rows, len]` float: of the critic before the update, for a loss that declares to read them."""
    compute_dtype: torch.dtype | None = None
    """In which the model computed `logprobs`, so that it is known what of them is rounding; None: the type they have."""
    sequence_log_ratio: Tensor | None = None
    """`[rows, len]` float: what a loss of whole sequences reads of its sequence, where that lies in several rows."""
    policy_weights: Tensor | None = None
    """`[rows, len]` float: factors on token losses that were taken over the whole step; off-policy weights are in them."""


@dataclass(frozen=True, kw_only=True)
class PolicyLossOutput:
    token_losses: Tensor
    """`[rows, len]`, 0 outside `loss_mask`; the loss of a step is `sum(loss_weights * token_losses)`."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """Means over the trained tokens, or over rows where the name says so."""
