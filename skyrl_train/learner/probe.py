"""What micro-batches of a model really take: forwards, and forwards with backwards, of rows made up for the purpose.

Rows of the longest legal length, doubled until the next would not fit on some rank, and shorter ones. The passes are those
of training, with the real loss, with gradients and optimizer state in place, under the same agreement of ranks
(`distributed/together.py`): a probe that runs out of memory anywhere is no probe on any rank, and how far rows are doubled
depends on what all ranks know. So all ranks make the same probes, whatever each has measured.

A probe leaves nothing: its gradients are dropped, no weight and no optimizer state is written, randomness comes from a
generator of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from skyrl_train.batch.memory_model import MemoryProbe
from skyrl_train.batch.minibatch import LossDenominators, MiniBatch
from skyrl_train.batch.token_budget import DUMMY_ROW_LENGTH
from skyrl_train.batch.training_batch import SCHEMA, TrainingInputBatch, batch_of_lengths
from skyrl_train.errors import RankOutOfMemory
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.learner.memory_meter import MemoryMeter
from skyrl_train.seeding import derive_seed
from skyrl_train.telemetry.metrics import StepMetrics

NUM_LENGTHS = 3
"""Lengths that are probed: the longest, and each time half of it."""
SHORT_ROW_LENGTH = 3
"""Tokens of rows that are short beside the longest."""
_NOTHING_COUNTED = LossDenominators(num_tokens=0, num_sequences=0, num_rows=0, num_prompts=0)
"""A probe is no step: nothing is added to what the schedule counts."""


class Probed(Protocol):
    """A learner that can be probed."""

    engine: ModelEngine

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        """Of a `Learner`."""
        ...

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:
        """Of a `Learner`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Prober:
    """Probes one model, through what its learner does in training."""

    learner: Probed
    meter: MemoryMeter

    def probe(self, num_rows: int, length: int, *, training: bool) -> MemoryProbe | None:
        """The peak on this rank; None where memory ran out on any. Called by all ranks between optimizer steps."""
        return self.probe_lengths([length] * num_rows, training=training)

    def probe_lengths(self, lengths: Sequence[int], *, training: bool) -> MemoryProbe | None:
        """The same of rows that differ; where they are padded, positions are rows times the longest."""
        engine, length, num_rows = self.learner.engine, max(lengths), len(lengths)
        batch = probe_rows(lengths, vocabulary=engine.model.config.get_text_config().vocab_size)
        engine.healing.begin_probing(self.meter, held=engine.held_tensors)
        try:
            if training:
                for parameter in engine.parameters.values():
                    # all of them are there from the second micro-batch of a step on
                    parameter.grad = torch.zeros_like(parameter)
                self.learner.forward_backward(MiniBatch(batch=batch, denominators=_NOTHING_COUNTED))
            else:
                self.learner.forward(batch)
        except RankOutOfMemory:
            return None
        finally:
            if training:
                engine.zero_grad()
            self.meter.release_cached()
        return MemoryProbe(
            rows=num_rows,
            longest=length,
            positions=engine.passes.current.positions,
            training=training,
            peak_bytes=engine.healing.take_peak(),
        )

    def grow_uneven(self, longest: int, *, max_positions: int, max_rows: int, training: bool) -> list[MemoryProbe]:
        """One row of `longest` with many of three tokens, doubled as in `grow`: what packed rows take that losses pad."""
        found: list[MemoryProbe] = []
        short = 8
        while short < max_rows and longest + SHORT_ROW_LENGTH * short <= max_positions:
            probe = self.probe_lengths([longest, *[SHORT_ROW_LENGTH] * short], training=training)
            if probe is None:
                break
            found.append(probe)
            growing = max(0, probe.peak_bytes - self.meter.in_use_bytes())
            if self.learner.engine.strategy.agree(int(probe.peak_bytes + growing > self.meter.limit_bytes)):
                break
            short *= 2
        return found

    def grow(self, lengths: list[int], *, max_positions: int, training: bool) -> list[MemoryProbe]:
        """Rows of the first length, doubled until the next would not fit on some rank, or would be more than a pass has;
        then as many positions of each other length, and where the longest row fits once alone, one row of each."""
        found: list[MemoryProbe] = []
        rows, length = 1, lengths[0]
        while (probe := self.probe(rows, length, training=training)) is not None:
            found.append(probe)
            growing = max(0, probe.peak_bytes - self.meter.in_use_bytes())
            is_last = probe.peak_bytes + growing > self.meter.limit_bytes
            if self.learner.engine.strategy.agree(int(is_last)) or 2 * rows * length > max_positions:
                break
            rows *= 2
        if found:
            sizes = [(found[-1].positions // other, other) for other in lengths[1:]]
            sizes += [(1, other) for other in lengths[1:]] if len(found) == 1 else []
            others = [self.probe(rows, other, training=training) for rows, other in sizes]
            found += [probe for probe in others if probe is not None]
        return found


def lengths_to_probe(longest: int) -> list[int]:
    """The longest, half, a quarter ..., none below two tokens."""
    lengths = [longest >> halvings for halvings in range(NUM_LENGTHS)]
    return [length for length in lengths if length >= DUMMY_ROW_LENGTH] or [DUMMY_ROW_LENGTH]


def probe_rows(lengths: Sequence[int], *, vocabulary: int) -> TrainingInputBatch:
    """Rows that take the most: no two share anything, every token but the first has loss, every column is there."""
    generator = torch.Generator().manual_seed(derive_seed(0, "memory_probe", len(lengths), max(lengths)))
    batch = batch_of_lengths(lengths)
    mask = torch.ones(batch.num_tokens, dtype=torch.bool)
    mask[batch.row_offsets[:-1]] = False
    ids = torch.randint(0, vocabulary, (batch.num_tokens,), generator=generator)
    columns: dict[str, Tensor] = {"input_ids": ids.to(SCHEMA["input_ids"].dtype), "loss_mask": mask}
    for name, spec in SCHEMA.items():
        if spec.optional and spec.per == "token" and spec.dtype.is_floating_point:
            columns[name] = 0.1 * torch.randn(batch.num_tokens, generator=generator).to(spec.dtype)
    columns["loss_weights"] = torch.full((batch.num_tokens,), 1.0 / batch.num_tokens, dtype=torch.float64)
    return batch.with_columns(**columns)
