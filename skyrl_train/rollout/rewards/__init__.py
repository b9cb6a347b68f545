"""Rewards: functions that score a trajectory once it has ended, whatever environment it is of.

    def score(completion, answer):                      # `answer` is a column of the data
        return float(answer in completion)

`environment.reward=my_code:score` calls it with what its signature names, by keyword; all there is where it has `**kwargs`:

    completion       text of the last response; where it is annotated as a list, all messages after the prompt
    prompt           messages of the prompt; where it is annotated as `str`, the text of its last user message
    messages         the whole conversation: the prompt, as the environment may have changed it, and what followed
    stop_reason      of the last response: `stop`, `length` or `abort`
    response_length  tokens of all responses
    num_turns        responses
    uid              of the prompt
    ...              every other column of the row. `answer` and `ground_truth` are also found as
                     `reward_spec.ground_truth` or `reward_model.ground_truth`

It returns a finite number, or several by name (`{"correct": 1.0, "format": 0.5}`), or None: the trajectory is not scored,
and left out with that reason. It may be `async def`, or a class, which is made once in each process with the arguments
that stand beside it and then called. Two decorators say that it takes several trajectories:

    @batched    def score(completions, answer): a list for each of its arguments, one entry a trajectory; returns a list
    @group      def score(completions, answer): all samples of one prompt that have not failed, in order; what belongs to
                the prompt (`prompt`, `uid`, columns) is given once; returns a list

Where it runs: in the worker processes of environments, each call within `environment.step_timeout_s`. What it raises, or a
deadline that it exceeds, fails the trajectory that it was called for, and never becomes a reward. So does a value outside
the range that `@within(low, high)` declares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_train.system import lazily

if TYPE_CHECKING:
    from skyrl_train.errors import Violation
    from skyrl_train.rollout.rewards.judge import Judge
    from skyrl_train.rollout.rewards.model import RewardModel
    from skyrl_train.rollout.rewards.ready_made import run_tests
    from skyrl_train.rollout.rewards.reward_functions import call_reward, forget_rewards

__all__ = [
    "Judge",
    "RewardModel",
    "batched",
    "call_reward",
    "forget_rewards",
    "group",
    "run_tests",
    "within",
]

__getattr__ = lazily(__name__)

F = TypeVar("F", bound=Callable[..., Any])


def batched(score: F) -> F:
    """Declare a reward function that takes lists, one entry for each trajectory, and returns one."""
    score.reward_form = "batched"  # type: ignore[attr-defined]
    return score


def group(score: F) -> F:
    """Declare a reward function that sees all samples of a prompt and returns a reward for each."""
    score.reward_form = "group"  # type: ignore[attr-defined]
    return score


def within(low: float, high: float, counts: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Declare the lowest and the highest value of a reward, each of its values where it returns several by name: one outside
    fails its trajectory with that reason. `counts` names values that are reported beside it and are no reward. Raises
    ValueError where they are not finite, or in the other order."""
    if not -math.inf < low <= high < math.inf:
        raise ValueError(f"within({low}, {high}): must be finite, and the lowest first")

    def declare(score: F) -> F:
        score.reward_range, score.reward_counts = (low, high), counts  # type: ignore[attr-defined]
        return score

    return declare


class HeldReward:
    """A reward of this package that is called in the trainer's process, where it holds a model or connections. As it stands
    here it needs no column, asks no server and measures nothing."""

    def violations(self, setting: str) -> Iterable[Violation]:  # noqa: ARG002
        """What is wrong with its settings, found without a model and without the network; `setting` is where they are."""
        return ()

    def missing_column(self, columns: Mapping[str, Any]) -> str:  # noqa: ARG002
        """Return what it needs of a row and these columns lack; empty where they have all."""
        return ""

    async def problem(self) -> str:
        """Return why the server that it asks is of no use, in one line; empty where it is, or there is none."""
        return ""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The lowest and the highest value of each of its components, as its settings say."""
        raise NotImplementedError

    def take_metrics(self) -> Mapping[str, float]:
        """Return what it did since the last time, e.g. `calls`: what depends on the machine."""
        return {}
