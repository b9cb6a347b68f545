"""How large a model's micro-batches are: probed, fitted, agreed on by all ranks, and remembered.

    probes (a rank's own) --fit--> peak = base + a * positions + b * positions * longest --limit--> C of this rank
    C of the run = the least over ranks, tried out at every probed length before it is used

All ranks of a model call these functions in step.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from skyrl_train.batch.memory_model import (
    MemoryModel,
    MemoryProbe,
    fit_memory_model,
    near_the_limit,
    probes_at_the_limit,
)
from skyrl_train.batch.microbatch import TokenBudgets
from skyrl_train.errors import MemoryLimitError
from skyrl_train.learner.compiled_probe import CompiledModel
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.learner.memory_facts import facts_of_model
from skyrl_train.learner.memory_meter import GIB, CountingMeter, CudaMeter, MemoryMeter
from skyrl_train.learner.optimizer import allocate_state
from skyrl_train.learner.probe import Probed, Prober, lengths_to_probe
from skyrl_train.learner.step_trace import StepTrace

SHRINK = 0.9
"""Of a budget that did not hold when it was tried out, so much is tried next."""
WORTH_A_TRIAL = 1.02
"""A budget that has held is replaced by one that is larger by this factor at least."""
_PARTS = 1_000_000
"""Ranks agree on whole numbers: a share is told in millionths."""
_TOLERANCE = 0.05
"""Share of the rows by which the predicted sizes that fit, and do not, may be apart: a fit goes through both."""
_TRIALS = 8
"""Budgets that are tried out before it is given up."""


@dataclass(frozen=True, kw_only=True)
class SizingLimits:
    """What micro-batches may take, and how large rows and passes come."""

    longest: int
    """Tokens of the longest legal row."""
    max_rows: int
    """Rows of one rank's largest pass: more are never together."""
    limit_bytes: int
    """Of one process; 0 is what the device has."""
    margin: float
    retries: int
    source: Literal["measure", "trace", "xla", "both"] = "measure"
    """`trainer.memory_probe`."""


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """One phase of one model on one rank."""

    tokens: int
    """The budget, of all ranks."""
    own_tokens: int
    """What this rank's memory would allow."""
    limit_bytes: int
    cell_share: float
    """Of all ranks; 0 where rows are padded (`TokenBudgets.cell_shares`)."""
    model: MemoryModel
    probes: tuple[MemoryProbe, ...]
    predicted_tokens: int = 0
    """The budget by prediction; 0 where none was made."""


@dataclass(frozen=True, kw_only=True)
class SizingReport:
    """One model on one rank; JSON in the run's folder."""

    name: str
    facts: Mapping[str, str]
    """What the budgets hold for: model, lengths, layout, device, memory."""
    is_reused: bool
    forward: PhaseReport
    training: PhaseReport | None
    """None for a model that is only scored."""

    @property
    def budgets(self) -> TokenBudgets:
        training = self.training or self.forward
        return TokenBudgets(
            training=training.tokens,
            forward=self.forward.tokens,
            cell_shares=(training.cell_share, self.forward.cell_share),
        )

    def line(self) -> str:
        """For the run's first lines."""
        phases = {"training": self.training, "forward": self.forward}
        parts = [f"{name} {phase.tokens} positions" for name, phase in phases.items() if phase is not None]
        probes = sum(len(phase.probes) for phase in phases.values() if phase is not None)
        fit = max(phase.model.largest_relative_error for phase in phases.values() if phase is not None)
        source = "of the run that is resumed" if self.is_reused else f"{probes} probes, fitted within {fit:.1%}"
        if probes == 0:
            how = "compiled by XLA" if self.facts["source"] == "xla" else "traced"
            source = f"{how}, nothing was run"
        elif any(phase is not None and phase.predicted_tokens for phase in phases.values()):
            told = ", ".join(_beside(name, phase) for name, phase in phases.items() if phase is not None)
            source = f"{source}; predicted: {told}"
        return (
            f"{self.name:<11} {', '.join(parts)} a micro-batch in {self.forward.limit_bytes / GIB:.3g} GiB ({source})"
        )


def _beside(name: str, phase: PhaseReport) -> str:
    """`training 4096 (+2.1%)`: the predicted budget, and by how much it exceeds the one that was measured."""
    return f"{name} {phase.predicted_tokens} ({phase.predicted_tokens / phase.tokens - 1:+.1%})"


def make_meter(device: torch.device, limits: SizingLimits) -> MemoryMeter:
    """Of this process."""
    if device.type == "cuda":
        return CudaMeter(device, limit_bytes=limits.limit_bytes)
    return CountingMeter(limits.limit_bytes)


def size_all(
    learners: Sequence[Probed], limits: SizingLimits, stored: Mapping[str, SizingReport]
) -> dict[str, SizingReport]:
    """Those of one process, which share its memory: all that lies there between passes is there before the first probe.
    Reports by name."""
    if not learners:
        return {}
    meter = make_meter(learners[0].engine.passes.device, limits)
    for learner in learners:
        hold_everything(learner.engine, meter)
    return {
        learner.engine.name: size_micro_batches(learner, meter, limits, stored=stored.get(learner.engine.name))
        for learner in learners
    }


