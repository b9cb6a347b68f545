"""The weight of the entropy bonus, moved so that the policy's entropy stays above a target. Pure: state in, state out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import CheckpointError, NonFiniteError


@dataclass(frozen=True, kw_only=True)
class EntropyControllerState:
    """All that a checkpoint has to keep."""

    coef: float = 0.0
    is_low: bool = False
    """Whether the entropy of the last optimizer step was at or below the target; not known before the first."""

    @property
    def applied(self) -> float:
        """The weight of the next optimizer step: none while there is entropy enough."""
        return self.coef if self.is_low else 0.0

    def to_json(self) -> dict[str, float | bool]:
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, object]) -> EntropyControllerState:
        """Exact inverse of `to_json`. Raises CheckpointError for anything else."""
        coef, is_low = content.get("coef"), content.get("is_low")
        if not isinstance(coef, (int, float)) or not math.isfinite(coef) or not isinstance(is_low, bool):
            raise CheckpointError(
                f"the entropy controller in the checkpoint is {dict(content)}; it needs coef and is_low"
            )
        return EntropyControllerState(coef=float(coef), is_low=is_low)


def initial_entropy_state(config: AlgorithmConfig) -> EntropyControllerState:
    """The configured `entropy_coef`, which counts from the second optimizer step."""
    return EntropyControllerState(coef=config.entropy_coef)


def next_entropy_state(
    state: EntropyControllerState, *, entropy: float, config: AlgorithmConfig
) -> EntropyControllerState:
    """The state after an optimizer step whose mean entropy per trained token was `entropy` (nats).

    The weight grows by `entropy_coef_delta` where the entropy is at or below `entropy_target` and falls by as much where it
    is above, between 0 and `entropy_coef_max`. Skywork Open Reasoner 1, arXiv:2505.22312, section 4. Raises
    NonFiniteError where the entropy is not finite: the weight would move on nothing.
    """
    if not math.isfinite(entropy):
        raise NonFiniteError(f"the mean entropy of the step is {entropy}; the entropy controller cannot follow it")
    is_low = entropy <= config.entropy_target
    moved = state.coef + (config.entropy_coef_delta if is_low else -config.entropy_coef_delta)
    return EntropyControllerState(coef=min(max(moved, 0.0), config.entropy_coef_max), is_low=is_low)
