"""Which examples make an optimizer step: a number of rows, as many as a number of tokens holds, or documents.

    StepStream.take(position) -> the examples of the step that begins there, and the position after it

A step ends where its `Closing` says so. What is left of an epoch when no step is full any more is a short step
(`keep`), left out (`drop`), or filled up from the next epoch (`wrap`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from skyrl_train.batch.planner import Admits, document_steps
from skyrl_train.data.sft.epoch_order import EpochOrder
from skyrl_train.data.sft.token_store import Ints
from skyrl_train.errors import ConfigError, Violation

Closing = Callable[[Ints], int | None]
"""Given the lengths of the next examples (tokens): how many make a step; None where they do not yet fill one."""
IncompleteStep = Literal["keep", "drop", "wrap"]

_FIRST_WINDOW = 256
"""Examples that are looked at first; twice as many until a step closes."""


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
    """Example numbers, in order."""
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
        self._require_full_step()
        while position < end:
            position = self.take(position).stop
            was_skipped = self._incomplete == "drop" and position > end  # only what is left over was before `end`
            steps += not was_skipped
        return steps

    def _require_full_step(self) -> None:
        """Refuse data of which, with `drop`, no epoch ever fills a step: the search for one would not end."""
        self._order.start_epoch(0)
        if self._incomplete == "drop" and self._close(np.empty(0, dtype=np.int64), 0) is None:
            raise ConfigError(
                [
                    Violation(
                        field="data.incomplete_step",
                        rule=f"leaves nothing: an epoch of {self._order.num_examples} examples does not fill one step",
                        value="drop",
                        remedy="Try data.incomplete_step=wrap, or smaller steps",
                    )
                ]
            )

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