def hold_everything(engine: ModelEngine, meter: MemoryMeter) -> None:
    """Optimizer state is made now rather than in the first step, and all that lies there between passes counts."""
    if _is_trained(engine):
        allocate_state(engine.optimizer)
    meter.adopt(engine.held_tensors())


def size_micro_batches(
    learner: Probed, meter: MemoryMeter, limits: SizingLimits, *, stored: SizingReport | None = None
) -> SizingReport:
    """Finds the budgets, or takes those of `stored` where all ranks find that they hold for what is here, and has the
    engine's passes run under them from now on. Raises MemoryLimitError where the longest row does not fit."""
    engine, strategy = learner.engine, learner.engine.passes.micro_batching
    hold_everything(engine, meter)
    limit = -engine.strategy.agree(-meter.limit_bytes)
    facts = _facts(engine, limits, limit)
    differs = stored is None or dict(stored.facts) != facts
    if engine.strategy.agree(int(differs)) or stored is None:
        prober = Prober(learner=learner, meter=meter)
        report = SizingReport(
            name=engine.name,
            facts=facts,
            is_reused=False,
            training=_size_phase(prober, limits, training=True) if _is_trained(engine) else None,
            forward=_size_phase(prober, limits, training=False),
        )
    else:
        report = replace(stored, is_reused=True)
    engine.healing.begin(meter, strategy.under(report.budgets), retries=limits.retries, held=engine.held_tensors)
    return report


