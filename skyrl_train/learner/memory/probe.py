"""What micro-batches of a model really take: forwards, and forwards with backwards, of rows made up for the purpose.

Rows of the longest legal length, doubled until the next would not fit on some rank, and shorter ones; one long row with
many short ones; and, where a layout computes common prefixes once, rows that have one in common. The passes are those
of training, with the real loss, with gradients and optimizer state in place, under the same agreement of ranks
(`oom_consensus.py`): a probe that runs out of memory anywhere is no probe on any rank, and how far rows are doubled depends
on what all ranks know. So all ranks make the same probes, whatever each has measured.

A probe leaves nothing: its gradients are dropped, no weight and no optimizer state is written, randomness comes from a
generator of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from skyrl_train.batch import DUMMY_ROW_LENGTH, SCHEMA, TrainingInputBatch, batch_of_lengths
from skyrl_train.batch.steps import LossDenominators, MiniBatch
from skyrl_train.errors import RankOutOfMemory
from skyrl_train.learner.memory.fit import MemoryProbe, PassPeaks, doubled, probes_at_the_limit
from skyrl_train.learner.memory.meter import MemoryMeter
from skyrl_train.learner.memory.oom_retry import SizedEngine
from skyrl_train.learner.memory.trace import StepTrace
from skyrl_train.system import derive_seed
from skyrl_train.telemetry import StepMetrics

NUM_LENGTHS = 3
"""Lengths that are probed: the longest, and each time half of it."""
SHORT_ROW_LENGTH = 3
"""Tokens of rows that are short beside the longest."""
_NOTHING_COUNTED = LossDenominators(num_tokens=0, num_sequences=0, num_rows=0, num_prompts=0)
"""A probe is no step: nothing is added to what the schedule counts."""


class Probed(Protocol):
    """A learner that can be probed."""

    @property
    def engine(self) -> SizedEngine: ...

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        """Return log-probabilities or values, `[num_tokens]`, as `Learner.forward`."""
        ...

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:
        """Accumulate the gradient of a mini-batch, and return its metrics, as `Learner.forward_backward`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Prober:
    """Probes one model, through what its learner does in training."""

    learner: Probed
    meter: MemoryMeter
    trace: StepTrace | None = None
    """Says what passes would take, in place of running them."""
    compiled: Callable[[int, int], MemoryProbe] | None = None
    """Says the same of rows and their length, without a pass of the learner's."""

    @property
    def predicts(self) -> bool:
        """Whether nothing is run, so that no memory can run out."""
        return self.trace is not None or self.compiled is not None

    def probe(self, num_rows: int, length: int, *, training: bool) -> MemoryProbe | None:
        """Return the peak on this rank; None where memory ran out on any. Called by all ranks between optimizer steps."""
        return self.probe_lengths([length] * num_rows, training=training)

    def probe_lengths(self, lengths: Sequence[int], *, training: bool, shared: int = 0) -> MemoryProbe | None:
        """Return the same of rows that differ in length; where they are padded, positions are rows times the longest. The
        first `shared` tokens of all rows are the same."""
        engine, length, num_rows = self.learner.engine, max(lengths), len(lengths)
        if self.compiled is not None:
            return self.compiled(num_rows, length)
        batch = self._rows(lengths, shared=shared)
        try:
            if self.trace is not None:
                peak = self.trace.peak_bytes(lambda: self._pass(batch, training=training), training=training)
            else:
                peak = self._measured_peak(batch, training=training)
        except RankOutOfMemory:  # on all ranks alike, so that all go on with the same probe
            return None
        return MemoryProbe(
            rows=num_rows,
            longest=length,
            positions=engine.passes.current.positions,
            training=training,
            peak_bytes=peak,
        )

    def sections(self, num_rows: int, length: int, *, training: bool) -> PassPeaks:
        """Return what a pass over such rows adds, section by section, of a prober that traces. Raises ModelError."""
        assert self.trace is not None
        batch = self._rows([length] * num_rows)
        return self.trace.run(lambda: self._pass(batch, training=training), training=training)

    def _rows(self, lengths: Sequence[int], *, shared: int = 0) -> TrainingInputBatch:
        vocabulary = self.learner.engine.model.config.get_text_config().vocab_size
        return probe_rows(lengths, vocabulary=vocabulary, shared=shared)

    def _measured_peak(self, batch: TrainingInputBatch, *, training: bool) -> int:
        engine = self.learner.engine
        # Without retries: where memory runs out is what is asked.
        engine.oom_retry.begin_probing(self.meter, resident=engine.held_tensors)
        # From an empty cache, so that what is reserved beyond the allocated is what this pass itself loses to gaps.
        self.meter.release_cached()
        try:
            if training:
                # all of them are there from the second micro-batch of a step on
                engine.strategy.hold_gradients(engine.model, engine.parameters.values())
            self._pass(batch, training=training)
            reserved = self.meter.reserved_peak_bytes()
        finally:
            if training:
                engine.zero_grad()
            self.meter.release_cached()
        return max(reserved, engine.oom_retry.take_peak())

    def _pass(self, batch: TrainingInputBatch, *, training: bool) -> None:
        if training:
            self.learner.forward_backward(MiniBatch(batch=batch, denominators=_NOTHING_COUNTED))
        else:
            self.learner.forward(batch)

    def grow(self, lengths: list[int], *, max_positions: int, training: bool, first_rows: int = 1) -> list[MemoryProbe]:
        """Probe at the limit of the meter, as `probes_at_the_limit` says, in step with the other ranks."""
        return probes_at_the_limit(
            lambda rows, length: self.probe(rows, length, training=training),
            lengths,
            max_rows=max(first_rows, max_positions // max(lengths)),
            first_rows=first_rows,
            **self._limits(),
        )

    def grow_uneven(self, longest: int, *, max_positions: int, max_rows: int, training: bool) -> list[MemoryProbe]:
        """Probe one row of `longest` with many of three tokens, doubled as in `grow`: what packed rows take that losses
        pad."""
        return doubled(
            lambda short: self.probe_lengths([longest, *[SHORT_ROW_LENGTH] * short], training=training),
            8,
            min(max_rows - 1, (max_positions - longest) // SHORT_ROW_LENGTH),
            **self._limits(),
        )

    def grow_trees(self, longest: int, *, max_positions: int, max_rows: int, training: bool) -> list[MemoryProbe]:
        """Probe rows of `longest` that differ in their last token alone, doubled as in `grow`: what a tree takes beside its
        positions, which are far fewer than its rows' tokens: their columns, their losses, a block mask."""
        return doubled(
            lambda rows: self.probe_lengths([longest] * rows, training=training, shared=longest - 1),
            2,
            min(max_rows, 1 + max_positions - longest),
            **self._limits(),
        )

    def _limits(self) -> dict[str, Any]:
        meter = self.meter
        agree = self.learner.engine.strategy.agree
        return {"limit_bytes": meter.limit_bytes, "held_bytes": meter.in_use_bytes, "agree": agree}


def lengths_to_probe(longest: int) -> list[int]:
    """Return the longest, half, a quarter ..., none below two tokens."""
    lengths = [longest >> halvings for halvings in range(NUM_LENGTHS)]
    return [length for length in lengths if length >= DUMMY_ROW_LENGTH] or [DUMMY_ROW_LENGTH]


def probe_rows(lengths: Sequence[int], *, vocabulary: int, shared: int = 0) -> TrainingInputBatch:
    """Return rows that take the most: every token but the first has loss, every column is there, and no two have anything in
    common but their first `shared` tokens."""
    generator = torch.Generator().manual_seed(derive_seed(0, "memory_probe", len(lengths), max(lengths)))
    batch = batch_of_lengths(lengths)
    mask = torch.ones(batch.num_tokens, dtype=torch.bool)
    # Nothing comes before a first token that could predict it.
    mask[batch.row_offsets[:-1]] = False
    # Random, as equal beginnings would be computed once and take less.
    ids = torch.randint(0, vocabulary, (batch.num_tokens,), generator=generator)
    if shared:
        starts = batch.row_offsets[:-1, None] + torch.arange(shared)
        # A copy, since the first row's are written to themselves.
        ids[starts] = ids[:shared].clone()
    columns: dict[str, Tensor] = {"input_ids": ids.to(SCHEMA["input_ids"].dtype), "loss_mask": mask}
    for name, spec in SCHEMA.items():
        if spec.optional and spec.per == "token" and spec.dtype.is_floating_point:
            columns[name] = 0.1 * torch.randn(batch.num_tokens, generator=generator).to(spec.dtype)
    columns["loss_weights"] = torch.full((batch.num_tokens,), 1.0 / batch.num_tokens, dtype=torch.float64)
    return batch.with_columns(**columns)
