"""Which prompts a step takes: those that the policy solves about half the time, which is where a group teaches most.

Each prompt that was tried has an estimate of its solve rate: the mean of its samples' rewards, each cut to 0 to 1, averaged
over the times it was tried, the newest counting for `data.curriculum.newest`. A batch has a share of prompts that were never
tried, in the order of the first epoch (all of them while few are known); the rest are drawn from those that were, the
likelier the nearer their estimate is to the target. A prompt that is solved rests for some steps and is then tried again.

The estimates are in the checkpoint, and draws are derived from the seed and the position: a resumed run takes the same.
Where rollouts are made ahead, a batch is chosen when the first of its prompts begins, by what is known then, without prompts
that are in flight; the journal has what was chosen.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from skyrl_train.config.data import CurriculumConfig
from skyrl_train.system import derive_seed
from skyrl_train.types import Prompt, RolloutBatch

DECLARED_METRICS = """
curriculum/tried | count | Prompts with a measured solve rate. | with `data.curriculum`
curriculum/resting | count | Those left out for now. | with `data.curriculum`
curriculum/new_fraction | share | Prompts of the batch never tried before. | with `data.curriculum`
curriculum/expected_solve_rate | share | Mean solve rate expected of the others. | where there are others
"""

SolveRates = Mapping[str, tuple[float, int]]
"""By the prompts' uids: the estimate, 0 to 1, and the step that tried the prompt last."""
_LEAST_WEIGHT = 1e-3
"""Of a prompt that is never, or always, solved: it is drawn where there are no others."""


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Chooses prompts within each data set, as many as its slots in a batch."""

    datasets: Sequence[Sequence[Prompt]]
    """Each in the order in which its prompts are first tried."""
    slots: Callable[[int], Sequence[int]]
    """Position (batches) to the number of the data set that each prompt of the batch is taken from."""
    seed: int
    config: CurriculumConfig

    def batch(self, rates: SolveRates, position: int, step: int, *, busy: Collection[str] = ()) -> list[Prompt]:
        """Return the prompts of the batch at `position`, for `step`: each at most once, and none of the `busy` uids, where
        there are enough."""
        slots = self.slots(position)
        chosen = {
            number: iter(self._choose(number, slots.count(number), rates, position, step, busy))
            for number in set(slots)
        }
        return [next(chosen[number]) for number in slots]

    def named(self, uids: Sequence[str]) -> list[Prompt]:
        """Return prompts by their uids. Raises KeyError."""
        known = {prompt.uid: prompt for prompts in self.datasets for prompt in prompts}
        return [known[uid] for uid in uids]

    def after(self, rates: SolveRates, rollouts: RolloutBatch, step: int) -> SolveRates:
        """Return the estimates with what `step` found. Failed trajectories say nothing of a prompt."""
        found = dict(rates)
        for prompt, rate in solve_rates(rollouts):
            before = found.get(prompt.uid)
            newest = self.config.newest
            found[prompt.uid] = (rate if before is None else before[0] + newest * (rate - before[0]), step)
        return found

    def metrics(self, rates: SolveRates, taken: Sequence[Prompt], step: int) -> dict[str, float]:
        """Return figures of the batch that `step` took, given the estimates before it."""
        known = [rates[prompt.uid][0] for prompt in taken if prompt.uid in rates]
        return {
            "curriculum/tried": float(len(rates)),
            "curriculum/resting": float(sum(self._rests(rates[uid], step) for uid in rates)),
            "curriculum/new_fraction": 1 - len(known) / len(taken),
            **({"curriculum/expected_solve_rate": math.fsum(known) / len(known)} if known else {}),
        }

    def _choose(
        self, number: int, count: int, rates: SolveRates, position: int, step: int, busy: Collection[str]
    ) -> list[Prompt]:
        generator = random.Random(derive_seed(self.seed, "curriculum", position, number))
        free = [prompt for prompt in self.datasets[number] if prompt.uid not in busy]
        prompts = free if len(free) >= count else self.datasets[number]
        new = [prompt for prompt in prompts if prompt.uid not in rates]
        tried = [prompt for prompt in prompts if prompt.uid in rates]
        ready = [prompt for prompt in tried if not self._rests(rates[prompt.uid], step)]
        # The largest of u ** (1 / weight): a draw without replacement, in proportion to the weights.
        keys = {prompt.uid: math.log(1 - generator.random()) / self._weight(rates[prompt.uid][0]) for prompt in tried}
        ready.sort(key=lambda prompt: keys[prompt.uid], reverse=True)
        useful = [prompt for prompt in ready if self._weight(rates[prompt.uid][0]) > _LEAST_WEIGHT]
        num_new = min(len(new), max(round(self.config.exploration * count), count - len(useful)))
        # Whatever is short: those that are tried in vain, then those that have rested longest.
        useless = [prompt for prompt in ready if self._weight(rates[prompt.uid][0]) <= _LEAST_WEIGHT]
        resting = [prompt for prompt in tried if self._rests(rates[prompt.uid], step)]
        resting.sort(key=lambda prompt: rates[prompt.uid][1])
        chosen = [*new[:num_new], *useful, *useless, *resting, *new[num_new:]]
        return [chosen[index % len(chosen)] for index in range(count)]

    def _weight(self, rate: float) -> float:
        distance = abs(rate - self.config.target) / max(self.config.target, 1 - self.config.target)
        return max(_LEAST_WEIGHT, (1 - distance) ** 2)

    def _rests(self, known: tuple[float, int], step: int) -> bool:
        rate, last = known
        return rate >= self.config.solved_at and step - last <= self.config.rest_steps


def solve_rates(rollouts: RolloutBatch) -> list[tuple[Prompt, float]]:
    """Return the solve rate that each prompt's samples show; prompts all of whose samples failed are left out."""
    size, found = rollouts.n_samples_per_prompt, []
    for index, prompt in enumerate(rollouts.prompts):
        group = rollouts.trajectories[index * size : (index + 1) * size]
        rewards = [min(1.0, max(0.0, trajectory.reward)) for trajectory in group if not trajectory.failed]
        if rewards:
            found.append((prompt, math.fsum(rewards) / len(rewards)))
    return found
