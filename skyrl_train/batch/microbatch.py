"""How one rank's rows are cut into forwards. Changes speed and memory, never the gradient.

A strategy sees the rows of one rank and names the rows of each micro-batch. It may cut and order them as it likes;
that every row is in exactly one micro-batch is checked. Custom planners are run by `batch/planner.py`. torch is imported
only where tensors appear, so that a plan can be made without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from skyrl_train.batch.documents import Admits
from skyrl_train.batch.planner import CustomPlanner, Forward
from skyrl_train.batch.token_budget import Rows, TokenBudget
from skyrl_train.config.micro_batching import MicroBatchConfig
from skyrl_train.config.parts import MICRO_BATCH_STRATEGIES
from skyrl_train.config.rules import LayoutChoice, LayoutName
from skyrl_train.errors import BatchError
from skyrl_train.registry import part_name

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_train.batch.training_batch import TrainingInputBatch


class MicroBatchStrategy(Protocol):
    """Cuts rows into micro-batches."""

    def split(self, batch: TrainingInputBatch, *, training: bool) -> list[Tensor]:
        """Row numbers (int64) of each micro-batch, each row in exactly one. `training` is False for a forward alone."""
        ...


class LengthPlanner(Protocol):
    """What a strategy that looks at lengths alone computes, without tensors, so that a plan can be made with it."""

    def split_lengths(self, lengths: Rows, *, training: bool) -> list[Rows]:
        """Row numbers of each micro-batch, from the rows' lengths."""
        ...

    def admits(self, num_rows: int, longest: int, num_tokens: int, *, training: bool) -> bool:
        """Whether such rows fit one micro-batch; a single row always does."""
        ...

    def cap(self, *, training: bool) -> int:
        """The most rows, or computed positions, that one micro-batch holds."""
        ...


@dataclass(frozen=True)
class ByLength:
    """A strategy that fills micro-batches up to a cap. Rows that `layout` computes together stay together."""

    planner: FixedRows | TokenBudget
    layout: LayoutChoice = "padded"
    merge_turns: bool = False

    def split(self, batch: TrainingInputBatch, *, training: bool) -> list[Tensor]:
        """As the planner says of lengths; where the layout computes common tokens once, of what is left."""
        import torch

        if self.layout in ("padded", "packed") and not self.merge_turns:
            parts = self.planner.split_lengths(lengths_of(batch), training=training)
            return [torch.from_numpy(rows) for rows in parts]
        from skyrl_train.batch.layout_split import split_forwards

        name = self.layout_of(batch, training=training)
        forwards = split_forwards(batch, self.planners()[name], name, training=training, merge=self.merge_turns)
        return [torch.from_numpy(forward.rows) for forward in forwards]

    def layout_of(self, batch: TrainingInputBatch, *, training: bool) -> LayoutName:
        """The layout, or for `auto` the one whose pass over `batch` is predicted to be cheapest."""
        if self.layout != "auto":
            return self.layout
        from skyrl_train.batch.forwards import ForwardCost
        from skyrl_train.batch.layout_split import cheapest_layout

        return cheapest_layout(batch, self.planners(), training=training, merge=self.merge_turns, cost=ForwardCost())

    def planners(self) -> dict[LayoutName, FixedRows | TokenBudget]:
        """A token budget counts other positions where rows are padded."""
        planner = self.planner
        if isinstance(planner, FixedRows):
            return {"padded": planner, "packed": planner, "prefix_shared": planner}
        flat = replace(planner, padded=False)
        return {"padded": replace(planner, padded=True), "packed": flat, "prefix_shared": flat}

    def admits(self, num_rows: int, longest: int, num_tokens: int, *, training: bool) -> bool:
        """As the planner."""
        return self.planner.admits(num_rows, longest, num_tokens, training=training)


@dataclass(frozen=True, kw_only=True)
class FixedRows:
    """At most so many rows in a micro-batch; rows of similar length go together, the longest first."""

    counts_rows: ClassVar[bool] = True
    rows_per_train_micro_batch: int
    rows_per_forward_micro_batch: int

    def split_lengths(self, lengths: Rows, *, training: bool) -> list[Rows]:
        """Row numbers of each micro-batch."""
        return fixed_rows(lengths, self.cap(training=training))

    def admits(self, num_rows: int, longest: int, num_tokens: int, *, training: bool) -> bool:  # noqa: ARG002
        """Whether there are few enough rows."""
        return num_rows <= self.cap(training=training)

    def cap(self, *, training: bool) -> int:
        """The most rows of one micro-batch."""
        return self.rows_per_train_micro_batch if training else self.rows_per_forward_micro_batch


