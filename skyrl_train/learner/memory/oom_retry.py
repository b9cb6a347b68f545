"""What becomes of a pass that runs out of memory: all ranks drop it, cut it smaller, and compute it anew.

    plan --passes--> all ranks finished?  yes: its result
                                          no:  drop partial gradients, lower the budget on all ranks, plan again

Nothing has been stepped at that point, and a mini-batch's loss is the same sum however it is cut, so that the step's
gradient is what it would have been. Whether memory ran out is agreed on in `oom_consensus.py`; what it leads to is a
function of what all ranks know: the smallest micro-batch that failed anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.planner import MemoryAwareBatchIterator, TokenBudgets
from skyrl_train.distributed import ModelStrategy
from skyrl_train.errors import MemoryLimitError, RankOutOfMemory, counted
from skyrl_train.learner.memory.meter import GIB, MemoryMeter
from skyrl_train.telemetry import Last, Max, StepMetrics, Sum

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DECLARED_METRICS = """
memory/{policy,critic}_peak_gib | GiB | Most memory of a pass. | self-sized micro-batches | verl
    `perf/max_memory_allocated_gb`
memory/{policy,critic}_tokens_per_micro_batch | tokens | Budget of a micro-batch. | self-sized micro-batches
memory/{policy,critic}_redone | count | Passes repeated smaller after running out of memory. | self-sized micro-batches
"""

T = TypeVar("T")
logger = logging.getLogger(__name__)

LOWERED_TO = 0.75
"""Share of the micro-batch that failed, in positions, which the next may have."""
_FITTED_HERE = 1 << 40
"""Positions that a rank states where none of its micro-batches failed: more than any batch has."""


@dataclass(frozen=True, kw_only=True)
class ForwardSize:
    """The size of one forward."""

    num_rows: int
    longest: int
    positions: int


class SizedPasses(Protocol):
    """The passes of one model: how they are cut into forwards, and what counts their memory. A dataclass."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def strategy(self) -> ModelStrategy: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def micro_batching(self) -> MemoryAwareBatchIterator: ...

    @property
    def meter(self) -> MemoryMeter | None: ...

    @property
    def current(self) -> ForwardSize:
        """The size of the forward that is computed, or was last."""
        ...

    def plan(self, batch: TrainingInputBatch, *, training: bool) -> Sequence[Any]:
        """Return the forwards of `batch`, as many on each rank."""
        ...


PassesT = TypeVar("PassesT", bound=SizedPasses)


