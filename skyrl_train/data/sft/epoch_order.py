"""Which example comes when: one epoch's order at a time, a pure function of the seed and the epoch.

Examples form an endless stream, epoch after epoch; a position in it is a number of examples consumed. A source of
weight w gives `round(w * rows)` examples to each epoch. Its rows are taken in turn, through one shuffling after the
other, so that after any number of epochs each row was used as often as any other, give or take one.

Example: two sources of 4 and 2 rows with weights 0.5 and 2 give an epoch of 2 + 4 examples; the second epoch takes the
other two rows of the first source.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skyrl_train.data.sft.token_store import Ints
from skyrl_train.errors import ConfigError, Violation, counted
from skyrl_train.system import derive_seed


class EpochOrder:
    """Keeps the order of one epoch, in place: `start_epoch` overwrites it, so nothing may be reading it then."""

    def __init__(self, source_sizes: Sequence[int], *, weights: Sequence[float], shuffle: bool, seed: int) -> None:
        """
        Args:
            source_sizes: Examples of each source, numbered one source after the other.
            weights: One for each source.

        Raises:
            ConfigError: The number of weights is another than that of sources, or an epoch would be empty.
        """
        if len(weights) != len(source_sizes):
            raise _refused(f"must be one for each of the {len(source_sizes)} sources", weights)
        self._sizes = tuple(source_sizes)
        self._counts = tuple(round(weight * size) for weight, size in zip(weights, source_sizes))
        self._shuffle = shuffle
        self._seed = seed
        self.num_examples = sum(self._counts)
        """In one epoch."""
        if self.num_examples == 0:
            raise _refused(f"must leave an example in an epoch (sources have {list(source_sizes)})", weights)
        self.epoch = -1
        """Number of the current epoch; -1 before the first."""
        self._order = np.empty(self.num_examples, dtype=np.int64)

    def start_epoch(self, epoch: int) -> None:
        """Replace the order by that of `epoch`."""
        if epoch == self.epoch:
            return
        self.epoch = -1  # an interrupted change leaves no order rather than a mixture
        start, first = 0, 0
        for number, (size, count) in enumerate(zip(self._sizes, self._counts)):
            self._order[start : start + count] = first + self._turns(number, size, epoch * count, count)
            start, first = start + count, first + size
        if self._shuffle:
            self._order[:] = self._order[_permutation(self.num_examples, derive_seed(self._seed, "sft order", epoch))]
        self.epoch = epoch

    def epoch_of(self, position: int) -> int:
        """Return the epoch that a position of the stream lies in."""
        return position // self.num_examples

    def examples(self, start: int, stop: int) -> Ints:
        """Return the example numbers at the positions `start` to `stop - 1` of the stream.

        Raises RuntimeError where they do not lie in the current epoch: their order is not known here and now.
        """
        first = self.epoch * self.num_examples
        if self.epoch < 0 or not first <= start <= stop <= first + self.num_examples:
            raise RuntimeError(
                f"positions {start} to {stop} of the stream were asked for while the order of epoch {self.epoch} is "
                f"held ({counted(self.num_examples, 'example')} an epoch)"
            )
        found: Ints = self._order[start - first : stop - first].copy()
        return found

    def _turns(self, number: int, size: int, start: int, count: int) -> Ints:
        """Return the rows of source `number` at `start` to `start + count - 1` of its own endless stream."""
        cycles = range(start // size, -(-(start + count) // size)) if count else ()
        rounds = [
            _permutation(size, derive_seed(self._seed, "sft source", number, cycle))
            if self._shuffle
            else np.arange(size, dtype=np.int64)
            for cycle in cycles
        ]
        rows = np.concatenate([np.empty(0, dtype=np.int64), *rounds])
        offset = start - cycles[0] * size if cycles else 0
        taken: Ints = rows[offset : offset + count]
        return taken


def _permutation(size: int, seed: int) -> Ints:
    """Return a permutation sorted by random keys: the raw stream of a bit generator is what NumPy promises not to change."""
    order: Ints = np.argsort(np.random.PCG64(seed).random_raw(size), kind="stable")
    return order


def _refused(rule: str, weights: Sequence[float]) -> ConfigError:
    return ConfigError(
        [
            Violation(
                field="data.weights",
                rule=rule,
                value=str(list(weights)),
                remedy="Drop data.weights to use each source once an epoch",
            )
        ]
    )