def fixed_rows(lengths: Rows, max_rows: int) -> list[Rows]:
    """As few micro-batches of at most `max_rows` rows as there can be, level to within one row, longest rows first."""
    if len(lengths) == 0:
        return []
    order = np.argsort(-lengths, kind="stable")
    return np.array_split(order, -(-len(lengths) // max_rows))


def fixed(trainer: MicroBatchConfig) -> MicroBatchStrategy:
    """At most `trainer.micro_train_batch_size_per_gpu` rows."""
    return ByLength(
        FixedRows(
            rows_per_train_micro_batch=trainer.micro_train_batch_size_per_gpu,
            rows_per_forward_micro_batch=trainer.micro_forward_batch_size_per_gpu,
        ),
        layout=trainer.layout,
    )


def token_budget(trainer: MicroBatchConfig) -> MicroBatchStrategy:
    """At most `trainer.max_tokens_per_microbatch` computed positions."""
    return ByLength(_stated_budget(trainer), layout=trainer.layout)


def _stated_budget(trainer: MicroBatchConfig) -> TokenBudget:
    return TokenBudget(
        tokens_per_train_micro_batch=trainer.max_tokens_per_microbatch,
        tokens_per_forward_micro_batch=trainer.max_tokens_per_forward_microbatch,
        padded=trainer.layout not in ("packed", "prefix_shared"),
    )


def make_micro_batch_strategy(
    trainer_config: MicroBatchConfig, *, merge_turns: bool = False
) -> ByLength | CustomPlanner:
    """The strategy that `trainer.micro_batching` names; a custom planner is run by `CustomPlanner`.

    With `merge_turns`, turns that extend one another count as the row that computes them, and stay with it.
    Raises ConfigError for an unknown name.
    """
    spec, builtin = trainer_config.micro_batching, MICRO_BATCH_STRATEGIES.name_of(trainer_config.micro_batching)
    if builtin in MICRO_BATCH_STRATEGIES:
        strategy: ByLength = MICRO_BATCH_STRATEGIES[builtin](trainer_config)
        return replace(strategy, merge_turns=merge_turns)
    return CustomPlanner(
        plan=MICRO_BATCH_STRATEGIES.resolve(spec),
        name=part_name(spec),
        layout=trainer_config.layout,
        merge_turns=merge_turns,
        stated=_stated_budget(trainer_config),
    )


def layout_of(
    batch: TrainingInputBatch, strategy: MicroBatchStrategy, layout: LayoutChoice, *, training: bool
) -> LayoutName:
    """What a pass over `batch` uses where a forward names no other. For `auto`, as the strategy predicts; without
    `layout_of` it is `prefix_shared`, which computes the fewest positions."""
    if layout != "auto":
        return layout
    chooses: Callable[..., LayoutName] | None = getattr(strategy, "layout_of", None)
    return "prefix_shared" if chooses is None else chooses(batch, training=training)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward."""

    batch: TrainingInputBatch
    rows: Tensor
    """int64: which rows of the rank's batch these are; empty where a dummy row keeps step with other ranks."""
    layout: LayoutName | None = None
    """What computes them, where a planner named it; None is the layout of the pass."""


def micro_batches(
    batch: TrainingInputBatch,
    strategy: MicroBatchStrategy,
    *,
    training: bool,
    agree: Callable[[int], int] = lambda count: count,
) -> Iterator[MicroBatch]:
    """The forwards of one rank's rows, in order.

    `agree` turns this rank's number of micro-batches into the number that every rank runs (the largest; a collective
    where there are several ranks). Where it is more, dummy micro-batches of one row without loss follow.
    Raises BatchError where the strategy loses or doubles a row.
    """
    import torch

    # A planner names the layout of each forward, and its answer has been checked.
    planned: Callable[..., list[Forward]] | None = getattr(strategy, "forwards", None)
    parts: list[tuple[Tensor, LayoutName | None]]
    if planned is None:
        parts = [(rows, None) for rows in checked_split(batch, strategy, training=training)]
    else:
        parts = [(torch.as_tensor(each.rows), each.layout) for each in planned(batch, training=training)]
    count = agree(len(parts))
    if count < len(parts):
        raise BatchError(f"the ranks agreed on {count} micro-batches, but this one has {len(parts)}")
    for rows, layout in parts:
        yield MicroBatch(batch=batch.take(rows), rows=rows, layout=layout)
    for _ in range(count - len(parts)):
        yield MicroBatch(batch=batch.slice(0, 0).pad_rows(1, uid="dummy"), rows=torch.zeros(0, dtype=torch.int64))


def checked_split(batch: TrainingInputBatch, strategy: MicroBatchStrategy, *, training: bool) -> list[Tensor]:
    """`strategy.split`; raises BatchError unless every row is in exactly one micro-batch and none is empty."""
    import torch

    parts = [torch.as_tensor(part, dtype=torch.int64) for part in strategy.split(batch, training=training)]
    rows = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    name = type(strategy).__name__
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < batch.num_rows:
        raise BatchError(f"{name} named rows {int(rows.min())} to {int(rows.max())} of {batch.num_rows} rows")
    times = torch.bincount(rows, minlength=batch.num_rows)
    wrong = torch.nonzero(times != 1)
    if len(wrong):
        row = int(wrong[0])
        raise BatchError(f"{name} put row {row} in {int(times[row])} micro-batches: every row belongs in exactly one")
    if any(len(part) == 0 for part in parts):
        raise BatchError(f"{name} made an empty micro-batch")
    return parts


def lengths_of(batch: TrainingInputBatch) -> Rows:
    """Tokens of each row, int64 `[num_rows]`."""
    return np.asarray(batch.lengths.cpu().numpy(), dtype=np.int64)


def training_limit(strategy: ByLength | CustomPlanner) -> Admits:
    """What of (rows, longest row, tokens) fits one micro-batch of training, by which steps close at `docs_per_step`."""
    return lambda num_rows, longest, num_tokens: strategy.admits(num_rows, longest, num_tokens, training=True)
