"""Our functions beside those of verl, TRL, OpenRLHF and SkyRL on random ragged inputs: where they agree, where not and why.

`python scripts/compare_trainers.py` draws 200 inputs for each and writes the tables in docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from skyrl_train.algorithms import AdvantageInputs, high_entropy, with_sample_counts
from skyrl_train.algorithms.losses import (
    PolicyLossInputs,
    off_policy_weights,
    policy_loss,
    rejected,
    rows_of,
    token_kl,
    unbiased_kl,
)
from skyrl_train.batch import masked_mean, whiten
from skyrl_train.config.algorithm import REJECTION_CRITERIA, AlgorithmConfig, FilterConfig, OffPolicyConfig
from skyrl_train.parts import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS
from skyrl_train.registry import PartSpec
from skyrl_train.system import derive_seed
from tests.other_trainers.functions import module_of, openrlhf_loss, skyrl_loss, trl_loss, verl_policy_loss
from tests.support.advantage_oracles import Sample, advantage_inputs_of, random_samples
from tests.support.learner_cases import make_batch
from tests.support.loss_oracles import random_loss_inputs

Errors = tuple[float, float]
"""Largest absolute difference of value, and of gradient (0 where there is none)."""


@dataclass(frozen=True)
class Comparison:
    """One function of ours beside one of another trainer."""

    ours: str
    """With the settings that are not the default."""
    theirs: str
    """`trainer: function`."""
    errors: Callable[[int], Errors]
    """By the seed of a draw."""
    tolerance: float = 1e-6
    """What an epsilon in a denominator, or a constant in float32, of theirs explains."""
    deviates: str = ""
    """Why the two differ on purpose; empty where they agree."""


CONFIG = AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.28, sequence_unit="trajectory")


def ragged(seed: int) -> PolicyLossInputs:
    """Rows of several turns and of very different lengths, each with a trained token, without junk outside the mask."""
    drawn = random_loss_inputs(seed, num_rows=3 + seed % 4, width=5 + seed % 9)
    keep = drawn.loss_mask.any(1)
    columns = {
        name: torch.where(drawn.loss_mask, column, -1.0)[keep]
        for name, column in vars(drawn).items()
        if isinstance(column, Tensor) and name != "loss_mask"
    }
    return PolicyLossInputs(**columns, loss_mask=drawn.loss_mask[keep])


def one_advantage(inputs: PolicyLossInputs) -> PolicyLossInputs:
    """The same with one advantage per row."""
    return replace(inputs, advantages=inputs.advantages[:, :1].expand(inputs.loss_mask.shape).contiguous())


def reduced(losses: Tensor, mask: Tensor, reduction: str) -> Tensor:
    if reduction == "sequence_mean":
        return masked_mean(losses, mask, 1).mean()
    return masked_mean(losses, mask) if reduction == "token_mean" else torch.where(mask, losses, 0.0).sum()


def errors_of(ours: Tensor, theirs: Tensor, logprobs: Tensor) -> Errors:
    (own,), (other,) = (torch.autograd.grad(loss, logprobs) for loss in (ours, theirs))
    return abs(float(ours.detach() - theirs.detach())), float((own - other).abs().max())


def loss_errors(
    seed: int,
    *,
    loss: PartSpec,
    call: Callable[[PolicyLossInputs], Tensor],
    reduction: str = "token_mean",
    one_per_row: bool = False,
    rollout: bool = False,
    **changes: Any,
) -> Errors:
    """`rollout`: theirs is given the engine's log-probabilities."""
    inputs = one_advantage(ragged(seed)) if one_per_row else ragged(seed)
    inputs = inputs if rollout else replace(inputs, rollout_logprobs=None)
    losses = policy_loss(inputs, replace(CONFIG, policy_loss=loss, **changes)).token_losses
    return errors_of(reduced(losses, inputs.loss_mask, reduction), call(inputs), inputs.logprobs)


def _verl(function: str, *, base: str = "old_logprobs", **changes: Any) -> Callable[[PolicyLossInputs], Tensor]:
    return lambda inputs: verl_policy_loss(function, inputs, getattr(inputs, base), **changes)


def _trl(loss_type: str, **changes: Any) -> Callable[[PolicyLossInputs], Tensor]:
    return lambda inputs: trl_loss(loss_type, inputs, **changes)


def _skyrl(function: str, **settings: Any) -> Callable[[PolicyLossInputs], Tensor]:
    return lambda inputs: skyrl_loss(function, inputs, **settings)