class OomRetry(Generic[PassesT]):
    """Runs the passes of one model whose memory is counted."""

    def __init__(self, passes: PassesT, *, drop_gradients: Callable[[], None]) -> None:
        self.passes = passes
        """The passes as they are cut and counted now: replaced by others, and never changed."""
        self._drop_gradients = drop_gradients
        self._batches: MemoryAwareBatchIterator | None = None
        self._found: TokenBudgets | None = None
        self._resident: Callable[[], Iterable[Tensor]] = lambda: ()
        self._retries = 0
        self._num_redone = 0
        self._peak_bytes = 0

    def begin(
        self,
        meter: MemoryMeter,
        batches: MemoryAwareBatchIterator,
        *,
        retries: int,
        resident: Callable[[], Iterable[Tensor]],
    ) -> None:
        """From now on cut passes by `batches`, count them by `meter`, and retry each up to `retries` times where memory
        runs out. `resident` gives the tensors that are there between passes."""
        self._batches, self._retries, self._resident = batches, retries, resident
        # Budgets are replaced by lower ones, and never changed: this stays what was found.
        self._found = batches.budgets
        self.use(micro_batching=batches, meter=meter)

    def begin_probing(self, meter: MemoryMeter, *, resident: Callable[[], Iterable[Tensor]]) -> None:
        """From now on run each pass as one forward of all its rows; RankOutOfMemory is raised, on all ranks, and the pass
        is not retried."""
        self._batches, self._resident = None, resident
        self.use(micro_batching=self.passes.micro_batching.as_one_forward(), meter=meter)

    def use(self, **changes: Any) -> None:
        """From now on passes differ in these fields of theirs."""
        self.passes = replace(self.passes, **changes)  # type: ignore[type-var]

    def run(self, batch: TrainingInputBatch, work: Callable[[Sequence[Any]], T], *, training: bool) -> T:
        """Return what `work` makes of the planned forwards of `batch`.

        Raises MemoryLimitError on all ranks where one row alone does not fit, or where it was tried too often.
        """
        meter = self.passes.meter
        assert meter is not None, "passes that nobody counts are not run here"
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
            # Blocks of the sizes that failed would stay in the allocator's cache, in the way of smaller ones.
            meter.release_cached()
            self._lower(self._batches, meter, reason, training=training, give_up=attempts > self._retries)

    def _attempt(
        self, meter: MemoryMeter, batch: TrainingInputBatch, work: Callable[[Sequence[Any]], T], *, training: bool
    ) -> T:
        # Planned in each attempt: the budget may have been lowered since the last.
        planned = self.passes.plan(batch, training=training)
        # Again for each pass: gradients and an optimizer's state are new tensors after their first step.
        meter.adopt(self._resident())
        meter.reset_peak()
        result = self.passes.strategy.in_consensus(self.passes.model, lambda: work(planned))
        self._peak_bytes = max(self._peak_bytes, meter.peak_bytes())
        return result

    def take_peak(self) -> int:
        """Return the most bytes held over the passes since the last call."""
        peak, self._peak_bytes = self._peak_bytes, 0
        return peak

    def metrics(self) -> StepMetrics:
        """Return the peak, the budget, and how many passes were computed anew, since the last call."""
        if self._batches is None:
            return {}
        prefix, peak = f"memory/{self.passes.name}", self.take_peak()
        redone, self._num_redone = self._num_redone, 0
        return {
            f"{prefix}_peak_gib": Max(peak / GIB),
            f"{prefix}_tokens_per_micro_batch": Last(float(self._batches.budgets.training)),
            # All ranks compute a pass anew together, and sums are added up over ranks.
            f"{prefix}_redone": Sum(float(redone if self.passes.strategy.rank == 0 else 0)),
        }

    def budgets(self) -> tuple[int, ...]:
        """Return for a checkpoint the budgets that were found, training and forward, and what they were lowered to; or
        none."""
        if self._batches is None or self._found is None:
            return ()
        found, now = self._found, self._batches.budgets
        return found.training, found.forward, now.training, now.forward

    def restore(self, budgets: tuple[int, ...]) -> None:
        """Lower budgets as they were lowered when the checkpoint was written: a run that goes on cuts its micro-batches
        where the uninterrupted one does. Changes nothing where others were found, as on other devices."""
        if self._batches is not None and budgets[:2] == self.budgets()[:2] and len(budgets) == 4:
            self._batches.lower(budgets[2], training=True)
            self._batches.lower(budgets[3], training=False)

    def _lower(
        self, batches: MemoryAwareBatchIterator, meter: MemoryMeter, reason: str, *, training: bool, give_up: bool
    ) -> None:
        """Lower the budget to the same on every rank, or raise the same MemoryLimitError there."""
        strategy, size, name = self.passes.strategy, self.passes.current, self.passes.name
        before = batches.budgets.of(training=training)
        if size.num_rows > 1 and not give_up:
            hopeless = ""
        else:
            hopeless = (
                f"{name}: memory ran out in a {'training' if training else 'forward'} pass over "
                f"{counted(size.num_rows, 'row')} of at most {size.longest} tokens ({reason}), "
                + ("which cannot be cut further" if size.num_rows == 1 else f"after {self._retries} smaller attempts")
            )
        # Collectives on every rank, also where none of its own micro-batches failed: all lower alike, or all raise.
        found = strategy.first_reason(hopeless if reason else "")
        # The largest of negatives is the smallest: one collective serves both.
        smallest = -strategy.agree(-size.positions if reason else -_FITTED_HERE)
        if found:
            raise MemoryLimitError(
                f"{found}; {meter.limit_bytes / GIB:.3g} GiB are there. Shorter rows "
                "(generator.max_context_length, data.max_length), model.gradient_checkpointing=true, more ranks with "
                "strategy=fsdp2, or a larger trainer.memory_budget_gb"
            )
        # By what failed and not by the old budget, which a single long row may have exceeded.
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


class SizedEngine(Protocol):
    """The engine of a learner: its model, and what runs its passes."""

    name: str
    parameters: dict[str, nn.Parameter]
    oom_retry: OomRetry[Any]
    state_in_host: bool

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def passes(self) -> SizedPasses: ...

    @property
    def strategy(self) -> ModelStrategy: ...

    def held_tensors(self) -> Iterable[Tensor]:
        """Return what is there between passes: parameters, buffers, gradients, optimizer state."""
        ...

    def allocate_state(self) -> None:
        """Make the optimizer's state, where there is an optimizer."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradient that was accumulated since the last optimizer step."""
        ...

    def traced(
        self, parameters: dict[str, nn.Parameter], without_memory: Callable[[], AbstractContextManager[None]]
    ) -> AbstractContextManager[None]:
        """Be alone meanwhile, with these parameters, and have passes traced inside of `without_memory`."""
        ...
