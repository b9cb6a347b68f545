"""The batches of a run, in order: the next one is made while the current one trains.

    for step in ...:
        batch = loader.get(step)
        loader.prefetch(step + 1)
        train(batch)

Every batch carries the data position after it. A checkpoint saves the position of the last batch that was trained, so a
batch that was prefetched when the run ended is made again: it is neither lost nor trained twice.

The worker reads the order of the current epoch. Therefore nothing is prefetched across the end of an epoch, where
the order changes, and what is in flight is waited for before anything changes the order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from skyrl_train.batch.steps import MiniBatch
from skyrl_train.data.sft.async_collator import AsyncBatchCollator
from skyrl_train.data.sft.collate import Collator
from skyrl_train.data.sft.step_stream import StepExamples, StepStream
from skyrl_train.data.sft.token_store import ExampleSet

T = TypeVar("T")

TRAIN_THREAD = "sft-collate"
EVAL_THREAD = "sft-collate-eval"


@dataclass(frozen=True, kw_only=True)
class SFTBatch:
    """One optimizer step's worth of examples."""

    step: int
    mini_batch: MiniBatch
    num_examples: int
    num_tokens: int
    """Of the examples, without padding."""
    position: int
    """Of the stream of examples after this batch: where the next one begins."""


class BatchLoader:
    """Gives each step its batch. To be used from one thread, and closed: as a context manager, or with `close`."""

    def __init__(
        self, stream: StepStream, examples: ExampleSet, collate: Collator, *, is_async: bool, position: int = 0
    ) -> None:
        """`position` is where the first batch begins."""
        self._stream = stream
        self._examples = examples
        self._collate = collate
        self._position = position
        self._worker = AsyncBatchCollator(self._prefetched, TRAIN_THREAD) if is_async else None

    def get(self, step: int) -> SFTBatch:
        """Return the batch at the position where the last one ended.

        Raises RuntimeError where the batch of another step was prefetched; what making it raised.
        """
        if self._worker is not None and self._worker.has_pending():
            batch = self._worker.get(step)
        else:
            batch = self._batch(step, self._stream.take(self._position))
        self._position = batch.position
        return batch

    def prefetch(self, step: int) -> None:
        """Start to make the batch of `step` on the worker, unless it takes another epoch's order."""
        if self._worker is not None and self._stream.within_epoch(self._position) is not None:
            self._worker.submit(step)

    def seek(self, position: int) -> None:
        """Go to another position of the stream. A batch in flight is waited for and discarded."""
        if self._worker is not None:
            self._worker.clear()
        self._position = position
        self._stream.start(position)

    def close(self) -> None:
        """End the worker, if there is one."""
        if self._worker is not None:
            self._worker.shutdown()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._worker is not None:
            self._worker.__exit__(kind, error, traceback)

    def _prefetched(self, step: int) -> SFTBatch:
        """Make a batch on the worker. The position does not change before the batch is fetched."""
        found = self._stream.within_epoch(self._position)
        if found is None:
            raise RuntimeError(f"the batch of step {step} takes another epoch's order and cannot be prefetched")
        return self._batch(step, found)

    def _batch(self, step: int, found: StepExamples) -> SFTBatch:
        return SFTBatch(
            step=step,
            mini_batch=self._collate(found.indices, step),
            num_examples=len(found.indices),
            num_tokens=int(self._examples.lengths[found.indices].sum()),
            position=found.stop,
        )


def one_ahead(compute: Callable[[int], T], count: int, *, is_async: bool) -> Generator[T, None, None]:
    """Yield `compute(0)` to `compute(count - 1)`, each made while its predecessor is used; the worker ends with them."""
    if not is_async:
        yield from map(compute, range(count))
        return
    with AsyncBatchCollator(compute, EVAL_THREAD) as worker:
        for index in range(count):
            if not worker.has_pending():
                worker.submit(index)
            result = worker.get(index)
            if index + 1 < count:
                worker.submit(index + 1)
            yield result
