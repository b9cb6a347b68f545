"""What policy losses share: masking that keeps junk out of the gradient, log-ratios, turns, means as metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.algorithms.losses.kl import MAX_LOG_RATIO, logprob_rounding
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.telemetry import Max, Mean, Metric, Min, later

DECLARED_METRICS = """
policy/ratio | | Mean probability over that before the update. | losses with a ratio
policy/ratio_{min,max} | | Its extremes. | `cispo`
policy/approx_kl | nats | Estimator k3 of KL(before || after the update). | losses with a ratio | verl `actor/ppo_kl`
    (k1)
policy/clip_fraction | share | Tokens (sequences, with one ratio) that clipping changed. | losses that clip | TRL
    `clip_ratio/region_mean`; verl `actor/pg_clipfrac`; SkyRL `policy/ppo_clip_ratio`
policy/dual_clip_fraction | share | Tokens that the second bound changed. | `dual_clip` | verl `actor/pg_clipfrac_lower`
policy/ratio_clamped_{low,high}_fraction | share | Tokens with their weight at a bound. | `cispo` | TRL
    `cispo_clip_ratio`
policy/covariance_fraction | share | Tokens of high covariance, treated apart. | `clip_cov`, `kl_cov`
policy/gate | | Mean weight of a token's gradient. | `sapo`, `vespo`
policy/divergence | nats | Mean divergence that is bounded. | `dppo`
policy/nll | nats | Mean negative log-probability. | `reinforce`, `cross_entropy`
"""


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` where `mask`, exactly 0 elsewhere, whatever stood there. Before `exp`, so that gradients stay
    finite.
    """
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def log_ratio_of(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return `logprobs - base_logprobs` where `mask`, clamped to +-20, 0 elsewhere. Carries the gradient of `logprobs`."""
    return masked(logprobs - base_logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_range(config: AlgorithmConfig, dtype: torch.dtype) -> tuple[float, float]:
    """Return `1 - eps_clip_low` and `1 + eps_clip_high` for ratios of this type.

    An edge at 1 itself moves to where rounding ends: in the first update after scoring all ratios are 1 but for rounding,
    which must not decide what is clipped.
    """
    rounding = logprob_rounding(dtype)
    return 1 - max(config.eps_clip_low, rounding), 1 + max(config.eps_clip_high, rounding)


def clipped_losses(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """PPO's token losses `[rows, len]`, and where the clipped side won."""
    plain = -ratio * advantages
    clipped = -ratio.clamp(*clip_range(config, ratio.dtype)) * advantages
    return torch.maximum(plain, clipped), clipped > plain


@dataclass(frozen=True)
class Turns:
    """The turns of a micro-batch, or other sequences of its trained tokens: whole rows, whole trajectories.

    A turn is a maximal run of trained tokens within a row.

    A trajectory in one row and the same trajectory with one row per turn have the same turns, so what is taken over a
    turn depends neither on that choice nor on micro-batches. No method waits for the device.
    """

    mask: Tensor
    """`[rows, len]` bool: trained tokens."""
    starts: Tensor
    """`[rows, len]` bool: each turn's first token."""
    number: Tensor
    """`[rows, len]` int64: 1, 2, ... over the micro-batch; 0 where nothing is trained."""

    def total(self, values: Tensor) -> Tensor:
        """Return `[rows, len]`: at each trained token, the sum over its turn; 0 elsewhere.

        Summed in float64: on a GPU the order of the additions is not fixed, and rounding must not show in float32.
        """
        kept = masked(values, self.mask).double()
        totals = kept.new_zeros(self.mask.numel() + 1).index_add(0, self.number.flatten(), kept.flatten())
        return masked(totals[self.number].to(values.dtype), self.mask)

    def length(self) -> Tensor:
        """Return `[rows, len]` float64: at each trained token, how many its turn has; 0 elsewhere."""
        return self.total(self.mask.double())

    def mean(self, values: Tensor) -> Tensor:
        """Return `[rows, len]`: at each trained token, the mean over its turn; 0 elsewhere."""
        return self.total(values) / self.length().clamp(min=1).to(values.dtype)

    def highest(self, values: Tensor) -> Tensor:
        """Return `[rows, len]`: at each trained token, the highest value in its turn; 0 elsewhere."""
        lowest = values.new_full((self.mask.numel() + 1,), -torch.inf)
        found = lowest.scatter_reduce(0, self.number.flatten(), masked(values, self.mask).flatten(), "amax")
        return masked(found[self.number], self.mask)

    def largest(self, values: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
        """Return `[rows, len]` bool: of each turn's candidates, the `count` (equal in a turn) largest, the earlier on
        ties.
        """
        number = self.number.flatten()
        # Two stable sorts give the order by turn and, within it, by falling value; a token's rank is then its distance
        # from the first of its turn. This needs no loop over turns, of which a micro-batch has thousands.
        by_value = torch.where(candidates, values, -torch.inf).flatten().argsort(descending=True, stable=True)
        order = by_value[number[by_value].argsort(stable=True)]
        sizes = number.new_zeros(len(number) + 1).index_add(0, number, torch.ones_like(number))
        before = (sizes.cumsum(0) - sizes)[number[order]]
        rank = torch.empty_like(number)
        rank[order] = torch.arange(len(number), device=number.device) - before
        return candidates & (rank.view_as(self.number) < count)


def turns_of(mask: Tensor) -> Turns:
    """Return the turns of `loss_mask` `[rows, len]` bool."""
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    number = starts.flatten().cumsum(0).view_as(mask)
    return Turns(mask=mask, starts=starts, number=torch.where(mask, number, 0))


def rows_of(mask: Tensor) -> Turns:
    """Return each row's trained tokens as one sequence: a trajectory, where it has one row."""
    starts = mask & (mask.cumsum(1) == 1)
    number = torch.arange(1, len(mask) + 1, device=mask.device).unsqueeze(1).expand(mask.shape)
    return Turns(mask=mask, starts=starts, number=torch.where(mask, number, 0))


def sequences_of_flat(mask: Tensor, owner: Tensor) -> Turns:
    """Return the sequences of a flat column: the tokens of `mask` `[tokens]` bool with equal `owner` `[tokens]`, in
    whatever order they are.

    As `[1, tokens]`. A trajectory's tokens may lie in several rows.
    """
    number = torch.zeros_like(owner, dtype=torch.int64)
    # Number 0 collects what is in no sequence, so that sums by number need no second mask.
    number[mask] = torch.unique(owner[mask], return_inverse=True)[1] + 1
    first = torch.full((int(number.max()) + 1 if len(number) else 1,), len(number), device=mask.device)
    position = torch.arange(len(number), device=mask.device)
    # Tokens of a sequence need not be neighbours: its first one is found by position, not by a change of number.
    first = first.scatter_reduce(0, number, position, "amin")
    starts = mask & (first[number] == position)
    return Turns(mask=mask.unsqueeze(0), starts=starts.unsqueeze(0), number=number.unsqueeze(0))


def token_means(mask: Tensor, group: str = "policy", /, **columns: Tensor) -> dict[str, Metric]:
    """`GROUP/NAME`: mean over the masked tokens, read back from the device later."""
    with torch.no_grad():
        weight = later(mask.sum().double())
        totals = [later(masked(column.detach().double(), mask).sum()) for column in columns.values()]
    return {f"{group}/{name}": Mean(total, weight) for name, total in zip(columns, totals)}


def ratio_metrics(mask: Tensor, log_ratio: Tensor, **columns: Tensor) -> dict[str, Metric]:
    """Mean ratio and `k3` estimate of KL(old || new) beside the loss's own columns."""
    detached = log_ratio.detach()
    return token_means(mask, ratio=detached.exp(), approx_kl=torch.expm1(detached) - detached, **columns)


def ratio_extremes(mask: Tensor, log_ratio: Tensor) -> dict[str, Metric]:
    """`policy/ratio_min` and `policy/ratio_max` over the masked tokens; nothing where there are none. On a device that shows
    when they are read back: they are not a number then."""
    if not mask.numel() or (mask.device.type == "cpu" and not bool(mask.any())):
        return {}
    detached, missing = log_ratio.detach(), torch.where(mask.any(), 1.0, torch.nan)
    low = torch.where(mask, detached, torch.inf).amin().exp() * missing
    high = torch.where(mask, detached, -torch.inf).amax().exp() * missing
    return {"policy/ratio_min": Min(later(low)), "policy/ratio_max": Max(later(high))}
