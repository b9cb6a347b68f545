"""Parts of a user's own that spoil one number of a run, so that it can be looked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from skyrl_train.algorithms.losses import PolicyLossInputs, PolicyLossOutput, regular
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import OptimizerConfig
from skyrl_train.registry import reads
from skyrl_train.runs import assembler
from skyrl_train.types import RolloutBatch
from tests.support.fakes_trainer import failed_trajectory, make_config, make_prompts, make_trajectory, make_turn

RARE = -5.5
"""Log-probability under the engine below which a token is spoilt."""


@reads("advantages", "old_logprobs", "rollout_logprobs")
def nan_at_rare_tokens(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """The regular loss, NaN at tokens that were hardly ever sampled."""
    return _with_a_term(regular(inputs, config), inputs, torch.nan)


@reads("advantages", "old_logprobs", "rollout_logprobs")
def spike_at_rare_tokens(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """The regular loss, with a term of its own at tokens that were hardly ever sampled: finite, and much too large."""
    return _with_a_term(regular(inputs, config), inputs, 1e5)


def _with_a_term(output: PolicyLossOutput, inputs: PolicyLossInputs, weight: float) -> PolicyLossOutput:
    """Adds the log-probabilities of rare tokens, so that neither loss nor gradient of the others changes."""
    assert inputs.rollout_logprobs is not None
    weights = torch.where(inputs.loss_mask & (inputs.rollout_logprobs < RARE), weight, 0.0)
    return PolicyLossOutput(token_losses=output.token_losses + weights * inputs.logprobs, metrics=output.metrics)


class SpoilsAWeight(torch.optim.AdamW):
    """Leaves a NaN in the last of its matrices after its first step."""

    def step(self, closure: Any = None) -> Any:
        """One step of AdamW, and the NaN."""
        result = super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][-1][1, 2] = torch.nan
        return result


def spoils_a_weight(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """An optimizer that breaks the model."""
    return SpoilsAWeight(groups, lr=config.lr)


TURNS = make_trajectory(make_turn((1, 2), (3, 4)), make_turn((1, 2, 3, 4, 9), (5,)), sample=1)


def batch_of(folder: Path, *, step_wise: bool = False):
    """Sample 0 failed; sample 1 has rows `1 2 3 4 9 5` with loss on 3, 4 and 5, or one row a turn; sample 2 `1 2 6`."""
    rollouts = RolloutBatch(
        prompts=tuple(make_prompts(1)),
        trajectories=(failed_trajectory(), TURNS, make_trajectory(make_turn((1, 2), (6,)), sample=2)),
        n_samples_per_prompt=3,
    )
    config = make_config(folder, train_batch_size=1, policy_mini_batch_size=1)
    generator = replace(config.generator, n_samples_per_prompt=3, step_wise_trajectories=step_wise)
    return assembler(replace(config, generator=generator))(rollouts, step=1, weight_version=0)
