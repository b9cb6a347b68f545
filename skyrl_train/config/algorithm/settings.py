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

    They correct for what sampled the tokens not being the policy that the update starts from: other kernels in the
    inference engine, or older weights. Masked tokens get a loss of 0; the denominators of the step stay.
    """

    weight: Literal["auto", "none", "token", "sequence", "geometric"] = "auto"
    """Multiply token losses with the ratio of the token, of its turn (product of ratios), or their geometric mean. auto: of
    the token where `generator.quantization` rounds the engine's weights and ratios start at the trainer's, else none."""
    weight_mode: Annotated[Literal["truncate", "mask", "mask_only"], _WEIGHED] = "truncate"
    """What becomes of a weight outside `weight_low` to `weight_high`. truncate: the nearer bound. mask: 0. mask_only: 0, and
    1 inside, so that tokens (or turns) are left out and none is weighted."""
    weight_low: Annotated[NonNegative, _WEIGHED] = 0.0
    """Smallest weight."""
    weight_high: Annotated[Positive, _WEIGHED] = 2.0
    """Largest weight."""
    sequence_mask: Literal["none", "geometric", "product"] = "none"
    """Leave a turn out whose geometric mean, or product, of ratios lies outside the next two."""
    sequence_mask_low: Annotated[NonNegative, _MASKED] = 0.99
    """Smallest value that `sequence_mask` keeps. Lies near 1 for geometric, further off for product."""
    sequence_mask_high: Annotated[Positive, _MASKED] = 1.01
    """Largest value that `sequence_mask` keeps."""
    reject: Mapping[str, Any] = field(default_factory=dict)
    """Further criteria, each with its bound; what one leaves out is out. `token_k1`, `sequence_sum_k1`, `sequence_mean_k1`:
    `[low, high]` of the ratio. `token_`, `sequence_sum_`, `sequence_mean_` and `sequence_max_` with `k2` or `k3`: the
    largest divergence. E.g. `{sequence_mean_k3: 0.01, token_k1: [0.2, 5]}`."""
    batch_normalize: Annotated[bool, _WEIGHED] = False
    """Divide the weights by their mean over the optimizer step (over its tokens, or sequences), so that it becomes 1."""
    negative_kl_max: NonNegative = 0.0
    """Leave tokens with a negative advantage out whose sequence has a mean of rollout_logprob - logprob above this; 0 is
    off. Reads the policy as it is trained, and where there are none of the engine, log-probabilities of before."""
    outlier_low: NonNegative = 0.0
    """Leave a turn out in which any token's ratio is below this; 0 is off."""
    outlier_high: NonNegative = 0.0
    """Leave a turn out in which any token's ratio is above this; 0 is off."""

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
    """`trainer.algorithm.filters`: which rollouts are trained on, and what becomes of those that were cut off."""

    dynamic_sampling: Literal["none", "filter", "replace"] = "none"
    """filter: generate until enough prompts have differing rewards. replace: fill up with copies of such prompts."""
    dynamic_sampling_max_batches: Annotated[PositiveInt, Of(".dynamic_sampling", ("filter", "replace"))] = 30
    """Generated batches without enough such prompts after which the run stops with an error."""
    replace_min_share: Annotated[Share, Of(".dynamic_sampling", ("replace",))] = 0.3
    """Below this share of prompts with differing rewards, another batch is generated instead."""
    zero_variance: bool = False
    """Leave prompts out of the loss, and of its denominators, whose trajectories all have the same reward."""
    overlong: bool = False
    """Leave trajectories out of the loss that a length limit cut off; their rewards still count in the group."""
    overlong_soft_share: Share = 0.0
    """Soft penalty for responses in the last such share of `overlong_max_length`; 0 is off (DAPO: 0.2)."""
    overlong_max_length: Annotated[PositiveInt, ReadWith(".overlong_soft_share")] = 512
    """Tokens of one response at which the soft penalty has its full size: what `max_generate_length` allows, say."""
    overlong_penalty: Annotated[NonNegative, ReadWith(".overlong_soft_share")] = 1.0
    """Full size of the soft penalty."""
    resample: Literal["none", "pow", "max_min", "max_random"] = "none"
    """PF-PPO: draw the batch's trajectories again, with replacement. pow: by their score's size to `resample_power`.
    max_min: the highest and the lowest. max_random: the highest four times as likely as the others."""
    resample_power: Annotated[NonNegative, Of(".resample", ("pow",))] = 2.0
    """Power of `resample=pow`."""
    non_stop_scale: Share = 1.0
    """Rewards of a trajectory whose last response did not end by itself are multiplied by this; 1 is off."""
    non_stop_penalty: NonNegative = 0.0
    """Taken from the reward of such a trajectory, after `non_stop_scale`."""
    reward_clip_low: float | None = None
    """Smallest total reward of a trajectory, after all penalties; null is off. What is added goes to its last turn."""
    reward_clip_high: float | None = None
    """Largest total reward of a trajectory; null is off."""
    keep: tuple[Annotated[PartSpec, ROLLOUT_FILTERS], ...] = ()
    """Custom filters, which say of each trajectory whether it is trained on; its reward counts in its group all the same."""
    zero_reward_on_non_stop: bool = False
    """A trajectory whose last response did not end by itself gets a reward of 0."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """`trainer.algorithm`: chosen with `algorithm=NAME`."""

    advantage_estimator: Annotated[PartSpec, ADVANTAGE_ESTIMATORS] = "grpo"
    """How much better than expected a token was; see docs/algorithms.md."""
    normalize_by_std: bool = True
    """GRPO: divide by the group's standard deviation (false is Dr. GRPO's choice)."""
    step_rewards: Literal["outcome", "turn_return"] = "outcome"
    """Of trajectories of several turns: their whole reward for every turn, or each turn's discounted return-to-go."""
    reward_components: Annotated[
        Mapping[str, Any], Of(".advantage_estimator", reads="reward_components", write="algorithm=gdpo")
    ] = field(default_factory=dict)
    """Weight of each reward by its name among `environment.rewards` and the environment's metrics, e.g. `{correct: 1,
    format: 0.5}`, or `{weight: 0.5, normalize: none}`, which is not divided by its spread. Empty: what `environment.rewards`
    says of each; where there are none either, the reward itself is the only one."""
    normalize_advantages: bool = False
    """Whiten advantages over each mini-batch with masked mean and variance."""
    gamma: Annotated[float, Range(0.0, 1.0)] = 1.0
    """Discount of later rewards, per token (gae, reinforce++) or per turn (step_rewards=turn_return)."""
    policy_loss: Annotated[PartSpec, POLICY_LOSSES] = "regular"
    """The loss of each trained token; see docs/algorithms.md."""
    loss_reduction: Annotated[PartSpec, LOSS_REDUCTIONS] = "token_mean"
    """How token losses become one number. Denominators are counted over the whole optimizer step."""
    max_sequence_length_for_norm: Annotated[PositiveInt, ReadWith(".loss_reduction", ("seq_mean_token_sum_norm",))] = (
        512
    )
    """Constant divisor of `seq_mean_token_sum_norm` (tokens)."""
    sequence_unit: Literal["turn", "trajectory"] = "turn"
    """What a sequence is to gspo, gmpo, vespo and the sequence-level weights and masks of `off_policy`: one response, or
    all responses of a trajectory together, as trainers that keep a trajectory in one row count."""
    eps_clip_low: Annotated[float, Range(0.0)] = 0.2
    """The ratio is clipped below 1 minus this. gmpo: the log-ratio below minus this. dppo: threshold of the divergence for
    falling probabilities."""
    eps_clip_high: Annotated[float, Range(0.0)] = 0.2
    """The ratio is clipped above 1 plus this (clip-higher: DAPO). dppo: threshold for rising probabilities."""
    proximal: Literal["recompute", "behaviour"] = "recompute"
    """The policy that ratios start from and clipping keeps near. recompute: the weights when the batch closes, scored by the
    trainer; what lies between them and what sampled is weighed by `off_policy` (decoupled PPO). behaviour: what sampled, by
    the engine's log-probabilities, without a pass; ratios then hold its numerics, and staleness, beside what the update
    changes."""
    entropy_quantile: Share = 0.0
    """Train the policy's term on the tokens alone whose entropy is at or above this quantile of the optimizer step's, under
    the policy as it is then (one more pass): 0.8 trains the upper fifth. 0 is off."""
    kl_estimator: Annotated[PartSpec, KL_ESTIMATORS] = "k3"
    """Estimator of KL(policy || reference) from sampled tokens."""
    kl_bias_correction: bool = False
    """Multiply the KL in the loss with the ratio of the policy to the old one, through which gradients flow too: an unbiased
    estimate of KL and gradient from tokens that the old policy sampled (DeepSeek-V3.2)."""
    kl_loss_coef: Annotated[float, Range(0.0)] = 0.0
    """Weight of the KL term in the loss; 0 needs no reference model."""
    kl_reward_coef: NonNegative = 0.0
    """Weight (with a controller, the first weight) of the KL that is taken from each token's reward; 0 is off."""
    kl_controller: Annotated[
        Literal["fixed", "adaptive"], Of(".kl_reward_coef", write="trainer.algorithm.kl_reward_coef=0.05")
    ] = "fixed"
    """adaptive moves the weight of the KL in the reward so that the KL stays near `kl_target`."""
    kl_target: Annotated[Positive, _ADAPTIVE_KL] = 0.1
    """Mean KL per trained token that is aimed at."""
    kl_horizon: Annotated[PositiveInt, _ADAPTIVE_KL] = 10_000
    """Trajectories over which the weight may change by a factor of about 1.2."""
    ref_update_interval: NonNegativeInt = 0
    """Replace the reference by the current policy every so many training batches; 0 never."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus (with a controller, the first weight)."""
    entropy_controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive moves the weight after every optimizer step, and applies it while the entropy is at most `entropy_target`."""
    entropy_target: Annotated[Positive, _ADAPTIVE_ENTROPY] = 0.2
    """Mean entropy per trained token (nats) that is kept up."""
    entropy_coef_delta: Annotated[Positive, _ADAPTIVE_ENTROPY] = 0.005
    """By how much the weight moves."""
    entropy_coef_max: Annotated[Positive, _ADAPTIVE_ENTROPY] = 1.0
    """Largest weight."""
    critic_loss: Annotated[PartSpec, CRITIC_LOSSES, _CRITIC] = "clipped"
    """The loss of each token's value. clipped: half the square of its distance from the return."""
    critic_warmup_steps: Annotated[NonNegativeInt, _CRITIC] = 0
    """Training batches in which only the critic is trained."""
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
