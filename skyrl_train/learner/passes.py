"""Forwards, and forwards with backwards, of one model over a rank's micro-batches.

    rows with loss tokens --plan--> micro-batches --layout--> hidden states --loss or score--> a sum, or a number a token

How rows are split changes speed and memory, never the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from skyrl_train.batch import ROUTED, TrainingInputBatch, token_positions
from skyrl_train.batch.layouts import Layout, make_layout, merge_counts
from skyrl_train.batch.planner import MemoryAwareBatchIterator, MicroBatch, reduction_schedule
from skyrl_train.batch.steps import rows_with_loss
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.distributed import ModelStrategy
from skyrl_train.errors import BatchError, ModelError
from skyrl_train.learner.memory.meter import MemoryMeter
from skyrl_train.learner.memory.oom_retry import ForwardSize
from skyrl_train.model import hidden_states, reading
from skyrl_train.model.layers import beyond_index, widest_activation
from skyrl_train.model.lora import adapters_at, dropping, runs_of
from skyrl_train.model.parallel import replayed, replaying
from skyrl_train.model.vision import showing
from skyrl_train.system import return_free_memory
from skyrl_train.telemetry import Metric, StepMetrics, Sum, merge_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DECLARED_METRICS = """
layout/{policy,critic}_{positions,tokens} | tokens | Positions with a gradient, padding included; tokens of rows. |
    reinforcement learning
layout/{policy,critic}_forwards_{padded,packed,prefix_shared} | count | Forwards with a gradient, by layout. |
    reinforcement learning
layout/{policy,critic}_turns_{merged,apart} | count | Turns sharing a row with their predecessor, and others. | where
    turns are merged
