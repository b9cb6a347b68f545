"""`trainer.algorithm` (`algorithm=grpo|...`): advantages, losses, KL, corrections, filters. Part of the schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from skyrl_train.config.fields.fields import NonNegativeInt, Of, PositiveInt, Range, ReadWith
from skyrl_train.parts import (
    ADVANTAGE_ESTIMATORS,
    CRITIC_LOSSES,
    KL_ESTIMATORS,
    LOSS_REDUCTIONS,
    POLICY_LOSSES,
    ROLLOUT_FILTERS,
)
from skyrl_train.registry import PartSpec, Reads

Share = Annotated[float, Range(0.0, 1.0)]
NonNegative = Annotated[float, Range(0.0)]
Positive = Annotated[float, Range(0.0, exclusive_min=True)]


@dataclass(frozen=True)
class NotAbove:
    """On an argument of a part: another argument that it must not be above."""

    argument: str


_WEIGHED = Of(".weight", ("token", "sequence", "geometric"))
_MASKED = Of(".sequence_mask", ("geometric", "product"))
_ADAPTIVE_KL = Of(".kl_controller", ("adaptive",))
_ADAPTIVE_ENTROPY = Of(".entropy_controller", ("adaptive",))
_CRITIC = Of("critic.model.path", write="critic.model.path=policy")


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig:
    """`trainer.algorithm.off_policy`: weights and masks from `ratio = exp(old_logprob - rollout_logprob)`.

    Masked tokens get a loss of 0; the denominators of the step stay.
    """

    weight: Literal["auto", "none", "token", "sequence", "geometric"] = "auto"
    """Multiply token losses with the ratio of the token, its turn (product), or their geometric mean. auto: token where
    `generator.quantization` rounds weights and ratios start at the trainer's, else none."""
    weight_mode: Annotated[Literal["truncate", "mask", "mask_only"], _WEIGHED] = "truncate"
    """A weight outside the bounds becomes the nearer bound (truncate) or 0 (mask); mask_only: 0, and 1 inside."""
    weight_low: Annotated[NonNegative, _WEIGHED] = 0.0
    """Smallest weight."""
    weight_high: Annotated[Positive, _WEIGHED] = 2.0
    """Largest weight."""
    sequence_mask: Literal["none", "geometric", "product"] = "none"
    """Leave out turns whose geometric mean or product of ratios is outside the bounds."""
    sequence_mask_low: Annotated[NonNegative, _MASKED] = 0.99
    """Smallest value kept; near 1 for geometric, further off for product."""
    sequence_mask_high: Annotated[Positive, _MASKED] = 1.01
    """Largest value kept."""
    reject: Mapping[str, Any] = field(default_factory=dict)
    """Further criteria, such as `{sequence_mean_k3: 0.01, token_k1: [0.2, 5]}`; any one leaves out. `token_k1`,
    `sequence_sum_k1`, `sequence_mean_k1`: `[low, high]` of the ratio. `token_`, `sequence_sum_`, `sequence_mean_`,
    `sequence_max_` with `k2` or `k3`: largest divergence."""
    batch_normalize: Annotated[bool, _WEIGHED] = False
    """Divide weights by their mean over the optimizer step."""
    negative_kl_max: NonNegative = 0.0
    """Leave out tokens of negative advantage whose sequence's mean rollout_logprob - logprob is above this; 0 is off."""
    outlier_low: NonNegative = 0.0
    """Leave out turns with a ratio below this; 0 is off."""
    outlier_high: NonNegative = 0.0
    """Leave out turns with a ratio above this; 0 is off."""

    @property
    def weighs(self) -> bool:
        """Whether losses are weighted; `auto` that was not decided is none."""
        return self.weight not in ("auto", "none")

    @property
    def enabled(self) -> bool:
        outliers = self.outlier_low > 0 or self.outlier_high > 0
        return self.weighs or self.sequence_mask != "none" or outliers or bool(self.reject)


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """`trainer.algorithm.filters`: which rollouts are trained on."""

    dynamic_sampling: Literal["none", "filter", "replace"] = "none"
    """filter: generate until enough prompts have differing rewards. replace: fill up with copies of those."""
    dynamic_sampling_max_batches: Annotated[PositiveInt, Of(".dynamic_sampling", ("filter", "replace"))] = 30
    """The run fails after so many batches without enough such prompts."""
    replace_min_share: Annotated[Share, Of(".dynamic_sampling", ("replace",))] = 0.3
    """Below this share of such prompts, generate another batch instead."""
    zero_variance: bool = False
    """Leave prompts of equal rewards out of loss and denominators."""
    overlong: bool = False
    """Leave trajectories cut off by a length limit out of the loss, but in their group's rewards."""
    overlong_soft_share: Share = 0.0
    """Penalise this last share of `overlong_max_length`; 0 is off (DAPO: 0.2)."""
    overlong_max_length: Annotated[PositiveInt, ReadWith(".overlong_soft_share")] = 512
    """Response tokens at full penalty, such as `max_generate_length`."""
    overlong_penalty: Annotated[NonNegative, ReadWith(".overlong_soft_share")] = 1.0
    """Full penalty."""
    resample: Literal["none", "pow", "max_min", "max_random"] = "none"
    """PF-PPO: redraw trajectories, with replacement. pow: by score's size to `resample_power`. max_min: highest and
    lowest. max_random: highest four times as likely as others."""
    resample_power: Annotated[NonNegative, Of(".resample", ("pow",))] = 2.0
    """The exponent."""
    non_stop_scale: Share = 1.0
    """Multiplies rewards where the last response did not stop by itself; 1 is off."""
    non_stop_penalty: NonNegative = 0.0
    """Taken from such rewards, after `non_stop_scale`."""
    reward_clip_low: float | None = None
    """Smallest total reward, after penalties; null is off."""
    reward_clip_high: float | None = None
    """Largest total reward; null is off."""
    keep: tuple[Annotated[PartSpec, ROLLOUT_FILTERS], ...] = ()
    """Custom filters: whether to train on a trajectory; its reward counts in its group anyway."""
    zero_reward_on_non_stop: bool = False
    """The same rewards become 0."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """`trainer.algorithm`: chosen with `algorithm=NAME` (docs/algorithms.md)."""

    advantage_estimator: Annotated[PartSpec, ADVANTAGE_ESTIMATORS] = "grpo"
    """How much better than expected a token was."""
    normalize_by_std: bool = True
    """GRPO: divide by the group's standard deviation (Dr. GRPO: false)."""
    step_rewards: Literal["outcome", "turn_return"] = "outcome"
    """Each of several turns gets the whole reward, or its own discounted return-to-go."""
    reward_components: Annotated[
        Mapping[str, Any], Of(".advantage_estimator", reads="reward_components", write="algorithm=gdpo")
    ] = field(default_factory=dict)
    """Weights of rewards and environment metrics, such as `{correct: 1, format: 0.5}`; `{weight: 0.5, normalize: none}`
    is not divided by its spread. Empty: as `environment.rewards` says, else the reward alone."""
    normalize_advantages: bool = False
    """Whiten advantages over each mini-batch."""
    gamma: Annotated[float, Range(0.0, 1.0)] = 1.0
    """Discount of later rewards, per token (gae, reinforce++) or turn (step_rewards=turn_return)."""
    policy_loss: Annotated[PartSpec, POLICY_LOSSES] = "regular"
    """The loss of each trained token."""
    loss_reduction: Annotated[PartSpec, LOSS_REDUCTIONS] = "token_mean"
    """How token losses become one number; denominators span the optimizer step."""
    max_sequence_length_for_norm: Annotated[PositiveInt, ReadWith(".loss_reduction", ("seq_mean_token_sum_norm",))] = (
        512
    )
    """Constant divisor, in tokens."""
    sequence_unit: Literal["turn", "trajectory"] = "turn"
    """A sequence to gspo, gmpo, vespo and `off_policy`: one response, or all of a trajectory."""
    eps_clip_low: Annotated[float, Range(0.0)] = 0.2
    """Clip the ratio below 1 minus this (gmpo: log-ratio below minus this; dppo: threshold, falling probabilities)."""
    eps_clip_high: Annotated[float, Range(0.0)] = 0.2
    """Clip the ratio above 1 plus this (dppo: threshold, rising ones)."""
    proximal: Literal["recompute", "behaviour"] = "recompute"
    """What ratios start from. recompute: the weights when the batch closes. behaviour: the engine's log-probabilities,
    without a pass."""
    entropy_quantile: Share = 0.0
    """Train only tokens at or above this entropy quantile of the optimizer step: 0.8 is the upper fifth; 0 is off."""
    kl_estimator: Annotated[PartSpec, KL_ESTIMATORS] = "k3"
    """Estimator of KL(policy || reference)."""
    kl_bias_correction: bool = False
    """Multiply the loss's KL with the ratio, gradients included: unbiased (DeepSeek-V3.2)."""
    kl_loss_coef: Annotated[float, Range(0.0)] = 0.0
    """Weight of the KL term in the loss; 0 needs no reference model."""
    kl_reward_coef: NonNegative = 0.0
    """Weight of the KL taken from token rewards, or the first one; 0 is off."""
    kl_controller: Annotated[
        Literal["fixed", "adaptive"], Of(".kl_reward_coef", write="trainer.algorithm.kl_reward_coef=0.05")
    ] = "fixed"
    """adaptive keeps the KL near `kl_target` by moving the weight."""
    kl_target: Annotated[Positive, _ADAPTIVE_KL] = 0.1
    """Mean KL per trained token."""
    kl_horizon: Annotated[PositiveInt, _ADAPTIVE_KL] = 10_000
    """Trajectories over which the weight may change by about 1.2 times."""
    ref_update_interval: NonNegativeInt = 0
    """Training batches after which the policy replaces the reference; 0 never."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, or the first one."""
    entropy_controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive moves the weight each optimizer step, and applies it up to `entropy_target`."""
    entropy_target: Annotated[Positive, _ADAPTIVE_ENTROPY] = 0.2
    """Mean entropy per trained token, in nats."""
    entropy_coef_delta: Annotated[Positive, _ADAPTIVE_ENTROPY] = 0.005
    """Step of the weight."""
    entropy_coef_max: Annotated[Positive, _ADAPTIVE_ENTROPY] = 1.0
    """Largest weight."""
    critic_loss: Annotated[PartSpec, CRITIC_LOSSES, _CRITIC] = "clipped"
    """Loss of each token's value. clipped: half its squared distance from the return."""
    critic_warmup_steps: Annotated[NonNegativeInt, _CRITIC] = 0
    """Training batches for the critic alone."""
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    """Correction for tokens that another policy, or another numerics, sampled."""
    filters: FilterConfig = field(default_factory=FilterConfig)
    """Which rollouts are trained on."""