def _loss(ours: str, theirs: str, *, tolerance: float = 1e-6, deviates: str = "", **settings: Any) -> Comparison:
    return Comparison(ours, theirs, partial(loss_errors, **settings), tolerance, deviates)


class _Cispo:
    cispo_eps_clip_low, cispo_eps_clip_high = 1.0, 0.28


LOSSES = (
    _loss("dual_clip", "verl: vanilla", loss="dual_clip", call=_verl("vanilla")),
    _loss(
        "regular", "verl: vanilla", loss="regular", call=_verl("vanilla"), deviates="verl always clips dually, c = 3"
    ),
    _loss("cispo", "verl: cispo", loss="cispo", call=_verl("cispo")),
    _loss("sapo", "verl: sapo", loss="sapo", call=_verl("sapo"), reduction="sequence_mean"),
    _loss("gspo, sequence_unit=trajectory", "verl: gspo", loss="gspo", call=_verl("gspo")),
    _loss(
        "gspo",
        "verl: gspo",
        loss="gspo",
        call=_verl("gspo"),
        sequence_unit="turn",
        deviates="a sequence is a response here, a row there",
    ),
    _loss(
        "gmpo, sequence_unit=trajectory",
        "verl: geo_mean",
        loss="gmpo",
        call=_verl("geo_mean"),
        reduction="sequence_mean",
        one_per_row=True,
    ),
    _loss(
        "dppo, max_ratio=3",
        "verl: dppo_tv",
        loss={"_target_": "dppo", "max_ratio": 3.0},
        call=_verl("dppo_tv", base="rollout_logprobs"),
        rollout=True,
    ),
    _loss(
        "dppo, divergence=kl, max_ratio=3",
        "verl: dppo_kl",
        loss={"_target_": "dppo", "divergence": "kl", "max_ratio": 3.0},
        call=_verl("dppo_kl", base="rollout_logprobs"),
        rollout=True,
    ),
    _loss("reinforce", "verl: gpg", loss="reinforce", call=_verl("gpg")),
    _loss(
        "regular, sequence_mean",
        "TRL: grpo",
        loss="regular",
        call=_trl("grpo"),
        reduction="sequence_mean",
        one_per_row=True,
    ),
    _loss("regular", "TRL: dapo", loss="regular", call=_trl("dapo"), one_per_row=True),
    _loss("cispo, eps_clip_low=1", "TRL: cispo", loss="cispo", call=_trl("cispo"), one_per_row=True, eps_clip_low=1.0),
    _loss("sapo", "TRL: sapo", loss="sapo", call=_trl("sapo"), reduction="sequence_mean", one_per_row=True),
    _loss(
        "gspo, sequence_unit=trajectory",
        "TRL: importance_sampling_level=sequence",
        loss="gspo",
        call=_trl("grpo", importance_sampling_level="sequence"),
        reduction="sequence_mean",
        one_per_row=True,
    ),
    _loss("vespo, sequence_unit=trajectory", "TRL: vespo", loss="vespo", call=_trl("vespo"), one_per_row=True),
    _loss(
        "off_policy.negative_kl_max, sequence_unit=trajectory",
        "TRL: off_policy_mask_threshold",
        loss="regular",
        call=_trl("dapo", off_policy_mask_threshold=0.05),
        one_per_row=True,
        rollout=True,
        off_policy=OffPolicyConfig(negative_kl_max=0.05),
    ),
    _loss("regular", "OpenRLHF: PolicyLoss", loss="regular", call=openrlhf_loss),
    _loss(
        "dual_clip", "OpenRLHF: dual_clip", loss="dual_clip", call=lambda inputs: openrlhf_loss(inputs, dual_clip=3.0)
    ),
    _loss(
        "gspo, sequence_unit=trajectory",
        "OpenRLHF: gspo",
        loss="gspo",
        call=lambda inputs: openrlhf_loss(inputs, policy_loss_type="gspo"),
        reduction="sequence_mean",
        one_per_row=True,
    ),
    _loss(
        "off_policy.weight=token, truncate",
        "OpenRLHF: is_correction clip",
        loss="regular",
        call=lambda inputs: openrlhf_loss(
            inputs, is_correction_level="token", is_correction_mode="clip", is_correction_threshold=[0.5, 1.5]
        ),
        rollout=True,
        off_policy=OffPolicyConfig(weight="token", weight_low=0.5, weight_high=1.5),
    ),
    _loss(
        "off_policy.weight=token, mask",
        "OpenRLHF: is_correction mask",
        loss="regular",
        call=lambda inputs: openrlhf_loss(inputs, is_correction_level="token", is_correction_threshold=[0.8, 1.2]),
        rollout=True,
        off_policy=OffPolicyConfig(weight="token", weight_mode="mask", weight_low=0.8, weight_high=1.2),
    ),
    _loss(
        "off_policy.reject={sequence_mean_k1}, weight=token",
        "OpenRLHF: is_correction seq",
        loss="regular",
        call=lambda inputs: openrlhf_loss(inputs, is_correction_level="seq", is_correction_threshold=[0.95, 1.05]),
        rollout=True,
        off_policy=OffPolicyConfig(weight="token", weight_high=1e9, reject={"sequence_mean_k1": [0.95, 1.05]}),
    ),
    *(
        _loss(name, f"SkyRL: {function}", loss=loss, call=_skyrl(function, **settings), reduction="sum", **ours)
        for name, loss, function, settings, ours in (
            ("regular", "regular", "ppo_policy_loss", {"policy_loss_type": "regular"}, {}),
            ("dual_clip", "dual_clip", "ppo_policy_loss", {"policy_loss_type": "dual_clip"}, {}),
            ("gspo, sequence_unit=trajectory", "gspo", "gspo_policy_loss", {"policy_loss_type": "gspo"}, {}),
            (
                "cispo, eps_clip_low=1",
                "cispo",
                "compute_policy_loss_cispo",
                {"policy_loss_type": "cispo", "cispo": _Cispo},
                {"eps_clip_low": 1.0},
            ),
        )
    ),
)