def _size_phase(prober: Prober, limits: SizingLimits, *, training: bool) -> PhaseReport:
    """Grows, fits, and tries the budget out at every length: what a fit cannot know shows there."""
    agree, meter = prober.learner.engine.strategy.agree, prober.meter
    lengths = lengths_to_probe(limits.longest)
    most = max(2, limits.max_rows) * limits.longest
    predicted = 0
    if limits.source != "measure":
        foreseen = _predicted_phase(prober, limits, training=training)
        if limits.source != "both":
            return foreseen
        predicted = foreseen.tokens
    # The prediction may be too high: half of it leaves room, and two sizes give the fit its slope.
    rows = max(1, predicted // limits.longest // 4)
    probes = prober.grow(lengths, max_positions=most, training=training, first_rows=rows)
    if len({probe.positions for probe in probes}) < 2:
        raise _too_long(prober, limits, training=training)
    cap, held = most, 0
    for _ in range(_TRIALS):
        model = fit_memory_model(near_the_limit(probes), margin=limits.margin)
        own = min(cap, _budget(prober, model, limits, training=training))
        tokens = -agree(-own)
        if tokens > held * WORTH_A_TRIAL:
            trials = [
                prober.probe(max(1, tokens // length), length, training=training)
                for length in {lengths[0], lengths[-1]}
            ]
            probes += [trial for trial in trials if trial is not None]
            over = any(trial is None or trial.peak_bytes > meter.limit_bytes for trial in trials)
            if agree(int(over)):
                cap = int(tokens * SHRINK)
            else:
                held = tokens
        else:
            tokens = min(tokens, held)
            return PhaseReport(
                tokens=tokens,
                own_tokens=own,
                limit_bytes=meter.limit_bytes,
                cell_share=_cell_share(prober, model, limits, tokens, training=training),
                model=model,
                probes=tuple(probes),
                predicted_tokens=predicted,
            )
    raise MemoryLimitError(
        f"{prober.learner.engine.name}: no token budget held in {_TRIALS} trials, the last of {tokens} positions; does "
        "something else use the device? Set trainer.memory_budget_gb, or trainer.memory_margin higher"
    )


def _predicted_phase(prober: Prober, limits: SizingLimits, *, training: bool) -> PhaseReport:
    """The budget without a run: what fits is traced, or asked of XLA, from the longest row to the shortest, and fitted as
    measured probes are."""
    engine, meter = prober.learner.engine, prober.meter
    trace = StepTrace(engine=engine, held_bytes=meter.in_use_bytes())
    tracer = replace(prober, trace=trace)
    predict: Callable[[int, int], MemoryProbe] = lambda rows, length: tracer.predict(rows, length, training=training)  # noqa: E731
    if limits.source == "xla":
        model_in_jax = CompiledModel(
            model=facts_of_model(engine.model),
            compute_bytes=engine.passes.dtype.itemsize,
            checkpointing=bool(getattr(engine.model, "is_gradient_checkpointing", False)),
        )
        predict = model_in_jax.probe(training=training, resident_bytes=trace.resident_bytes(training=training))
    lengths, reason, probes = lengths_to_probe(limits.longest), "", list[MemoryProbe]()
    try:
        probes = probes_at_the_limit(
            predict,
            lengths,
            meter.limit_bytes,
            max_rows=max(2, limits.max_rows),
            tolerance=_TOLERANCE,
        )
    except MemoryLimitError as error:
        reason = str(error)
    if engine.strategy.agree(int(bool(reason))):
        raise _too_long(prober, limits, training=training, reason=reason or "on another rank")
    model = fit_memory_model(near_the_limit(probes), margin=limits.margin)
    most = max(2, limits.max_rows) * limits.longest
    own = min(most, _budget(prober, model, limits, training=training))
    tokens = -engine.strategy.agree(-own)
    return PhaseReport(
        tokens=tokens,
        own_tokens=own,
        limit_bytes=meter.limit_bytes,
        # XLA is asked of padded rows alone: a cell that only losses pad takes less than a position.
        cell_share=_cell_share(tracer, model, limits, tokens, training=training)
        if limits.source != "xla" or engine.passes.layout == "padded"
        else 1 + limits.margin,
        model=model,
        probes=(),
        predicted_tokens=tokens,
    )


def _cell_share(prober: Prober, model: MemoryModel, limits: SizingLimits, tokens: int, *, training: bool) -> float:
    """What a cell of `[rows, longest]` that the model does not compute takes on any rank, in positions: those that only
    losses pad, and tokens that rows have in common. A peak is convex in cells, so that the share found near the limit holds
    below it; where nothing could be probed, a cell is a position, which all probes had."""
    strategy, layout = prober.learner.engine.strategy, prober.learner.engine.passes.layout
    if layout == "padded" or limits.max_rows < 2:
        return 0.0
    found = prober.grow_uneven(limits.longest, max_positions=tokens, max_rows=limits.max_rows, training=training)
    if layout in ("prefix_shared", "auto"):
        found += prober.grow_trees(limits.longest, max_positions=tokens, max_rows=limits.max_rows, training=training)
    share = max((model.cell_share(probe) for probe in found), default=1.0)
    return strategy.agree(math.ceil((1 + limits.margin) * share * _PARTS)) / _PARTS


def _budget(prober: Prober, model: MemoryModel, limits: SizingLimits, *, training: bool) -> int:
    """This rank's, for the layouts that its passes may choose."""
    layout = prober.learner.engine.passes.layout
    padded = {"padded": [True], "auto": [True, False]}.get(layout, [False])
    limit = prober.meter.limit_bytes
    try:
        return min(model.token_budget(limit, limits.longest, padded=each) for each in padded)
    except MemoryLimitError as error:
        # The longest row was probed and did fit, but not with the margin.
        if prober.learner.engine.strategy.num_ranks == 1:
            raise _too_long(prober, limits, training=training, reason=str(error)) from error
        return limits.longest


def _too_long(prober: Prober, limits: SizingLimits, *, training: bool, reason: str = "") -> MemoryLimitError:
    phase = "training" if training else "scoring"
    return MemoryLimitError(
        f"{prober.learner.engine.name}: {phase} one row of {limits.longest} tokens, the longest legal one, does not fit "
        f"{prober.meter.limit_bytes / GIB:.3g} GiB, of which {prober.meter.in_use_bytes() / GIB:.3g} GiB hold the model "
        f"and its like{f' ({reason})' if reason else ''}. Set a lower generator.max_context_length (data.max_length), "
        "model.gradient_checkpointing=true, more ranks with strategy=fsdp2, or a larger trainer.memory_budget_gb"
    )


def _is_trained(engine: ModelEngine) -> bool:
    return any(parameter.requires_grad for parameter in engine.parameters.values())


def _facts(engine: ModelEngine, limits: SizingLimits, limit_bytes: int) -> dict[str, str]:
    shapes = [(name, tuple(parameter.shape), str(parameter.dtype)) for name, parameter in engine.parameters.items()]
    passes, device = engine.passes, engine.passes.device
    return {
        "model": hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16],
        "parameters": str(sum(parameter.numel() for parameter in engine.model.parameters())),
        "type": str(passes.dtype).removeprefix("torch."),
        "recomputes": str(bool(getattr(engine.model, "is_gradient_checkpointing", False))),
        "longest": str(limits.longest),
        "max_rows": str(limits.max_rows),
        "layout": f"{passes.layout}{', merged turns' if passes.merge_turns else ''}",
        "strategy": f"{type(engine.strategy).__name__} over {engine.strategy.num_ranks}"
        + (", whole gradients" if engine.strategy.keeps_whole_gradients else ""),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "limit_bytes": str(limit_bytes),
        "margin": str(limits.margin),
        "source": limits.source,
        "torch": torch.__version__,
    }


def report_from_json(content: Mapping[str, Any]) -> SizingReport:
    """Inverse of `dataclasses.asdict` and JSON. Raises KeyError, TypeError for anything else."""

    def phase(found: Mapping[str, Any]) -> PhaseReport:
        probes = tuple(MemoryProbe(**probe) for probe in found["probes"])
        return PhaseReport(**{**found, "model": MemoryModel(**found["model"]), "probes": probes})

    training = content["training"]
    return SizingReport(
        **{
            **content,
            "forward": phase(content["forward"]),
            "training": None if training is None else phase(training),
        }
    )


def report_to_json(report: SizingReport) -> dict[str, Any]:
    """Plain values."""
    return asdict(report)
