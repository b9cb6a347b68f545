"""Trajectories drawn again by their scores, so that those whose reward is to be trusted count more: PF-PPO.

Policy Filtration for RLHF to Mitigate Noise in Reward Models, arXiv:2409.06957. A trajectory that is drawn k times is
trained as k copies of itself would be, in its own mini-batch: the column `sample_count` says how many, and loss weights and
denominators count it so often. Drawn once over the training batch, before it is cut; a function of seed and step alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.config.algorithm import FilterConfig
from skyrl_train.seeding import derive_seed


def with_sample_counts(batch: TrainingInputBatch, config: FilterConfig, *, seed: int) -> TrainingInputBatch:
    """The batch with `sample_count` (int32, equal on all rows of a trajectory), as many draws as there are trajectories
    that did not fail; as it is where nothing is resampled."""
    real = ~batch["is_padding"]
    if config.resample == "none" or not bool(real.any()):
        return batch
    _, number = torch.unique(batch["trajectory_index"][real], return_inverse=True)
    row_of_token = torch.repeat_interleave(torch.arange(batch.num_rows), batch.lengths)
    per_row = torch.zeros(batch.num_rows, dtype=torch.float64).index_add_(0, row_of_token, batch["rewards"].double())
    scores = torch.zeros(int(number.max()) + 1, dtype=torch.float64).index_add_(0, number, per_row[real])
    generator = torch.Generator().manual_seed(derive_seed(seed, "resample", batch.metadata.global_step))
    drawn = torch.multinomial(sampling_weights(scores, config), len(scores), replacement=True, generator=generator)
    counts = torch.zeros(batch.num_rows, dtype=torch.int32)
    counts[real] = torch.bincount(drawn, minlength=len(scores)).int()[number]
    return batch.with_columns(sample_count=counts)


def sampling_weights(scores: Tensor, config: FilterConfig) -> Tensor:
    """How likely each trajectory is drawn, up to a factor; `[trajectories]` float64, as verl has them.

    pow: `|score|^resample_power`. max_min: the highest and the lowest alone. max_random: the highest 0.4, others 0.1.
    """
    if config.resample == "pow":
        weights = scores.abs() ** config.resample_power
    elif config.resample == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).double()
    else:
        weights = torch.where(scores == scores.max(), 0.4, 0.1).double()
    return weights + SMALLEST_WEIGHT


SMALLEST_WEIGHT = 1e-8
"""So that a batch of scores that are all 0 can be drawn from."""