def entropy_errors(seed: int) -> Errors:
    """TRL's mask of the fifth of highest entropy."""
    inputs = replace(one_advantage(ragged(seed)), rollout_logprobs=None)
    entropies = torch.rand(inputs.loss_mask.shape, generator=torch.Generator().manual_seed(seed)).double()
    kept, _ = high_entropy(entropies.flatten(), inputs.loss_mask.flatten(), 0.8)
    weighed = replace(inputs, policy_weights=kept.view_as(inputs.loss_mask).double())
    losses = policy_loss(weighed, CONFIG).token_losses
    theirs = trl_loss("dapo", inputs, entropies=entropies, top_entropy_quantile=0.2)
    return errors_of(reduced(losses, inputs.loss_mask, "token_mean"), theirs, inputs.logprobs)


def kl_loss_errors(seed: int) -> Errors:
    inputs = replace(one_advantage(ragged(seed)), rollout_logprobs=None)
    ref = inputs.old_logprobs - 0.3 * torch.rand(inputs.loss_mask.shape, dtype=torch.float64)
    kls = token_kl("k3", inputs.logprobs, ref, inputs.loss_mask)
    kls = unbiased_kl(kls, inputs.logprobs, inputs.old_logprobs, inputs.loss_mask)
    losses = policy_loss(inputs, CONFIG).token_losses + 0.1 * kls
    theirs = trl_loss("dapo", inputs, ref=ref, beta=0.1)
    return errors_of(reduced(losses, inputs.loss_mask, "token_mean"), theirs, inputs.logprobs)


def kl_errors(seed: int, *, name: str, call: Callable[[Tensor, Tensor], Tensor]) -> Errors:
    inputs = ragged(seed)
    return errors_of(
        KL_ESTIMATORS[name](inputs.logprobs, inputs.old_logprobs).sum(),
        call(inputs.logprobs, inputs.old_logprobs).sum(),
        inputs.logprobs,
    )