def estimator_reads(config: AlgorithmConfig) -> Reads:
    """What the configured advantage estimator reads."""
    return ADVANTAGE_ESTIMATORS.reads(config.advantage_estimator)


def loss_reads(config: AlgorithmConfig) -> Reads:
    """What the configured policy loss reads."""
    return POLICY_LOSSES.reads(config.policy_loss)


def is_self_taught(config: AlgorithmConfig) -> bool:
    """Whether the teacher of the estimator is the policy itself, shown privileged context."""
    return estimator_reads(config).teacher == "policy"


def starts_at_rollout(config: AlgorithmConfig) -> bool:
    """Whether the loss takes its ratio against the engine's log-probabilities, which leaves nothing to correct."""
    columns = loss_reads(config).columns
    return "rollout_logprobs" in columns and "old_logprobs" not in columns


def needs_reference(config: AlgorithmConfig) -> bool:
    """Whether a reference model has to score the batch."""
    of_estimator = "ref_logprobs" in estimator_reads(config).columns and not is_self_taught(config)
    weighs_kl = config.kl_loss_coef > 0 or config.kl_reward_coef > 0
    return weighs_kl or of_estimator or "ref_logprobs" in loss_reads(config).columns


def needs_greedy_sample(config: AlgorithmConfig) -> bool:
    """Whether each prompt is answered greedily once more, as a baseline."""
    return "greedy_rewards" in estimator_reads(config).columns


def needs_critic(config: AlgorithmConfig) -> bool:
    """Whether a value model has to score the batch."""
    return "values" in estimator_reads(config).columns | loss_reads(config).columns


REJECTION_CRITERIA = tuple(
    f"{level}_{divergence}"
    for level in ("token", "sequence_sum", "sequence_mean", "sequence_max")
    for divergence in ("k1", "k2", "k3")
    if (level, divergence) != ("sequence_max", "k1")
)
"""Keys of `off_policy.reject`."""


def reads_whole_step(config: AlgorithmConfig) -> bool:
    """Whether weights of tokens are taken over the optimizer step, or over trajectories that may lie in several rows."""
    correction = config.off_policy
    weighs = correction.enabled or correction.negative_kl_max > 0
    return (
        config.entropy_quantile > 0 or correction.batch_normalize or (weighs and config.sequence_unit == "trajectory")
    )
