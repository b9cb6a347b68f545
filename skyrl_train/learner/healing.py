"""What becomes of a pass that runs out of memory: all ranks drop it, cut it smaller, and compute it anew.

    plan --passes--> all ranks finished?  yes: its result
                                          no:  drop partial gradients, lower the budget on all ranks, plan again

Nothing has been stepped at that point, and a mini-batch's loss is the same sum however it is cut, so that the step's
gradient is what it would have been. Whether memory ran out is agreed in `distributed/together.py`; what it leads to is a
function of what all ranks know: the smallest micro-batch that failed anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from skyrl_train.batch.microbatch import MemoryAwareBatchIterator, TokenBudgets
from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.errors import MemoryLimitError, RankOutOfMemory
from skyrl_train.learner.memory_meter import GIB, MemoryMeter
from skyrl_train.learner.passes import Passes, Planned
from skyrl_train.telemetry.metrics import Last, Max, StepMetrics, Sum

T = TypeVar("T")
logger = logging.getLogger(__name__)

LOWERED_TO = 0.75
"""Share of the micro-batch that failed, in positions, which the next may have."""
_NOWHERE = 1 << 40
"""Positions of the micro-batch that failed on a rank where none did."""


class Healing:
    """Runs the passes of one model. Without budgets to lower it runs them as they are."""

    def __init__(self, passes: Passes, *, drop_gradients: Callable[[], None]) -> None:
        self.passes = passes
        """Those of now: replaced by others, and never changed."""
        self._drop_gradients = drop_gradients
        self._batches: MemoryAwareBatchIterator | None = None
        self._found: TokenBudgets | None = None
        self._held: Callable[[], Iterable[Tensor]] = lambda: ()
        self._retries = 0
        self._num_redone = 0
        self._peak_bytes = 0

    def begin(
        self,
        meter: MemoryMeter,
        batches: MemoryAwareBatchIterator,
        *,
        retries: int,
        held: Callable[[], Iterable[Tensor]],
    ) -> None:
        """From now on passes are cut by `batches`, counted by `meter` and healed, up to `retries` times each. `held` are
        the tensors that are there between passes."""
        self._batches, self._retries, self._held = batches, retries, held
        self._found = batches.budgets
        self.use(micro_batching=batches, meter=meter)

    def begin_probing(self, meter: MemoryMeter, *, held: Callable[[], Iterable[Tensor]]) -> None:
        """From now on each pass is one forward of all its rows; RankOutOfMemory is raised, on all ranks, and not healed."""
        self._batches, self._held = None, held
        self.use(micro_batching=self.passes.micro_batching.as_one_forward(), meter=meter)

    def use(self, **changes: Any) -> None:
        """From now on passes differ in these fields of `Passes`."""
        self.passes = replace(self.passes, **changes)

    def run(self, batch: TrainingInputBatch, work: Callable[[Sequence[Planned]], T], *, training: bool) -> T:
        """What `work` makes of the planned forwards of `batch`.

        Raises MemoryLimitError on all ranks where one row alone does not fit, or where it was tried too often.
        """
        meter = self.passes.meter
        if meter is None:
            return work(self.passes.plan(batch, training=training))
        attempts = 0
        while True:
            try:
                return self._attempt(meter, batch, work, training=training)
            except RankOutOfMemory as failure:
                if self._batches is None:
                    raise
                reason = failure.reason
            attempts += 1
            if training:
                self._drop_gradients()
            meter.release_cached()
            self._lower(self._batches, meter, reason, training=training, give_up=attempts > self._retries)

    def _attempt(
        self, meter: MemoryMeter, batch: TrainingInputBatch, work: Callable[[Sequence[Planned]], T], *, training: bool
    ) -> T:
        passes = self.passes
        planned = passes.plan(batch, training=training)
        meter.adopt(self._held())
        meter.reset_peak()
        result = passes.strategy.together(passes.model, lambda: work(planned))
        self._peak_bytes = max(self._peak_bytes, meter.peak_bytes())
        return result

    def take_peak(self) -> int:
        """Bytes, over the passes since the last call."""
        peak, self._peak_bytes = self._peak_bytes, 0
        return peak

    def metrics(self) -> StepMetrics:
        """Of the passes since the last call: the peak, the budget, and how many were computed anew."""
        if self._batches is None:
            return {}
        prefix, peak = f"memory/{self.passes.name}", self.take_peak()
        redone, self._num_redone = self._num_redone, 0
        return {
            f"{prefix}_peak_gib": Max(peak / GIB),
            f"{prefix}_tokens_per_micro_batch": Last(float(self._batches.budgets.training)),
            f"{prefix}_redone": Sum(float(redone if self.passes.strategy.rank == 0 else 0)),
        }

    def budgets(self) -> tuple[int, ...]:
        """For a checkpoint: those that were found, training and forward, and what they were lowered to; or none."""
        if self._batches is None or self._found is None:
            return ()
        found, now = self._found, self._batches.budgets
        return found.training, found.forward, now.training, now.forward

    def restore(self, budgets: tuple[int, ...]) -> None:
        """Lowers budgets as they were lowered when the checkpoint was written: a run that goes on cuts its micro-batches
        where the uninterrupted one does. Nothing where others were found, as on other devices."""
        if self._batches is not None and budgets[:2] == self.budgets()[:2] and len(budgets) == 4:
            self._batches.lower(budgets[2], training=True)
            self._batches.lower(budgets[3], training=False)

    def _lower(
        self, batches: MemoryAwareBatchIterator, meter: MemoryMeter, reason: str, *, training: bool, give_up: bool
    ) -> None:
        """The same new budget on every rank, or the same error."""
        strategy, size, name = self.passes.strategy, self.passes.current, self.passes.name
        before = batches.budgets.of(training=training)
        if size.num_rows > 1 and not give_up:
            hopeless = ""
        else:
            hopeless = (
                f"{name}: memory ran out in a {'training' if training else 'forward'} pass over {size.num_rows} rows of "
                f"at most {size.longest} tokens ({reason}), "
                + ("which cannot be cut further" if size.num_rows == 1 else f"after {self._retries} smaller attempts")
            )
        found = strategy.first_reason(hopeless if reason else "")
        smallest = -strategy.agree(-size.positions if reason else -_NOWHERE)
        if found:
            raise MemoryLimitError(
                f"{found}; {meter.limit_bytes / GIB:.3g} GiB are there. Shorter rows "
                "(generator.max_context_length, data.max_length), model.gradient_checkpointing=true, more ranks with "
                "strategy=fsdp2, or a larger trainer.memory_budget_gb"
            )
        batches.lower(int(smallest * LOWERED_TO), training=training)
        self._num_redone += 1
        after = batches.budgets.of(training=training)
        logger.warning(
            "%s: memory ran out at %d positions%s; %s micro-batches have at most %d positions from now on (before: %d), "
            "and the pass is computed anew",
            name,
            smallest,
            f" ({reason})" if reason else " on another rank",
            "training" if training else "forward",
            after,
            before,
        )