def _verl_kl(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda new, ref: module_of("verl.trainer.ppo.core_algos").kl_penalty(new, ref, name)


def _skyrl_kl(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    ppo_utils = "skyrl.backends.skyrl_train.utils.ppo_utils"
    return lambda new, ref: module_of(ppo_utils).compute_approx_kl(new, ref, None, name)


def rejection_errors(seed: int, *, criterion: str) -> Errors:
    """Tokens on which the masks differ."""
    inputs = ragged(seed)
    assert inputs.rollout_logprobs is not None
    log_ratio = torch.where(inputs.loss_mask, inputs.old_logprobs - inputs.rollout_logprobs, 0.0)
    bound: Any = [1 / 1.3, 1 / 0.8] if criterion.endswith("k1") else 0.05
    spec = "0.8_1.3" if criterion.endswith("k1") else "0.05"
    mask, _ = module_of("verl.trainer.ppo.rollout_corr_helper").compute_rollout_rejection_mask(
        log_ratio, inputs.loss_mask.double(), criterion.replace("sequence_", "seq_"), spec
    )
    found = rejected(log_ratio, rows_of(inputs.loss_mask), {criterion: bound})
    return float(((inputs.loss_mask & ~found) != mask.bool()).sum()), 0.0


def normalised_errors(seed: int, *, level: str) -> Errors:
    inputs = ragged(seed)
    assert inputs.rollout_logprobs is not None
    log_ratio = torch.where(inputs.loss_mask, inputs.old_logprobs - inputs.rollout_logprobs, 0.0)
    theirs, _ = module_of("verl.trainer.ppo.rollout_corr_helper").compute_rollout_correction_weights(
        log_ratio, inputs.loss_mask.double(), level, 1.5, True
    )
    config = OffPolicyConfig(weight=level, weight_high=1.5, batch_normalize=True)  # type: ignore[arg-type]
    columns = (inputs.old_logprobs, inputs.rollout_logprobs, inputs.loss_mask)
    ours = off_policy_weights(*columns, config, sequences=rows_of(inputs.loss_mask)).weights
    return float((ours - theirs)[inputs.loss_mask].abs().max()), 0.0


CORRECTIONS = (
    Comparison("entropy_quantile=0.8", "TRL: top_entropy_quantile=0.2", entropy_errors),
    Comparison("kl_loss_coef, k3, kl_bias_correction", "TRL: beta, use_bias_correction_kl", kl_loss_errors),
    *(
        Comparison(
            f"kl_estimator={name}", f"verl: kl_penalty {other}", partial(kl_errors, name=name, call=_verl_kl(other))
        )
        for name, other in (("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("abs", "abs"))
    ),
    *(
        Comparison(
            f"kl_estimator={name}", "SkyRL: compute_approx_kl", partial(kl_errors, name=name, call=_skyrl_kl(name))
        )
        for name in ("k1", "k2", "k3", "abs")
    ),
    *(
        Comparison(
            f"off_policy.reject={{{name}}}, sequence_unit=trajectory",
            f"verl: rollout_rs={name.replace('sequence_', 'seq_')}",
            partial(rejection_errors, criterion=name),
        )
        for name in REJECTION_CRITERIA
    ),
    *(
        Comparison(
            f"off_policy.weight={level}, batch_normalize, sequence_unit=trajectory",
            f"verl: rollout_is={level}, rollout_is_batch_normalize",
            partial(normalised_errors, level=level),
        )
        for level in ("token", "sequence")
    ),
)


def differing(seed: int, *, max_turns: int = 3, binary: bool = False) -> list[Sample]:
    """Trajectories of prompts that have at least two, with different rewards; none failed."""
    found = []
    samples = [s for s in random_samples(seed, max_turns=max_turns, binary_rewards=binary) if not s.failed]
    for prompt in {sample.prompt for sample in samples}:
        group = [sample for sample in samples if sample.prompt == prompt]
        if len(group) > 1 and max(s.outcome for s in group) > min(s.outcome for s in group):
            found += group
    return found


def aligned(samples: list[Sample]) -> list[Sample]:
    """Without a context before the turns, as verl keeps responses."""
    return [replace(s, steps=[replace(step, context=0) for step in s.steps]) for s in samples]


Estimate = Callable[[AdvantageInputs, dict[str, Any]], Tensor]
"""`(our inputs, {token_level_rewards, response_mask, index}) -> advantages`."""


def advantage_errors(
    seed: int,
    *,
    name: PartSpec,
    call: Estimate,
    samples: Callable[[int], list[Sample]] = differing,
    whitened: bool = False,
    scale: Callable[[AdvantageInputs], float] = lambda _: 1.0,
    **changes: Any,
) -> Errors:
    drawn = samples(seed)
    if not drawn:
        return 0.0, 0.0
    inputs = advantage_inputs_of(drawn, step_wise=False)
    given = {
        "token_level_rewards": inputs.rewards.clone(),
        "response_mask": inputs.loss_mask.double(),
        "index": inputs.prompt_index.numpy().astype(str).astype(object),
    }
    ours = ADVANTAGE_ESTIMATORS.resolve(name)(inputs, replace(CONFIG, **changes)).advantages * scale(inputs)
    mask = inputs.loss_mask
    ours = whiten(ours, mask) if whitened else ours
    return float((ours - call(inputs, given))[mask].abs().max()), 0.0


def _by(module: str, function: str, **settings: Any) -> Estimate:
    return lambda _, given: getattr(module_of(module), function)(**given, **settings)[0]


VERL, SKYRL = "verl.trainer.ppo.core_algos", "skyrl.backends.skyrl_train.utils.ppo_utils"


def _verl_remax(inputs: AdvantageInputs, given: dict[str, Any]) -> Tensor:
    rewards, mask = given["token_level_rewards"], given["response_mask"]
    found: Tensor = module_of(VERL).compute_remax_outcome_advantage(rewards, inputs.greedy_rewards, mask)[0]
    return found


def _verl_otb(function: str) -> Estimate:
    return lambda inputs, given: getattr(module_of(VERL), function)(
        **given, old_log_probs=inputs.old_logprobs, sum_pi_squared=inputs.sum_pi_squared
    )[0]


def _verl_gdpo(inputs: AdvantageInputs, given: dict[str, Any]) -> Tensor:
    assert inputs.reward_components is not None
    components = {"correct": inputs.reward_components[:, 0].numpy(), "length": inputs.reward_components[:, 1].numpy()}
    rows, width = inputs.rewards.shape
    found: Tensor = module_of(VERL).compute_gdpo_outcome_advantage(
        **given,
        config={"gdpo_reward_keys": list(components), "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch=components,
        batch={"prompts": torch.zeros(rows, 0), "attention_mask": torch.ones(rows, width, dtype=torch.int64)},
    )[0]
    return found


def _gae(module: str, gamma: str, lam: str) -> Estimate:
    def estimate(inputs: AdvantageInputs, given: dict[str, Any]) -> Tensor:
        settings = {gamma: 0.9, lam: 0.8, "values": inputs.values}
        rewards, mask = given["token_level_rewards"], given["response_mask"]
        found: Tensor = module_of(module).compute_gae_advantage_return(
            token_level_rewards=rewards, response_mask=mask, **settings
        )[0]
        return found

    return estimate


def _verl_alpha(inputs: AdvantageInputs) -> float:
    return len(inputs.rewards) / max(int((inputs.rewards.sum(1) != 0).sum()), 1)


class _Gamma:
    gamma = 0.9


def _advantage(ours: str, theirs: str, *, tolerance: float = 2e-5, deviates: str = "", **settings: Any) -> Comparison:
    return Comparison(ours, theirs, partial(advantage_errors, **settings), tolerance, deviates)


def _group(name: str, trainer: str, module: str, function: str, **settings: Any) -> Comparison:
    return _advantage(name, f"{trainer}: {function}", name=name, call=_by(module, function), **settings)


one_turn = partial(differing, max_turns=1)
GAE = {"name": {"_target_": "gae", "gae_lambda": 0.8}, "whitened": True, "gamma": 0.9}
ADVANTAGES = (
    _advantage("gae, whitened", "verl: gae", call=_gae(VERL, "gamma", "lam"), **GAE),
    _group("grpo", "verl", VERL, "compute_grpo_outcome_advantage", tolerance=1e-3),
    _group("rloo", "verl", VERL, "compute_rloo_outcome_advantage"),
    _group("opo", "verl", VERL, "compute_opo_outcome_advantage"),
    _advantage(
        "grpo",
        "verl: compute_grpo_outcome_advantage, groups of one",
        name="grpo",
        call=_by(VERL, "compute_grpo_outcome_advantage"),
        samples=lambda seed: [s for s in random_samples(seed) if not s.failed],
        deviates="a group of one gives 0 here, its reward there",
    ),
    _advantage(
        "reinforce++, whitened",
        "verl: reinforce_plus_plus",
        name="reinforce++",
        call=_by(VERL, "compute_reinforce_plus_plus_outcome_advantage", config=_Gamma),
        whitened=True,
        gamma=0.9,
    ),
    _group(
        "reinforce++_baseline",
        "verl",
        VERL,
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        whitened=True,
        tolerance=1e-3,
    ),
    _advantage("remax, one turn", "verl: remax", name="remax", call=_verl_remax, samples=one_turn),
    _advantage(
        "remax",
        "verl: remax, several turns",
        name="remax",
        call=_verl_remax,
        deviates="a turn gets the whole reward here, its return-to-go there",
    ),
    _advantage(
        "remax, step_rewards=turn_return",
        "verl: remax, several turns",
        name="remax",
        call=_verl_remax,
        step_rewards="turn_return",
    ),
    _advantage(
        "grpo_pass_at_k",
        "verl: grpo_passk",
        name="grpo_pass_at_k",
        call=_by(VERL, "compute_grpo_passk_outcome_advantage", config={}),
        tolerance=1e-3,
    ),
    _advantage(
        "gpg, with verl's alpha",
        "verl: gpg",
        name="gpg",
        call=_by(VERL, "compute_gpg_outcome_advantage"),
        normalize_by_std=False,
        scale=_verl_alpha,
    ),
    _advantage(
        "gpg",
        "verl: gpg",
        name="gpg",
        call=_by(VERL, "compute_gpg_outcome_advantage"),
        samples=partial(differing, binary=True),
        normalize_by_std=False,
        deviates="alpha counts trajectories of groups that differ, as in the paper; there rewards that are not 0",
    ),
    _advantage(
        "optimal_token_baseline, one turn",
        "verl: optimal_token_baseline",
        name="optimal_token_baseline",
        call=_verl_otb("compute_optimal_token_baseline_advantage"),
        samples=lambda seed: aligned(one_turn(seed)),
    ),
    _advantage(
        "optimal_token_baseline",
        "verl: tir_optimal_token_baseline",
        name="optimal_token_baseline",
        call=_verl_otb("compute_multi_turn_optimal_token_baseline_advantage"),
    ),
    _advantage(
        "gdpo, whitened",
        "verl: gdpo",
        name="gdpo",
        call=_verl_gdpo,
        whitened=True,
        reward_components={"correct": 1.0, "length": 0.5},
    ),
    _advantage(
        "gae, whitened, one turn",
        "SkyRL: gae",
        call=_gae(SKYRL, "gamma", "lambd"),
        samples=lambda seed: aligned(one_turn(seed)),
        **GAE,
    ),
    _advantage(
        "gae, whitened",
        "SkyRL: gae, several turns",
        call=_gae(SKYRL, "gamma", "lambd"),
        deviates="observation tokens are skipped here",
        **GAE,
    ),
    _group("grpo", "SkyRL", SKYRL, "compute_grpo_outcome_advantage", tolerance=1e-3),
    _group("rloo", "SkyRL", SKYRL, "compute_rloo_outcome_advantage"),
    _group("maxrl", "SkyRL", SKYRL, "compute_maxrl_advantage", samples=partial(differing, binary=True)),
)


class _Columns(dict[str, Tensor]):
    """What verl's function reads and sets of a TensorDict."""

    batch_size: tuple[int, ...] = ()


def resampling_errors(seed: int, *, name: Literal["pow", "max_min", "max_random"]) -> Errors:
    """How often each trajectory is drawn, from the same random numbers; scores are sums of halves, which are exact."""
    rng = np.random.default_rng(seed)
    batch = make_batch(rng.integers(4, 20, int(rng.integers(1, 9)) * 2).tolist(), seed=seed)
    rewards = torch.from_numpy(rng.integers(-2, 4, batch.num_tokens) / 2)
    batch = batch.with_columns(rewards=torch.where(batch["loss_mask"], rewards, 0.0))
    ours = with_sample_counts(batch, FilterConfig(resample=name), seed=seed)["sample_count"]
    columns = {"token_level_scores": batch.padded("rewards"), "row": torch.arange(batch.num_rows)}
    data = SimpleNamespace(batch=_Columns(columns), non_tensor_batch={}, meta_info={})
    function = module_of(VERL).compute_pf_ppo_reweight_data
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "resample", batch.metadata.global_step))
        theirs = torch.bincount(function(data, name, 2.0).batch["row"], minlength=batch.num_rows)
    return float((ours - theirs).abs().max()), 0.0


RESAMPLING = tuple(
    Comparison(f"filters.resample={name}", "verl: compute_pf_ppo_reweight_data", partial(resampling_errors, name=name))
    for name in ("pow", "max_min", "max_random")
)
COMPARISONS = (*LOSSES, *CORRECTIONS, *ADVANTAGES, *RESAMPLING)


def largest_errors(comparison: Comparison, num_draws: int) -> Errors:
    """Over so many draws. Raises ImportError where the other trainer is not installed."""
    found = np.array([comparison.errors(seed) for seed in range(num_draws)])
    value, gradient = found.max(axis=0).tolist()
    return value, gradient