"""

T = TypeVar("T")
ScoreRows = Callable[[Tensor, TrainingInputBatch, Layout], Tensor]
"""`(hidden [positions, hidden], rows, layout) -> [rows, len]`."""
LossOfRows = Callable[[Tensor, TrainingInputBatch, Layout], tuple[Tensor, StepMetrics]]
"""`(hidden [positions, hidden], rows, layout) -> (sum of weighted token losses, metrics)`."""


class CurrentForward:
    """The forward that is computed, or was last, and its size."""

    size = ForwardSize(num_rows=0, longest=0, positions=0)
    widest = 0
    """Numbers of a position in the model's widest layer; 0 until they are counted."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The passes of one model, in one way of cutting rows and of counting memory; another way is another object."""

    model: PreTrainedModel
    strategy: ModelStrategy
    name: str
    dtype: torch.dtype
    micro_batching: MemoryAwareBatchIterator
    meter: MemoryMeter | None = None
    """Counts what passes allocate, where micro-batches size themselves."""
    without_memory: Callable[[], AbstractContextManager[None]] | None = None
    """Inside of which passes are traced (`learner/memory/trace.py`) in place of computed; nothing is read back then."""
    adapters: tuple[str, ...] = ()
    """Those of the rows, by their `adapter_index`; where they have none, all are of the adapter that is active."""
    forward: CurrentForward = field(default_factory=CurrentForward)
    """Shared by the objects that are made of one another."""

    @property
    def layout(self) -> LayoutChoice:
        """What forwards compute; where it is `auto`, the planner chooses for each."""
        return self.micro_batching.layout

    @property
    def merge_turns(self) -> bool:
        """Whether turns that extend one another are computed together."""
        return self.micro_batching.merge_turns

    @property
    def current(self) -> ForwardSize:
        """Size of the forward that is computed, or was last."""
        return self.forward.size

    @property
    def device(self) -> torch.device:
        """Where passes are computed; parameters that are kept in host memory come there layer by layer."""
        return self.strategy.device or next(self.model.parameters()).device

    def plan(self, batch: TrainingInputBatch, *, training: bool) -> list[MicroBatch]:
        """The forwards of `batch`, of the rows that have loss tokens alone; as many on each rank (a collective).

        Raises BatchError for a token id that the model has no embedding for.
        """
        _require_vocabulary(batch, self.model.config.get_text_config().vocab_size)
        batch = replayed(self.model, batch)
        # What carries no loss adds nothing to a sum and is scored 0: it need not be computed.
        rows = rows_with_loss(batch)
        kept = batch.take(rows)
        parts = self.micro_batching.iterate(kept, training=training, agree=self.strategy.agree)
        planned = [replace(part, rows=rows[part.rows]) for part in parts]
        return [each.by_adapter() for each in planned] if "adapter_index" in batch else planned

    @torch.no_grad()
    def score(
        self,
        planned: Sequence[MicroBatch],
        batch: TrainingInputBatch,
        score: ScoreRows,
        *,
        numbers: tuple[int, ...] = (),
    ) -> Tensor:
        """`[num_tokens, *numbers]` of `batch` on the CPU: `score` of every planned row, 0 elsewhere."""
        scores = torch.zeros(batch.num_tokens, *numbers, dtype=self._score_dtype())
        found: list[tuple[Tensor, Tensor]] = []
        for part in planned:
            self.strategy.begin_micro_batch(self.model, is_last=None)
            with self._computing(part) as (rows, layout):
                padded = self._compute(score, rows, layout)
                if len(part.rows) and self.without_memory is None:
                    found.append((token_positions(batch.row_offsets, part.rows), rows.from_padded(padded)))
        for places, values in found:  # after the last forward, so that the host waits for the device once
            scores[places] = values.to("cpu", scores.dtype)
        return scores

    def accumulate(self, planned: Sequence[MicroBatch], loss_of: LossOfRows, *, step: int) -> tuple[StepMetrics, str]:
        """Adds the gradient of the sum of `loss_of` over the planned forwards. `step` is the optimizer step, from which
        dropout's randomness is derived.

        Returns the metrics, and the first loss that is not finite and where; empty where there is none.
        """
        metrics: list[StepMetrics] = []
        losses: list[Tensor] = []
        mismatches: list[Tensor] = []
        for part, is_last in zip(planned, reduction_schedule(len(planned)) if planned else ()):
            self.strategy.begin_micro_batch(self.model, is_last=is_last)
            with self._computing(part) as (rows, layout), dropping(self.model, rows, layout, step=step):
                loss, measured = self._compute(loss_of, rows, layout)
                loss.backward()  # type: ignore[no-untyped-call]
                loss = loss.detach()  # what the graph holds on to would be there in the next forward
                if self.without_memory is not None:
                    continue
                losses.append(loss)
                mismatches += layout.scored.mismatches if layout.scored is not None else []
                metrics += [measured, self._layout_metrics(part.batch, layout)]
            if self.device.type == "cpu":
                return_free_memory()  # holes that no larger tensor fits in make the heap grow
        # one wait for the device, for all that the pass left there
        self._require_foreseen(mismatches)
        return merge_metrics(metrics), _first_non_finite(losses, planned)

    @contextmanager
    def _computing(self, part: MicroBatch) -> Iterator[tuple[TrainingInputBatch, Layout]]:
        """The part on the device, its layout made; what is allocated inside counts."""
        longest = int(part.batch.lengths.max())
        # Said before the layout is made, for which memory may run out
        # as well: the size of what failed decides what is tried next.
        self.forward.size = ForwardSize(num_rows=part.batch.num_rows, longest=longest, positions=part.batch.num_tokens)
        with nullcontext() if self.meter is None else self.meter.counting(self.strategy.gathered):
            layout = make_layout(part.batch, part.layout, merge=self.merge_turns, group=self.strategy.group)
            layout = layout.with_scored(part.batch)
            ranks = 1 if self.strategy.group is None else self.strategy.group.size
            self.forward.size = ForwardSize(
                num_rows=part.batch.num_rows, longest=longest, positions=layout.num_positions * ranks
            )
            if self.device.type == "cuda":
                self.require_indexed()
            routed = replaying(self.model, part.batch, layout, self.device)
            images = showing(self.model, part.batch, layout, self.device)
            several = self._several(part.batch, layout)
            # What is padded for losses need not hold the experts.
            rows, layout = part.batch.without_columns(ROUTED).to(self.device), layout.to(self.device)
            traced = nullcontext() if self.without_memory is None else self.without_memory()
            with routed, images, reading(self.model, rows, layout), several, traced:
                yield rows, layout

    def _several(self, rows: TrainingInputBatch, layout: Layout) -> AbstractContextManager[None]:
        """Has each position computed by the adapter of its row, where rows are of several."""
        if "adapter_index" not in rows:
            return nullcontext()
        token_of = torch.zeros(layout.num_positions, dtype=torch.int64)
        token_of[layout.position_of_token] = torch.arange(rows.num_tokens)
        token_of = token_of.cummax(0).values  # padding goes with the row before it
        of_position = torch.repeat_interleave(rows["adapter_index"], rows.lengths)[token_of]
        narrowed = [] if layout.scored is None else [of_position[layout.scored.read]]
        runs = {}
        for each in (*narrowed, of_position):
            index, lengths = torch.unique_consecutive(each, return_counts=True)
            # By the number of positions: the last layer computes those that are read
            # alone, and adapted layers tell by their input which runs are theirs.
            runs[len(each)] = runs_of([self.adapters[number] for number in index.tolist()], lengths.tolist())
        return adapters_at(self.model, runs)

    def require_indexed(self) -> None:
        """Raise BatchError where kernels cannot index the current forward."""
        forward, group = self.forward, self.strategy.group
        forward.widest = forward.widest or widest_activation(self.model)
        ranks = self.strategy.tensor_ranks * (1 if group is None else group.size)
        if reason := beyond_index(self.current.positions, forward.widest, ranks=ranks):
            raise BatchError(
                f"{self.name}: {reason}. Set a lower trainer.max_tokens_per_microbatch (in scoring "
                "trainer.max_tokens_per_forward_microbatch), or with micro_batching=fixed a lower "
                "trainer.micro_train_batch_size_per_gpu (trainer.micro_forward_batch_size_per_gpu)"
            )

    def _compute(
        self, function: Callable[[Tensor, TrainingInputBatch, Layout], T], rows: TrainingInputBatch, layout: Layout
    ) -> T:
        """`function` of the layout's last hidden states, under the strategy."""
        with self._autocast():
            return self.strategy.compute(self.model, lambda: function(hidden_states(self.model, layout), rows, layout))

    def _require_foreseen(self, mismatches: Sequence[Tensor]) -> None:
        """Raises ModelError where the head's gradient was formed for another loss than the one that came."""
        if mismatches and bool(torch.stack(list(mismatches)).any()):
            raise ModelError(
                f"{self.name}: the loss is declared a sum over tokens, but its gradient is not that of such a sum. Do not "
                "declare it tokenwise (trainer.algorithm.policy_loss): its gradient is then computed as it comes"
            )

    def _layout_metrics(self, rows: TrainingInputBatch, layout: Layout) -> StepMetrics:
        """Positions computed for how many tokens, the number of forwards, and what became of turns."""
        prefix = f"layout/{self.name}"
        metrics: dict[str, Metric] = {
            f"{prefix}_positions": Sum(float(layout.num_positions)),
            f"{prefix}_tokens": Sum(float(rows.num_tokens)),
            f"{prefix}_forwards_{layout.name}": Sum(1.0),
        }
        if self.merge_turns:
            merged, apart = merge_counts(rows)
            metrics |= {f"{prefix}_turns_merged": Sum(float(merged)), f"{prefix}_turns_apart": Sum(float(apart))}
        return metrics

    def _autocast(self) -> AbstractContextManager[object]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def _score_dtype(self) -> torch.dtype:
        return torch.float64 if next(self.model.parameters()).dtype == torch.float64 else torch.float32


def _first_non_finite(losses: Sequence[Tensor], planned: Sequence[MicroBatch]) -> str:
    """The first loss that is not finite and where it was; empty where all are."""
    values = torch.stack(list(losses)).tolist() if losses else []
    for value, part in zip(values, planned):
        if not math.isfinite(value):
            return f"loss {value} in the micro-batch of {part.batch.metadata.uids[0]!r}"
    return ""


def _require_vocabulary(batch: TrainingInputBatch, vocabulary: int) -> None:
    """Raises BatchError for a token id that the model has no embedding for."""
    ids = batch["input_ids"]
    # On a GPU an id past the embedding ends the process with an assertion that names neither row nor token.
    outside = (ids < 0) | (ids >= vocabulary)
    if bool(outside.any()):
        token = int(outside.nonzero()[0])
        row = int(torch.searchsorted(batch.row_offsets, token, right=True)) - 1
        raise BatchError(
            f"token id {int(ids[token])} in a row of {batch.metadata.uids[row]!r}, but the model's vocabulary has "
            f"{vocabulary} entries. Were these rollouts made with another tokenizer?"
        )
