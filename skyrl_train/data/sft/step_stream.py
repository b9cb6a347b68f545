"""Which example comes when, and which examples make an optimizer step.

Examples form an endless stream, epoch after epoch; a position in it is a number of examples consumed. `EpochOrder` is one
epoch's order at a time, a pure function of the seed and the epoch. A source of weight w gives `round(w * rows)` examples to
each epoch. Its rows are taken in turn, through one shuffling after the other, so that after any number of epochs each row
was used as often as any other, give or take one.

Example: two sources of 4 and 2 rows with weights 0.5 and 2 give an epoch of 2 + 4 examples; the second epoch takes the
other two rows of the first source.

`StepStream.take(position)` gives the examples of the step that begins there, and the position after it. A step is a number
of rows, as many as a number of tokens holds, or documents: it ends where its `Closing` says so. What is left of an epoch
when no step is full any more is a short step (`keep`), left out (`drop`), or filled up from the next epoch (`wrap`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from skyrl_train.batch.planner import Admits, document_steps
from skyrl_train.data.sft.token_store import Ints
from skyrl_train.errors import ConfigError, Violation, counted
from skyrl_train.system import derive_seed

Closing = Callable[[Ints], int | None]
"""Given the lengths of the next examples (tokens): how many make a step; None where they do not yet fill one."""
IncompleteStep = Literal["keep", "drop", "wrap"]

_FIRST_WINDOW = 256
"""Examples that are looked at first; twice as many until a step closes."""


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
            self._order[start : start + count] = first + self._rows_at(number, size, epoch * count, count)
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

    def _rows_at(self, number: int, size: int, start: int, count: int) -> Ints:
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
    remedy = "Drop data.weights to use each source once an epoch"
    return ConfigError([Violation.of("data.weights", list(weights), rule, remedy)])


def by_rows(num_rows: int) -> Closing:
    """Make a step of so many examples."""
    return lambda lengths: num_rows if len(lengths) >= num_rows else None


def by_tokens(num_tokens: int) -> Closing:
    """As many examples as hold at most so many tokens, at least one."""

    def close(lengths: Ints) -> int | None:
        fitting = int(np.searchsorted(np.cumsum(lengths), num_tokens, side="right"))
        return max(1, fitting) if fitting < len(lengths) else None

    return close


def by_documents(docs_per_step: int, *, num_ranks: int, admits: Admits, exact: bool) -> Closing:
    """Micro-batches are filled rank by rank until, after a round, there are so many (`batch/planner/documents.py`)."""

    def close(lengths: Ints) -> int | None:
        if not len(lengths):
            return None
        steps = document_steps(
            lengths,
            np.arange(len(lengths)),
            np.ones(len(lengths), dtype=bool),
            docs_per_step=docs_per_step,
            num_ranks=num_ranks,
            admits=admits,
            exact=exact,
        )
        first = steps[0]
        closed = len(steps) > 1 or (exact and first.num_documents == docs_per_step)
        return first.num_documents if closed else None

    return close


@dataclass(frozen=True, kw_only=True)
class StepExamples:
    """The examples of one optimizer step."""

    indices: Ints
    stop: int
    """Position of the stream after them."""


class StepStream:
    """Cuts the endless stream of examples into steps."""

    def __init__(self, lengths: Ints, order: EpochOrder, closing: Closing, incomplete: IncompleteStep) -> None:
        """`lengths` int64 `[examples]`, tokens of each example by its number."""
        self._lengths = lengths
        self._order = order
        self._closing = closing
        self._incomplete = incomplete

    @property
    def num_examples_per_epoch(self) -> int:
        """Examples of an epoch, each source's by its weight."""
        return self._order.num_examples

    def start(self, position: int) -> None:
        """Starts the epoch that `position` lies in: nothing may be reading the order meanwhile."""
        self._order.start_epoch(self._order.epoch_of(position))

    def within_epoch(self, position: int) -> StepExamples | None:
        """Return the step that begins at `position`; None where it takes another order than that of the current epoch."""
        epoch = self._order.epoch_of(position)
        if epoch != self._order.epoch:
            return None
        found = self._close(np.empty(0, dtype=np.int64), position)
        if found is None and self._incomplete == "keep":
            end = (epoch + 1) * self._order.num_examples
            return StepExamples(indices=self._order.examples(position, end), stop=end)
        return found

    def take(self, position: int) -> StepExamples:
        """Return the step that begins at `position`. Starts epochs as needed: nothing may be reading the order meanwhile."""
        self.start(position)
        found = self.within_epoch(position)
        begun = np.empty(0, dtype=np.int64)
        while found is None:
            end = (self._order.epoch + 1) * self._order.num_examples
            if self._incomplete == "wrap":
                begun = np.concatenate([begun, self._order.examples(position, end)])
            position = end
            self._order.start_epoch(self._order.epoch + 1)
            found = self._close(begun, position)
        return found

    def count_steps(self, num_epochs: int) -> int:
        """Count the steps that begin in the first `num_epochs` epochs.

        Raises ConfigError where incomplete steps are dropped and none is ever full.
        """
        steps = position = 0
        end = num_epochs * self._order.num_examples
        self._order.start_epoch(0)
        if self._incomplete == "drop" and self._close(np.empty(0, dtype=np.int64), 0) is None:
            # The search for a step would not end.
            rule = f"leaves nothing: an epoch of {self._order.num_examples} examples does not fill one step"
            remedy = "Try data.incomplete_step=wrap, or smaller steps"
            raise ConfigError([Violation(field="data.incomplete_step", rule=rule, value="drop", remedy=remedy)])
        while position < end:
            position = self.take(position).stop
            was_skipped = self._incomplete == "drop" and position > end  # only what is left over was before `end`
            steps += not was_skipped
        return steps

    def _close(self, begun: Ints, position: int) -> StepExamples | None:
        """Examples `begun` before and as many from `position` on as make a step; None where the epoch ends first."""
        end = (self._order.epoch + 1) * self._order.num_examples
        window = _FIRST_WINDOW
        while True:
            stop = min(position + window, end)
            indices = np.concatenate([begun, self._order.examples(position, stop)])
            count = self._closing(self._lengths[indices])
            if count is not None:
                return StepExamples(indices=indices[:count], stop=position + count - len(begun))
            if stop == end:
                return None
            window *= 2
