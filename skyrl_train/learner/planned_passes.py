"""Passes of a model that is not loaded, for a plan: how many positions fit, and what a size takes.

    counted     by arithmetic (`memory.py`): no torch, no time
    traced      the run's own learner on the meta device, its real step on tensors without memory (`step_trace.py`)
    compiled    what XLA plans for a model of the same sizes (`compiled_probe.py`)

The last two predict sizes one at a time, for seconds each. What does not depend on a micro-batch, and what ranks of a
sharded model exchange meanwhile, is counted under all three. A trace is of a CPU's kernels; what an accelerator's larger
tiles of logits and block masks hold beyond theirs is counted too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from skyrl_train.batch.memory_model import MemoryProbe, fit_memory_model, near_the_limit, probes_at_the_limit
from skyrl_train.batch.microbatch import make_micro_batch_strategy
from skyrl_train.errors import ModelError
from skyrl_train.learner.compiled_probe import CompiledModel
from skyrl_train.learner.memory import (
    MemoryEstimate,
    MemoryFacts,
    Phase,
    bytes_of_sharding,
    predict,
    predicted_token_budget,
    resident_bytes,
)

if TYPE_CHECKING:
    from skyrl_train.config.learners import LearnerSettings
    from skyrl_train.config.micro_batching import MicroBatchConfig
    from skyrl_train.learner.probe import Probed

_MOST_POSITIONS = 1 << 18
"""Of a size that is traced or compiled; what more would take follows from the fit."""
_TOLERANCE = 0.1
"""Share of the rows by which the sizes that fit, and do not, may be apart: a fit goes through both."""
_PATIENCE_S = 300.0
"""Of one plan, for all its sizes."""


@dataclass(frozen=True, kw_only=True)
class CountedPasses:
    """The passes of one model, by arithmetic."""

    facts: MemoryFacts
    longest: int

    def token_budget(self, phase: Phase, limit_bytes: int) -> int:
        """Computed positions that fit. Raises MemoryLimitError where one row of the longest does not."""
        return predicted_token_budget(self.facts, phase, limit_bytes, self.longest)

    def estimate(self, phase: Phase, rows: int) -> MemoryEstimate:
        """Of `rows` rows of the longest length."""
        return predict(self.facts, phase, rows, self.longest, rows * self.longest)


@dataclass(kw_only=True)
class Effort:
    """What the predictions of one plan have cost so far."""

    how: str
    """`traced` or `compiled by XLA`."""
    num_sizes: int = 0
    seconds: float = 0.0

    def line(self) -> str:
        """To print."""
        return f"{self.how} at {self.num_sizes} sizes in {self.seconds:.1f} s, nothing was run"

    @contextmanager
    def of_a_size(self) -> Iterator[None]:
        """Around one. Raises ModelError where all of them together have taken too long."""
        if self.seconds > _PATIENCE_S:
            raise ModelError(
                f"trainer.memory_probe: {self.num_sizes} sizes were {self.how} in {self.seconds:.0f} s, and that was not "
                "all. Set trainer.memory_probe=measure, whose plan is counted at once"
            )
        with self.taking_time():
            yield
        self.num_sizes += 1

    @contextmanager
    def taking_time(self) -> Iterator[None]:
        """Around what is done once."""
        start = time.monotonic()
        yield
        self.seconds += time.monotonic() - start


@dataclass(frozen=True, kw_only=True)
class ProbedPasses:
    """By sizes, each of which is predicted once."""

    facts: MemoryFacts
    longest: int
    lengths: list[int]
    padded: tuple[bool, ...]
    """Whether rows are; both where a layout is chosen batch by batch."""
    effort: Effort
    probe: Callable[[Phase, int, int], MemoryProbe]
    """Phase, rows and their length; all that the device holds."""
    known: dict[tuple[Phase, int, int], MemoryProbe] = field(default_factory=dict)

    def token_budget(self, phase: Phase, limit_bytes: int) -> int:
        """As of `CountedPasses`. Raises ModelError where it takes too long."""
        asked: dict[tuple[int, int], MemoryProbe] = {}

        def at(rows: int, length: int) -> MemoryProbe:
            asked[rows, length] = self._at(phase, rows, length)
            return asked[rows, length]

        max_rows = max(2, _MOST_POSITIONS // self.longest)
        probes_at_the_limit(at, self.lengths, limit_bytes, max_rows=max_rows, tolerance=_TOLERANCE)
        if len({probe.positions for probe in asked.values()}) < 2:
            at(2, self.longest)
        model = fit_memory_model(near_the_limit(list(asked.values())), margin=0.0)
        return min(model.token_budget(limit_bytes, self.longest, padded=each) for each in self.padded)

    def estimate(self, phase: Phase, rows: int) -> MemoryEstimate:
        """As of `CountedPasses`; what grows with the rows is one kind."""
        resident = resident_bytes(self.facts, training=phase == "training")
        peak = self._at(phase, rows, self.longest).peak_bytes
        growing = max(0, peak - sum(resident.values()))
        kinds = {**resident, f"all else ({self.effort.how})": growing}
        return MemoryEstimate(phase=phase, moment="at any moment", kinds=kinds)

    def _at(self, phase: Phase, rows: int, length: int) -> MemoryProbe:
        key = (phase, rows, length)
        if key not in self.known:
            with self.effort.of_a_size():
                self.known[key] = self.probe(phase, rows, length)
        return self.known[key]


PlannedPasses = CountedPasses | ProbedPasses
"""The passes of one model."""


def planned_passes(settings: LearnerSettings, longest: int, facts: MemoryFacts, effort: Effort) -> PlannedPasses:
    """Of one model and rows of at most `longest` tokens, as `trainer.memory_probe` says.

    Raises ModelError, SkyrlTrainError.
    """
    source = settings.micro_batching.memory_probe
    if source == "measure":
        return CountedPasses(facts=facts, longest=longest)
    if source == "xla":
        return ProbedPasses(
            facts=facts,
            longest=longest,
            lengths=[longest],
            padded=(True,),
            effort=effort,
            probe=_compiled(facts),
        )
    from skyrl_train.learner.probe import lengths_to_probe

    with effort.taking_time():
        probe = _traced(facts, _learner_without_weights(settings, facts))
    return ProbedPasses(
        facts=facts,
        longest=longest,
        lengths=lengths_to_probe(longest)[::2],  # a length in between is foretold by the other two
        padded={"padded": (True,), "auto": (True, False)}.get(settings.micro_batching.layout, (False,)),
        effort=effort,
        probe=probe,
    )


def effort_of(micro_batching: MicroBatchConfig) -> Effort:
    """Of a plan that has not begun."""
    return Effort(how="compiled by XLA" if micro_batching.memory_probe == "xla" else "traced")


def _beside_micro_batch(facts: MemoryFacts, *, training: bool) -> int:
    return sum(resident_bytes(facts, training=training).values()) + bytes_of_sharding(facts, training=training)


def _compiled(facts: MemoryFacts) -> Callable[[Phase, int, int], MemoryProbe]:
    compute, recomputes = facts.settings.precision.compute, facts.settings.checkpointing
    model = CompiledModel(model=facts.model, compute_bytes=compute, checkpointing=recomputes)
    phases: tuple[Phase, ...] = ("training", "scoring")
    probes = {
        phase: model.probe(
            training=phase == "training", resident_bytes=_beside_micro_batch(facts, training=phase == "training")
        )
        for phase in phases
    }
    return lambda phase, rows, length: probes[phase](rows, length)


def _traced(facts: MemoryFacts, learner: Probed) -> Callable[[Phase, int, int], MemoryProbe]:
    from skyrl_train.learner.memory_meter import CountingMeter
    from skyrl_train.learner.probe import Prober
    from skyrl_train.learner.step_trace import StepTrace

    trace = StepTrace(engine=learner.engine, held_bytes=0)
    tracer = Prober(learner=learner, meter=CountingMeter(0), trace=trace)
    on_host = replace(facts, settings=replace(facts.settings, accelerator=False))

    def probe(phase: Phase, rows: int, length: int) -> MemoryProbe:
        training = phase == "training"
        found = tracer.predict(rows, length, training=training)
        sizes = (phase, rows, length, rows * length)
        tiles = predict(facts, *sizes).peak_bytes - predict(on_host, *sizes).peak_bytes
        growing = found.peak_bytes - trace.resident_bytes(training=training) + max(0, tiles)
        return replace(found, peak_bytes=_beside_micro_batch(facts, training=training) + growing)

    return probe


def _learner_without_weights(settings: LearnerSettings, facts: MemoryFacts) -> Probed:
    """The learner that a run makes, of a model on the meta device and with none of its ranks. Raises ModelError."""
    import torch

    from skyrl_train.distributed.strategy import ModelStrategy
    from skyrl_train.learner.architectures import meta_model, read_config
    from skyrl_train.learner.build import adapt, learner_of
    from skyrl_train.learner.engine import ModelEngine
    from skyrl_train.model.causal_lm import place_model
    from skyrl_train.model.value_model import replace_head

    class OneOfMany(ModelStrategy):
        """A rank that knows how many there are, and meets none of them."""

        num_ranks = facts.settings.num_ranks
        sharded = facts.settings.strategy == "fsdp2"

    config = settings.model
    model = meta_model(
        read_config(config.path, revision=settings.policy_model.revision), name=config.path, attention=config.attention
    )
    if settings.role == "critic":
        replace_head(model, config)
    place_model(model, config, "meta")
    model.train()
    if config.lora.rank:
        adapt(model, settings)
    engine = ModelEngine(
        model,
        name=settings.role,
        micro_batching=make_micro_batch_strategy(
            settings.micro_batching, merge_turns=settings.merge_turns
        ).as_one_forward(),
        dtype=torch.bfloat16 if facts.settings.dtype == "bfloat16" else torch.float32,
        optimizer=settings.optimizer,
        strategy=OneOfMany(),
    )
    return learner_of(engine, settings)
