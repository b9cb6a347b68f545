"""Batches of several data sets: each has its share of every batch, and its own endless stream of epochs.

The slots of all batches are one sequence, which gives the next slot to the data set that is furthest behind its weight
(Webster's divisor method). So each batch has exactly its size, each data set comes within one prompt or so of its share over
any stretch, and where everything stands is a function of the position alone: there is nothing to save.

Example: weights 0.75 and 0.25 take slots 0 0 1 0, 0 0 1 0, ...
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from skyrl_train.data.prompts import PromptSource
from skyrl_train.errors import ConfigError, Violation, counted
from skyrl_train.registry import PartSpec
from skyrl_train.system import derive_seed
from skyrl_train.types import Prompt


class MixedSource:
    """Batches of prompts, as `PromptSource`, of several data sets."""

    def __init__(
        self,
        datasets: Sequence[tuple[str, Sequence[Prompt], float]],
        batch_size: int,
        shuffle: bool,
        seed: int,
        order: PartSpec = "by_seed",
    ) -> None:
        """`datasets` are names, prompts and weights. Raises ConfigError where one has fewer prompts than its share of a
        batch."""
        self._weights = [weight for _, _, weight in datasets]
        self._batch_size = batch_size
        batches = [self.slots(position) for position in range(64)]
        most = [max(slots.count(index) for slots in batches) for index in range(len(datasets))]
        for index, (name, prompts, _) in enumerate(datasets):
            if len(prompts) < max(most[index], 1):
                rule = f"gives {counted(most[index], 'prompt')} of a batch to {name}, which has {len(prompts)}"
                remedy = "Lower its weight or trainer.train_batch_size, or give it more data"
                raise ConfigError([Violation.of(f"data.mix[{index}].weight", self._weights[index], rule, remedy)])
        self._sources = [
            PromptSource(prompts, 1, shuffle, derive_seed(seed, f"mix/{name}"), order=order)
            for name, prompts, _ in datasets
        ]

    def slots(self, position: int) -> list[int]:
        """Return the number of the data set that each prompt of the batch at `position` is taken from."""
        return next_slots(self._weights, self._taken(position * self._batch_size), self._batch_size)

    def batch(self, position: int) -> list[Prompt]:
        """Return the prompts of the batch after `position` batches."""
        taken = self._taken(position * self._batch_size)
        prompts = []
        for index in self.slots(position):
            prompts += self._sources[index].batch(taken[index])
            taken[index] += 1
        return prompts

    def first_epochs(self) -> list[list[Prompt]]:
        """Return the prompts of each data set in the order of its first epoch."""
        return [source.first_epoch() for source in self._sources]

    def _taken(self, num_slots: int) -> list[int]:
        """Return how many of the first `num_slots` slots each data set has: each count is within a few of its share, so that
        it is begun below that and the rest handed out one by one."""
        share = num_slots / sum(self._weights)
        slack = len(self._weights) + 2
        taken = [max(0, int(weight * share) - slack) for weight in self._weights]
        next_slots(self._weights, taken, num_slots - sum(taken))
        return taken


def next_slots(weights: Sequence[float], taken: list[int], count: int) -> list[int]:
    """Return to which of several each of the next `count` slots goes, and add them to what each has `taken`: slot j of one
    comes at (j + 0.5) / weight, and the earliest come first."""
    queue = [((number + 0.5) / weight, index) for index, (number, weight) in enumerate(zip(taken, weights))]
    heapq.heapify(queue)
    found = []
    for _ in range(count):
        _, index = queue[0]
        found.append(index)
        taken[index] += 1
        heapq.heapreplace(queue, ((taken[index] + 0.5) / weights[index], index))
    return found
